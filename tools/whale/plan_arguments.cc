#include "plan_arguments.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "commands.h"
#include "file.h"

namespace tool {
namespace {

constexpr const char* kTimeout = "--plan-timeout";

// whale_plan_options with what it points to.
struct Options {
  whale_plan_options c = WHALE_PLAN_OPTIONS_INIT;
  std::vector<whale_str> fetch;
  std::vector<double> shares;
  std::vector<int32_t> policies;
  std::vector<int64_t> train_batches, eval_batches;
  std::string profile, present;
};

std::vector<std::string> pieces(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

struct Choice {
  const char* name;
  int value;
};
int choose(const char* what, const std::string& given, std::initializer_list<Choice> values) {
  std::string known;
  for (const auto& [name, value] : values) {
    if (given == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw Failure("no " + std::string(what) + " '" + shown(given) + "'; there are " + known);
}
int policy_of(const std::string& given) {
  return choose(
      "recompute policy", given,
      {{"none", WHALE_RECOMPUTE_NONE}, {"selective", WHALE_RECOMPUTE_SELECTIVE}, {"full", WHALE_RECOMPUTE_FULL}});
}
int dtype_of(const char* what, const std::string& given) {
  return choose(what, given, {{"f32", WHALE_F32}, {"bf16", WHALE_BF16}, {"f16", WHALE_F16}});
}

// A field of whale_plan_options that is a number or a flag.
template <auto kField>
void number(const std::string& text, Options& to) {
  to.c.*kField = static_cast<std::remove_reference_t<decltype(to.c.*kField)>>(std::strtoll(text.c_str(), nullptr, 10));
}
template <auto kField>
void real(const std::string& text, Options& to) {
  to.c.*kField = std::strtod(text.c_str(), nullptr);
}
template <auto kField>
void flag(const std::string&, Options& to) {
  to.c.*kField = 1;
}

// The list that a field of whale_plan_options points to.
template <auto kList, auto kField, auto kCount>
void sizes(const std::string& text, Options& to) {
  std::vector<int64_t>& list = to.*kList;
  for (const std::string& size : pieces(text)) list.push_back(std::strtoll(size.c_str(), nullptr, 10));
  to.c.*kField = list.data(), to.c.*kCount = list.size();
}

enum class Kind { kText, kFlag, kNumber, kReal, kList, kNumbers, kSizes };
struct Row {
  const char* name;
  const char* help;
  Kind kind;
  int64_t most;  // of a number
  void (*read)(const std::string& text, Options& to);
};
using O = whale_plan_options;
const Row kRows[] = {
    {"accumulation", "micro-batches a step; default: the model's", Kind::kNumber, INT32_MAX, number<&O::accumulation>},
    {"bucket-bytes", "size of gradient buckets", Kind::kNumber, INT64_MAX, number<&O::bucket_bytes>},
    {"zero", "ZeRO: 1 cuts optimizer state over replicas, 2 gradients too, 3 parameters too", Kind::kNumber, 3,
     number<&O::zero>},
    {"state-shares", "of state that is cut: a weight per replica, joined by commas", Kind::kNumbers, 0,
     [](const std::string& text, Options& to) {
       for (const std::string& share : pieces(text)) to.shares.push_back(std::strtod(share.c_str(), nullptr));
       to.c.state_shares = to.shares.data(), to.c.state_share_count = to.shares.size();
     }},
    {"recompute",
     "none, selective, full: activations computed again, not kept; or one for each stage, joined by commas",
     Kind::kList, 0,
     [](const std::string& text, Options& to) {
       for (const std::string& policy : pieces(text)) to.policies.push_back(policy_of(policy));
       if (to.policies.size() == 1)
         to.c.recompute = to.policies[0];
       else
         to.c.stage_recompute = to.policies.data(), to.c.stage_recompute_count = to.policies.size();
     }},
    {"offload", "what waits in the host's memory: state, gradients, parameters, activations, joined by commas",
     Kind::kText, 0, [](const std::string& text, Options& to) { to.c.offload = str(text); }},
    {"gradient-dtype", "f32, bf16, f16: what replicas sum gradients in", Kind::kText, 0,
     [](const std::string& text, Options& to) { to.c.gradient_dtype = dtype_of("gradient dtype", text); }},
    {"accumulate-dtype", "f32, bf16, f16: what gradients are summed in over micro-batches", Kind::kText, 0,
     [](const std::string& text, Options& to) { to.c.accumulate_dtype = dtype_of("accumulate dtype", text); }},
    {"update", "auto, whole, sliced: replicas update everything, or their slice and gather", Kind::kText, 0,
     [](const std::string& text, Options& to) {
       to.c.update =
           choose("update", text,
                  {{"auto", WHALE_UPDATE_BY_COST}, {"whole", WHALE_UPDATE_WHOLE}, {"sliced", WHALE_UPDATE_SLICED}});
     }},
    {"matmul-chunks", "of products beside their collective; 0: by cost, 1: none", Kind::kNumber, INT32_MAX,
     number<&O::matmul_chunks>},
    {"prefetch", "ZeRO 3: gathers of parameters ahead of the one that is read; 0: by the cost model", Kind::kNumber,
     INT32_MAX, number<&O::prefetch>},
    {"train-batches", "other batch sizes that steps will have, planned ahead, joined by commas", Kind::kSizes, 0,
     sizes<&Options::train_batches, &O::train_batches, &O::train_batch_count>},
    {"eval-batches", "batch sizes that evaluations will have, planned ahead, joined by commas", Kind::kSizes, 0,
     sizes<&Options::eval_batches, &O::eval_batches, &O::eval_batch_count>},
    {"profile", "a file of what was measured, as `whale profile -o FILE` or `whale devices --probe -o FILE` writes it",
     Kind::kText, 0,
     [](const std::string& text, Options& to) {
       if (read_file(text).find_first_not_of(" \t\r\n") == std::string::npos)
         throw Failure("--profile " + text + ": the file is empty; `whale profile -o FILE` writes one");
       to.profile = "file:" + text;
       to.c.profile = str(to.profile);
     }},
    {"objective", "of strategy auto: throughput, price (of a step)", Kind::kText, 0,
     [](const std::string& text, Options& to) {
       to.c.objective =
           choose("objective", text, {{"throughput", WHALE_OBJECTIVE_THROUGHPUT}, {"price", WHALE_OBJECTIVE_PRICE}});
     }},
    {"budget", "of strategy auto: what a step may cost", Kind::kReal, 0, real<&O::most_price>},
    {"min-throughput", "of strategy auto: samples a second at least", Kind::kReal, 0, real<&O::least_throughput>},
    {"search-seconds", "that strategy auto may search, about (default 10)", Kind::kReal, 0, real<&O::search_seconds>},
    {"present", "of strategy auto: the strategy that the model has now; only what is near it is looked at", Kind::kText,
     0, [](const std::string& text, Options& to) { to.present = text, to.c.present = str(to.present); }},
    {"adasum", "combine the gradients of replicas by Adasum", Kind::kFlag, 0, flag<&O::adasum>},
    {"exact", "bitwise equal for any replicas of whole micro-batches, pipeline, ZeRO", Kind::kFlag, 0, flag<&O::exact>},
    {"no-overlap", "communicate on the compute queue, for comparison", Kind::kFlag, 0, flag<&O::no_overlap>},
    {"no-fusion", "no fusion groups, for comparison", Kind::kFlag, 0, flag<&O::no_fusion>},
};

void add(CLI::App& command, PlanArguments& a, const Row& row) {
  const std::string option = "--" + std::string(row.name);
  const auto one = [&a, &row](const std::string& text) { a.given[row.name] = text; };
  const auto several = [&a, &row](const std::vector<std::string>& texts) {
    std::string all;
    for (const std::string& text : texts) all += (all.empty() ? "" : ",") + text;
    a.given[row.name] = all;
  };
  const auto list = [&] {
    return command.add_option_function<std::vector<std::string>>(option, several, row.help)
        ->delimiter(',')
        ->allow_extra_args(false);
  };
  switch (row.kind) {
    case Kind::kFlag:
      command.add_flag_callback(
          option, [&a, &row] { a.given[row.name] = ""; }, row.help);
      break;
    case Kind::kText: command.add_option_function<std::string>(option, one, row.help); break;
    case Kind::kNumber:
      command.add_option_function<std::string>(option, one, row.help)->check(whole(0, row.most))->type_name("INT");
      break;
    case Kind::kReal:
      command.add_option_function<std::string>(option, one, row.help)->check(above_zero())->type_name("FLOAT");
      break;
    case Kind::kList: list(); break;
    case Kind::kNumbers: list()->check(not_negative())->type_name("FLOAT"); break;
    case Kind::kSizes: list()->check(whole(1, INT64_MAX))->type_name("INT"); break;
  }
}

// use(engine, graph, cluster, options) of the arguments.
template <class Use>
auto with_options(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments, Use use) {
  const Cluster cluster = own<Cluster>(whale_cluster_create, engine, str(arguments.devices));
  Options options;
  options.c.strategy = str(arguments.strategy);
  for (const std::string& name : arguments.fetch) options.fetch.push_back(str(name));
  options.c.fetch = options.fetch.data(), options.c.fetch_count = options.fetch.size();
  options.c.precision = precision_of(arguments.precision);
  for (const Row& row : kRows)
    if (const auto it = arguments.given.find(row.name); it != arguments.given.end()) row.read(it->second, options);
  options.c.timeout_seconds = arguments.timeout, options.c.ranks = arguments.ranks;
  return use(engine, graph, static_cast<const whale_cluster*>(cluster.get()), &options.c);
}

}  // namespace

std::vector<std::string> names_in(const std::string& text) {
  std::vector<std::string> names(1);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ',')
      names.emplace_back();
    else if (text[i] == '\\' && i + 1 < text.size() && (text[i + 1] == ',' || text[i + 1] == '\\'))
      names.back() += text[++i];
    else
      names.back() += text[i];
  }
  return names;
}

std::string as_argument(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) {
    if (!out.empty()) out += ',';
    for (const char c : name) out += c == ',' || c == '\\' ? std::string{'\\', c} : std::string{c};
  }
  const auto plain = [](unsigned char c) { return std::isalnum(c) || (c && std::strchr("_./:,+-", c)); };
  if (std::all_of(out.begin(), out.end(), plain)) return out;
  std::string quoted = "'";
  for (const char c : out) quoted += c == '\'' ? "'\\''" : std::string{c};
  return quoted + "'";
}

void add_plan_options(CLI::App& command, PlanArguments& a) {
  const size_t before = command.get_options().size();
  command.add_option(
      "--devices,--cluster", a.devices,
      "cpu:N, cpu@CORES*K, ref:N, lag:N, null:N, joined by commas; with their memory null-80GB:N (default cpu:1)");
  command.add_option("--strategy", a.strategy, "of unannotated ops, such as 'replica(3, shares=[3,2,1])'");
  command.add_option("--precision", a.precision, "f32, bf16, f16, f64 (ref devices); default: the model's");
  for (const Row& row : kRows) add(command, a, row);
  const auto options = command.get_options();
  const std::vector<CLI::Option*> fixed(options.begin() + static_cast<std::ptrdiff_t>(before), options.end());
  a.fixed = [fixed, &a] {
    std::string names = a.fetch.empty() ? "" : "--fetch";
    for (const CLI::Option* option : fixed)
      if (option->count() > 0) names += (names.empty() ? "" : ", ") + option->get_name();
    return names;
  };
  command.add_option("--trials", a.trials, "of strategy auto: run so many of the best candidates and keep the fastest")
      ->check(whole(1, 1000));
  command.add_option(kTimeout, a.timeout, "seconds that planning may take (default: any)")->check(not_negative());
  command.add_option("--init-dir", a.init_dir,
                     "folder that initial values may be read from (default: that of the model or plan file given)");
}

void add_fetch(CLI::App& command, PlanArguments& a) {
  command
      .add_option_function<std::vector<std::string>>(
          "--fetch",
          [&a](const std::vector<std::string>& texts) {
            for (const std::string& text : texts)
              for (std::string& name : names_in(text)) a.fetch.push_back(std::move(name));
          },
          "tensors that the plan hands out besides its outputs, joined by commas; grad:PARAMETER for a gradient")
      ->allow_extra_args(false);
}

void bound_proof(CLI::App& command) {
  command.get_option(kTimeout)->description("seconds that planning may take, and the proof as many (default: any)");
}

int32_t precision_of(const std::string& name) {
  if (name.empty()) return WHALE_PRECISION_DEFAULT;
  return choose("precision", name,
                {{"f32", WHALE_PRECISION_F32},
                 {"bf16", WHALE_PRECISION_BF16},
                 {"f16", WHALE_PRECISION_F16},
                 {"f64", WHALE_PRECISION_F64}});
}

Plan make_plan(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments) {
  return with_options(engine, graph, arguments, [](auto... all) { return own<Plan>(whale_plan_create, all...); });
}

std::string estimate_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments, bool json) {
  return with_options(engine, graph, arguments,
                      [&](auto... all) { return text(json ? whale_plan_estimate_json : whale_plan_estimate, all...); });
}

std::string candidates_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments, bool json) {
  return with_options(engine, graph, arguments,
                      [&](auto... all) { return text(json ? whale_plan_search_json : whale_plan_search, all...); });
}

std::string prediction_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments,
                          const std::vector<int64_t>& counts, const std::vector<int64_t>& batches) {
  return with_options(engine, graph, arguments, [&](auto... all) {
    return text(whale_plan_predict_json, all..., counts.data(), counts.size(), batches.data(), batches.size());
  });
}

std::string report_of(const whale_plan* plan, const std::vector<std::string>& traces) {
  std::vector<whale_str> list;
  for (const std::string& trace : traces) list.push_back(str(trace));
  return text(whale_plan_report_html, plan, static_cast<const whale_str*>(list.data()), list.size());
}

}  // namespace tool
