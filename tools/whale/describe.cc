// model, inspect, plan: the commands that run nothing.
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "file.h"
#include "flight.h"
#include "models.h"
#include "pictures.h"
#include "prove.h"
#include "runner.h"

namespace tool {
namespace {

// Sizes that no computer has are refused here, so that products of them are numbers.
constexpr int64_t kMostOfASize = int64_t{1} << 40;

// Returns those that not every model reads.
std::vector<const CLI::Option*> add_model_options(CLI::App& command, ModelOptions& o) {
  const size_t before = command.get_options().size();
  const auto count = [&](const char* name, int64_t& to, const char* doc) {
    command.add_option(name, to, doc)->check(whole(1, kMostOfASize));
  };
  const auto from_zero = [&](const char* name, int64_t& to, const char* doc) {
    command.add_option(name, to, doc)->check(whole(0, kMostOfASize));
  };
  const auto number = [&](const char* name, double& to, const char* doc) {
    command.add_option(name, to, doc)->check(not_negative());
  };
  count("--layers", o.layers, "layers (resnet: depth, 6n+2 or 50)");
  count("--dim", o.dim, "features of a layer (resnet: channels of the first stage)");
  count("--heads", o.heads, "attention heads");
  count("--kv-heads", o.kv_heads, "llama: heads of keys and values, which so many queries share");
  count("--head-dim", o.head_dim, "deepseek: features of a head, without those that know its position");
  count("--seq", o.seq, "sequence length");
  count("--vocab", o.vocab, "vocabulary; 256 for bytes");
  count("--hidden", o.hidden, "features inside an MLP (default 4 x dim; mlp: 512; deepseek: of an expert)");
  count("--classes", o.classes, "classes");
  count("--image", o.image, "image height and width (m6: patches)");
  count("--norm-groups", o.norm_groups,
        "resnet: batch norm over so many parts of the batch, a multiple of the micro-batches (default 1)");
  count("--experts", o.experts, "moe-gpt, m6, deepseek: experts of a mixture");
  count("--top-k", o.top_k, "experts that a token goes to");
  command.add_option("--capacity", o.capacity, "places of an expert, as a multiple of an even share (default 1.25)")
      ->check(above_zero());
  count("--moe-every", o.moe_every, "every n-th MLP is a mixture");
  from_zero("--dense-layers", o.dense_layers, "deepseek: the first layers, which have an MLP in place of a mixture");
  from_zero("--decoder", o.decoder, "m6: decoder layers");
  number("--dropout", o.dropout, "dropout rate");
  command.add_flag("--tied", o.tied, "gpt: the output uses the embedding table");
  const auto options = command.get_options();
  const std::vector<const CLI::Option*> sizes(options.begin() + static_cast<std::ptrdiff_t>(before), options.end());
  count("--batch", o.batch, "samples a step");
  command.add_option("--optimizer", o.optimizer,
                     "sgd, split_sgd (bf16), momentum, nesterov, adam, adamw, lamb, adagrad, adafactor");
  CLI::Option* sparse_updates = command.add_flag_callback(
      "--sparse-updates", [&o] { o.sparse_updates = 1; }, "update only the rows of tables that a step looked up");
  command
      .add_flag_callback(
          "--no-sparse-updates", [&o] { o.sparse_updates = 0; }, "update whole tables")
      ->excludes(sparse_updates);
  number("--lr", o.learning_rate, "learning rate");
  number("--weight-decay", o.weight_decay, "weight decay; adafactor: not multiplied by the learning rate");
  number("--clip", o.clip, "clip gradients to this global norm; 0: no");
  count("--accumulation", o.accumulation, "micro-batches a step");
  command.add_option("--precision", o.precision, "f32, bf16, f16 or f64 (ref devices)");
  command.add_option("--parameters", o.parameters,
                     "f32, or bf16: trained parameters are kept in 16 bits alone, and so are their gradients");
  command.add_option("--lr-schedule", o.lr_schedule, "of the learning rate: constant, linear, cosine, inverse_sqrt");
  from_zero("--warmup", o.warmup, "steps of linear warm-up");
  from_zero("--total-steps", o.total_steps, "steps until the schedule ends");
  command.add_option("--strategy", o.strategy, "default strategy, such as 'replica(3, shares=[3,2,1])'");
  return sizes;
}

// A file that no plan accepts, for its micro-batches or its sparse updates, is not written.
void check_planned(whale_engine* engine, const whale_graph* graph, const ModelOptions& o) {
  if (o.sparse_updates != 1 && o.accumulation == 1) return;
  PlanArguments plan;
  plan.devices = o.precision == "f64" ? "ref:1" : "null:1";
  plan.strategy = "local";
  make_plan(engine, graph, plan);
}

// Of a file that was loaded: its checksum, where it has one, is right.
const char* checksum_line(const std::string& path) {
  return has_checksum(path)
             ? "its checksum is right"
             : "without a checksum: a changed byte could go unnoticed; libwhale writes one when it saves";
}

std::string with(const std::string& object, const char* key, nlohmann::ordered_json value) {
  auto json = nlohmann::ordered_json::parse(object);
  json[key] = std::move(value);
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
std::string with_checksum(const std::string& object, const std::string& path) {
  return with(object, "checksum", has_checksum(path));
}

}  // namespace

void add_model(CLI::App& app) {
  auto* command = app.add_subcommand("model", "write a model file");
  struct State {
    std::string name, out;
    ModelOptions options;
    bool list = false;
  };
  auto state = std::make_shared<State>();
  command->add_option("NAME", state->name, "one of the models below")->required();
  command->add_option("-o,--output", state->out, "the file to write, such as gpt.whale")->required();
  const std::vector<const CLI::Option*> sizes = add_model_options(*command, state->options);
  std::string models = "Models, with their defaults; docs/models.md has strategies for each:\n";
  for (const ModelRow& row : model_rows()) {
    std::string name = row.name;
    name.resize(16, ' ');
    models += "  " + name + row.doc + "\n";
  }
  command->footer(models);
  command->callback([state, sizes] {
    check_target(state->out, "--output");
    const Engine engine = make_engine();
    const ModelRow& row = find_model(state->name);
    std::vector<std::string> given;
    for (const CLI::Option* size : sizes)
      if (size->count() > 0) given.push_back(size->get_name());
    check_reads(row, state->options, given);
    const GraphHandle graph = build_model(engine.get(), row, state->options);
    const ModelOptions options = merge(state->options, row.defaults);
    check_planned(engine.get(), graph.get(), options);
    check(whale_graph_save(graph.get(), str(state->out)));
    if (options.optimizer == "split_sgd" && options.precision != "bf16")
      std::fprintf(stderr,
                   "whale: --optimizer split_sgd splits weights in bf16, and this model is %s: it trains by plain sgd "
                   "unless it is planned with --precision bf16\n",
                   options.precision.c_str());
    std::printf("%s\n", text(whale_graph_summary, static_cast<const whale_graph*>(graph.get())).c_str());
    std::printf("wrote %s\n", state->out.c_str());
  });
}

void add_inspect(CLI::App& app) {
  auto* command = app.add_subcommand(
      "inspect", "show a model, a plan or flight records; check a checkpoint and show what it holds");
  struct State {
    std::vector<std::string> paths;
    std::string path, level;
    bool json = false;
  };
  auto state = std::make_shared<State>();
  command
      ->add_option("FILE", state->paths,
                   "a .whale or a .plan file, the directory of a checkpoint, or the flight records of a job's ranks")
      ->required();
  command->add_option("--level", state->level,
                      "of a model or plan: summary (default), graph (every op), train (with backward and update), plan "
                      "(every instruction)");
  command->add_flag("--json", state->json, "as JSON");
  command->callback([state] {
    state->path = state->paths[0];
    if (state->paths.size() > 1 && (is_directory(state->path) || !is_flight_record(state->path)))
      throw Failure("'" + shown(state->paths[1]) +
                    "' is one argument too many: several files are shown where they are flight records");
    if (!state->level.empty() && (state->json || is_directory(state->path)))
      throw Failure(state->json
                        ? "--json shows everything: leave --level out"
                        : "'" + shown(state->path) + "' is a directory: a checkpoint has no levels, leave --level out");
    if (is_directory(state->path)) {
      std::printf(
          "%s\n",
          text(state->json ? whale_checkpoint_inspect_json : whale_checkpoint_inspect, str(state->path)).c_str());
      return;
    }
    const std::string& level = state->level;
    if (!level.empty() && level != "summary" && level != "graph" && level != "train" && level != "plan")
      throw Failure("--level is '" + shown(level) + "', expected summary, graph, train or plan");
    const Engine engine = make_engine();
    const FileKind kind = kind_of(state->path);
    if (kind == FileKind::kPlan ? level == "graph" || level == "train" : level == "plan")
      throw Failure("--level is '" + level + "', and '" + shown(state->path) +
                    (kind == FileKind::kPlan ? "' is a plan: it has the levels summary and plan"
                                             : "' is a model: it has the levels summary, graph and train; `whale plan` "
                                               "makes a plan of it"));
    if (kind == FileKind::kPlan) {
      const Plan plan = own<Plan>(whale_plan_load, engine.get(), str(state->path));
      const auto* p = static_cast<const whale_plan*>(plan.get());
      if (state->json)
        std::printf("%s\n", with_checksum(text(whale_plan_json, p), state->path).c_str());
      else if (state->level == "plan")
        std::printf("%s\n", text(whale_plan_print, p).c_str());
      else
        std::printf("%s\n%s\n", text(whale_plan_summary, p).c_str(), checksum_line(state->path));
      return;
    }
    if (kind == FileKind::kOther && is_flight_record(state->path)) {
      if (!level.empty()) throw Failure("'" + shown(state->path) + "' is a flight record: leave --level out");
      std::printf("%s\n", (state->json ? flight_json(state->paths) : flight_text(state->paths)).c_str());
      return;
    }
    if (kind == FileKind::kOther)
      throw Failure("'" + shown(state->path) +
                    "' is neither a model nor a plan file, nor the directory of a checkpoint");
    const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine.get(), str(state->path));
    const auto* g = static_cast<const whale_graph*>(graph.get());
    if (state->json)
      std::printf("%s\n", with_checksum(text(whale_graph_json, g), state->path).c_str());
    else if (state->level.empty() || state->level == "summary")
      std::printf("%s\n%s\n", text(whale_graph_summary, g).c_str(), checksum_line(state->path));
    else
      std::printf("%s\n", text(whale_graph_print, g, str(state->level)).c_str());
  });
}

void add_precision_options(CLI::App& command, SessionArguments& a) {
  command.add_flag("--no-bf16-instructions", a.no_bf16,
                   "multiply bf16 in f32, as on processors without instructions for it");
  command.add_option("--loss-scale", a.loss_scale, "f16: of the first step, 2^-14 to 2^24 (default 65536)")
      ->check(loss_scale());
  command
      .add_option("--loss-scale-growth", a.loss_scale_growth,
                  "f16: steps without an overflow until it doubles (default 2000)")
      ->check(whole(1, INT64_MAX));
}

void add_ranks_option(CLI::App& command, SessionArguments& a) {
  command
      .add_option("--ranks", a.ranks,
                  "as so many ranks in this process, which share flat messages and nothing else: each has its run of "
                  "the devices (default 1)")
      ->check(whole(1, 4096));
}

static void print_pareto(const std::string& candidates, bool json) {
  const auto found = nlohmann::json::parse(candidates);
  const auto& front = found.at("pareto");
  if (json) {
    std::printf("%s\n", front.dump().c_str());
    return;
  }
  bool walked = true, priced = true;
  std::printf("%12s%12s  %s\n", "a step, ms", "price", "strategy");
  for (const auto& row : front) {
    const std::string options = row.at("options");
    const double price = row.at("price").get<double>();
    const bool simulated = row.at("simulated").get<bool>();
    walked &= simulated, priced &= price > 0;
    char shown[32] = "-";
    if (price > 0) std::snprintf(shown, sizeof shown, "%.4g", price);
    std::printf("%12.2f%12s  %s%s%s on %s%s\n", row.at("seconds").get<double>() * 1e3, shown,
                row.at("strategy").get<std::string>().c_str(), options.empty() ? "" : ", ", options.c_str(),
                row.at("devices_text").get<std::string>().c_str(), simulated ? "" : " *");
  }
  if (front.empty()) std::printf("none of the plans that were looked at fits and is within what was asked for\n");
  if (!walked) std::printf("* estimated: there was no time to walk them (--search-seconds), or they are too long\n");
  if (!priced) std::printf("not all devices have a price: give price_per_hour in a cluster file\n");
  if (const auto left = found.at("not_tried").get<int64_t>(); left > 0)
    std::printf("%lld were not tried: by counts many times as bad, or there was no time\n",
                static_cast<long long>(left));
}

void add_plan(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("plan", "plan a model for devices");
  struct State {
    std::string path, out;
    PlanArguments arguments;
    Pictures pictures;
    bool all = false, reshards = false, choices = false, estimate = false, candidates = false, pareto = false;
    bool json = false, prove = false;
  };
  auto state = std::make_shared<State>();
  command->add_option("MODEL", state->path, "a .whale file")->required();
  command->add_option("-o,--output", state->out, "write the plan, for `whale run`");
  add_fetch(*command, state->arguments);
  auto* all = command->add_flag("--all", state->all, "print every instruction");
  auto* reshards = command
                       ->add_flag("--reshards", state->reshards,
                                  "what moves between devices, most expensive first, and what else was legal")
                       ->excludes(all);
  command
      ->add_flag("--choices", state->choices, "how every op is cut and every value lies, with what it costs in a step")
      ->excludes(all)
      ->excludes(reshards);
  command
      ->add_flag("--estimate", state->estimate,
                 "memory and seconds of every class of devices, also where they do not have so much")
      ->excludes(all)
      ->excludes(reshards)
      ->excludes("--choices")
      ->excludes("--output");
  command
      ->add_flag(
          "--candidates", state->candidates,
          "what `--strategy auto` looks through, the best first, and why the others lose; with --json also those of "
          "which none is both faster and cheaper")
      ->excludes(all)
      ->excludes(reshards)
      ->excludes("--choices")
      ->excludes("--estimate")
      ->excludes("--output");
  for (CLI::Option* each : state->pictures.add_options(*command)) each->excludes("--estimate");
  command
      ->add_flag("--pareto", state->pareto,
                 "of the strategies that auto looks through, those of which none is both faster and cheaper")
      ->excludes(all)
      ->excludes(reshards)
      ->excludes("--choices")
      ->excludes("--estimate")
      ->excludes("--candidates")
      ->excludes("--output");
  command->add_flag("--json", state->json, "print as JSON")->excludes(all);
  command
      ->add_flag("--prove", state->prove,
                 "prove it equal to the program on one device, as `whale prove` does, print that too (with --json as "
                 "`proof`), and end with that exit code: 0 proven, 1 refuted, 3 not covered")
      ->excludes("--candidates")
      ->excludes("--pareto")
      ->excludes("--estimate");
  add_plan_options(*command, state->arguments);
  bound_proof(*command);
  command->callback([state, &exit_code] {
    if (!state->out.empty()) check_target(state->out, "--output", {state->path});
    state->pictures.check(state->path);
    const Engine engine = make_engine(state->arguments.init_dir);
    if (state->estimate || state->candidates || state->pareto) {
      if (kind_of(state->path) == FileKind::kPlan)
        throw Failure("'" + shown(state->path) + "' is a plan: what it takes is known, see it without " +
                      (state->estimate     ? "--estimate"
                       : state->candidates ? "--candidates"
                                           : "--pareto"));
      if (!state->estimate && !state->arguments.strategy.empty() && state->arguments.strategy != "auto")
        throw Failure(std::string(state->candidates ? "--candidates" : "--pareto") +
                      " looks for strategies, and --strategy '" + shown(state->arguments.strategy) +
                      "' says one: leave one of them out, or give it as --present, which looks near it");
      const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine.get(), str(state->path));
      if (state->pareto)
        return print_pareto(candidates_of(engine.get(), graph.get(), state->arguments, true), state->json);
      std::printf("%s\n", (state->estimate ? estimate_of(engine.get(), graph.get(), state->arguments, state->json)
                                           : candidates_of(engine.get(), graph.get(), state->arguments, state->json))
                              .c_str());
      return;
    }
    if (state->prove && state->json && state->reshards)
      throw Failure("--reshards as JSON is a list, in which a proof has no place: leave --prove out, or --json");
    const Plan plan = open_plan(engine.get(), state->path, state->arguments);
    const auto* p = static_cast<const whale_plan*>(plan.get());
    const std::string told = state->reshards  ? text(state->json ? whale_plan_reshards_json : whale_plan_reshards, p)
                             : state->choices ? text(state->json ? whale_plan_choices_json : whale_plan_choices, p)
                             : state->json    ? text(whale_plan_json, p)
                             : state->all     ? text(whale_plan_print, p)
                                              : text(whale_plan_summary, p);
    const bool later = state->prove && state->json;  // one object, of which the proof is a part
    if (!later) std::printf("%s\n", told.c_str());
    state->pictures.write(p);
    if (!state->out.empty()) {
      check(whale_plan_save(p, str(state->out)));
      std::fprintf(stderr, "wrote %s\n", state->out.c_str());
    }
    if (!state->prove) return;
    std::fflush(stdout);
    const Proof proof(p, state->arguments.timeout);
    std::printf("%s\n",
                (later ? with(told, "proof", nlohmann::ordered_json::parse(proof.json())) : proof.text()).c_str());
    exit_code = proof.exit_code();
  });
}

}  // namespace tool
