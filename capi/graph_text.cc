// Graphs as bytes, text, JSON and a table for people.
#include <algorithm>
#include <map>

#include "base/json.h"
#include "grad/passes.h"
#include "guard.h"
#include "handles.h"
#include "ops/op.h"
#include "schedule/schedule.h"
#include "schema/graph_file.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

constexpr const char* kScopeKinds[] = {"root",     "replica", "split", "stage",
                                       "pipeline", "cluster", "name"};          // as ScopeKind
constexpr const char* kTensorKinds[] = {"value", "input", "variable", "step"};  // as TensorKind
constexpr const char* kRoles[] = {"parameter", "state", "buffer"};              // as Role
constexpr const char* kLrSchedules[] = {"constant", "linear", "cosine", "inverse_sqrt"};
constexpr const char* kOptimizers[] = {"none", "sgd",     "adam",     "adamw",
                                       "lamb", "adagrad", "adafactor"};  // as OptimizerKind
constexpr const char* kPhases[] = {"forward", "backward", "update"};     // as Phase

template <class E, size_t N>
const char* pick(const char* const (&names)[N], E value) {
  return static_cast<size_t>(value) < N ? names[static_cast<size_t>(value)] : "?";
}

Json attributes_of(const Op& op) {
  Json out = Json::object();
  for (const auto& [name, value] : op.attrs) out[name] = std::visit([](const auto& v) { return json_value(v); }, value);
  return out;
}

Json training_of(const Training& t) {
  const Optimizer& o = t.optimizer;
  return {{"loss", t.loss},
          {"optimizer", pick(kOptimizers, o.kind)},
          {"learning_rate", o.learning_rate},
          {"accumulation", t.accumulation},
          {"clip_norm", t.clip_norm},
          {"momentum", o.momentum},
          {"nesterov", o.nesterov},
          {"beta1", o.beta1},
          {"beta2", o.beta2},
          {"epsilon", o.epsilon},
          {"weight_decay", o.weight_decay},
          {"decay_rate", o.decay_rate},
          {"clip_threshold", o.clip_threshold},
          {"lr_schedule", pick(kLrSchedules, t.lr_schedule.kind)},
          {"warmup_steps", t.lr_schedule.warmup_steps},
          {"total_steps", t.lr_schedule.total_steps},
          {"final_fraction", t.lr_schedule.final_fraction},
          {"precision", pick(kPrecisions, t.precision)}};
}

std::string graph_json(const Graph& g) {
  Json tensors = Json::array(), ops = tensors, scopes = tensors, variables = tensors, outputs = tensors;
  for (const Tensor& t : g.tensors)
    tensors.push_back({{"name", t.name},
                       {"dtype", name_of(t.dtype)},
                       {"dims", t.dims},
                       {"kind", pick(kTensorKinds, t.kind)},
                       {"producer", t.producer},
                       {"batch_dim", t.batch_dim}});
  for (const Op& op : g.ops)
    ops.push_back({{"op", def(op.code).name},
                   {"name", op.name},
                   {"inputs", op.inputs},
                   {"outputs", op.outputs},
                   {"scope", op.scope},
                   {"phase", pick(kPhases, op.phase)},
                   {"location", op.location},
                   {"attributes", attributes_of(op)},
                   {"flops", cost_of(view_of(g, op)).flops}});
  for (const Scope& s : g.scopes)
    scopes.push_back({{"kind", pick(kScopeKinds, s.kind)},
                      {"parent", s.parent},
                      {"name", s.name},
                      {"count", s.count},
                      {"shares", s.shares},
                      {"by", s.by},
                      {"factor", s.factor},
                      {"micro_batches", s.micro_batches},
                      {"schedule", read_schedule(s.schedule).name},
                      {"warmup", read_schedule(s.schedule).warmup},
                      {"virtual_stages", s.virtual_stages},
                      {"device_order", s.device_order},
                      {"devices", s.devices}});
  for (const Variable& v : g.variables) {
    const Tensor& t = g.tensor(v.tensor);
    variables.push_back({{"name", t.name},
                         {"tensor", v.tensor},
                         {"role", pick(kRoles, v.role)},
                         {"trainable", v.trainable},
                         {"decay", v.decay},
                         {"learning_rate_factor", v.learning_rate},
                         {"weight_decay", v.weight_decay ? Json(*v.weight_decay) : Json()},
                         {"elements", element_count(t.dims)}});
  }
  for (const NamedTensor& o : g.outputs) outputs.push_back({{"name", o.name}, {"tensor", o.tensor}});
  return text_of(Json{{"name", g.name},
                      {"default_strategy", g.default_strategy},
                      {"tensors", tensors},
                      {"ops", ops},
                      {"scopes", scopes},
                      {"variables", variables},
                      {"inputs", g.inputs},
                      {"outputs", outputs},
                      {"training", training_of(g.training)}});
}

// ---- the table
// --------------------------------------------------------------------------------------------------------------
struct Row {
  std::string layer, placement, output;
  int64_t parameters = 0;
  double flops = 0;
  bool same_but_name(const Row& o) const {
    return placement == o.placement && output == o.output && parameters == o.parameters && flops == o.flops;
  }
};

// The name scopes around a scope, outermost first, and the placement scopes as "replica > split".
void path_of(const Graph& g, ScopeId id, std::vector<std::string>& names, std::string& placement) {
  names.clear();
  placement.clear();
  for (; id > 0; id = g.scopes[id].parent) {
    const Scope& s = g.scopes[id];
    if (s.kind == ScopeKind::kName) {
      names.insert(names.begin(), s.name);
    } else {
      placement = pick(kScopeKinds, s.kind) + (placement.empty() ? "" : ">" + placement);
    }
  }
}

// One row per layer: ops under the same name scopes, down to `depth`, with the parameters they use first; unnamed ops:
// each a row.
std::vector<Row> layers(const Graph& g, size_t depth) {
  std::vector<Row> rows;
  std::map<std::string, size_t> row_of;
  std::vector<bool> counted(g.tensors.size());
  std::vector<std::string> names;
  std::string placement;
  for (const Op& op : g.ops) {
    path_of(g, op.scope, names, placement);
    names.resize(std::min(names.size(), depth));
    std::string layer = names.empty() ? op.name : fmt::format("{}", fmt::join(names, "."));
    const auto [at, fresh] = row_of.emplace(layer, rows.size());
    if (fresh) rows.push_back({layer, placement, {}, 0, 0});
    Row& row = rows[at->second];
    for (const TensorId id : op.inputs) {
      if (id == kNone || counted[id] || g.tensor(id).kind != TensorKind::kVariable) continue;
      counted[id] = true;
      row.parameters += element_count(g.tensor(id).dims);
    }
    if (!op.outputs.empty()) {
      const Tensor& t = g.tensor(op.outputs[0]);
      row.output = fmt::format("{} {}", name_of(t.dtype), to_string(t.dims));
    }
    row.flops += cost_of(view_of(g, op)).flops;
  }
  return rows;
}

// "block.3" -> ("block.", 3, ""): the last number of the name.
bool split_number(const std::string& s, std::string& head, int64_t& number, std::string& tail) {
  const size_t end = s.find_last_of("0123456789");
  if (end == std::string::npos) return false;
  size_t begin = end;
  while (begin > 0 && s[begin - 1] >= '0' && s[begin - 1] <= '9') --begin;
  if (end - begin > 8) return false;
  head = s.substr(0, begin), tail = s.substr(end + 1);
  number = std::stoll(s.substr(begin, end - begin + 1));
  return true;
}

// Consecutive rows that differ in one counting number only become "block.{0..11}".
std::vector<Row> fold(const std::vector<Row>& rows) {
  std::vector<Row> out;
  for (size_t i = 0; i < rows.size();) {
    std::string head, tail, h, t;
    int64_t first = 0, n = 0;
    size_t j = i + 1;
    if (split_number(rows[i].layer, head, first, tail)) {
      while (j < rows.size() && rows[j].same_but_name(rows[i]) && split_number(rows[j].layer, h, n, t) && h == head &&
             t == tail && n == first + static_cast<int64_t>(j - i)) {
        ++j;
      }
    }
    out.push_back(rows[i]);
    if (j - i > 1) {
      const auto count = static_cast<int64_t>(j - i);
      out.back().layer = fmt::format("{}{{{}..{}}}{}", head, first, first + count - 1, tail);
      out.back().parameters *= count;
      out.back().flops *= static_cast<double>(count);
    }
    i = j;
  }
  return out;
}

std::string scaled(double x) {
  constexpr const char* kUnits[] = {"", " k", " M", " G", " T", " P"};
  size_t unit = 0;
  while (x >= 999.5 && unit + 1 < std::size(kUnits)) x /= 1000, ++unit;
  return unit == 0 ? fmt::format("{:.0f}", x)
                   : fmt::format("{:.{}f}{}", x,
                                 x < 9.995   ? 2
                                 : x < 99.95 ? 1
                                             : 0,
                                 kUnits[unit]);
}

// The last `width` columns that fit, by code points; the rest becomes "~".
std::string fit(const std::string& s, size_t width) {
  const auto starts = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  size_t points = static_cast<size_t>(std::count_if(s.begin(), s.end(), starts));
  if (points <= width) return s + std::string(width - points, ' ');
  size_t i = 0;
  for (; points > width - 1; --points) {
    do ++i;
    while (i < s.size() && !starts(s[i]));
  }
  return "~" + s.substr(i);
}

std::string graph_summary(const Graph& g) {
  std::vector<Row> rows = fold(layers(g, 1));
  for (size_t depth = 2; depth <= 6; ++depth) {  // as deep as fits a screen
    std::vector<Row> deeper = fold(layers(g, depth));
    if (deeper.size() > 40) break;
    rows = std::move(deeper);
  }
  constexpr size_t kMost = 200;
  const std::string rule(100, '-');
  std::string out = fmt::format("{}\n{}\n", fit(g.name.empty() ? "graph" : g.name, 98), rule);
  out += fmt::format("{} {} {} {:>12} {:>10}\n{}\n", fit("layer", 34), fit("placement", 16), fit("output", 24),
                     "parameters", "FLOPs", rule);
  for (size_t i = 0; i < std::min(rows.size(), kMost); ++i) {
    const Row& r = rows[i];
    out += fmt::format("{} {} {} {:>12} {:>10}\n", fit(r.layer, 34), fit(r.placement, 16), fit(r.output, 24),
                       r.parameters > 0 ? scaled(static_cast<double>(r.parameters)) : "",
                       r.flops > 0 ? scaled(r.flops) : "");
  }
  if (rows.size() > kMost) out += fmt::format("... and {} more\n", rows.size() - kMost);
  int64_t parameters = 0, bytes = 0, trainable = 0;
  for (const Variable& v : g.variables) {
    const Tensor& t = g.tensor(v.tensor);
    if (v.role != Role::kParameter) continue;
    parameters += element_count(t.dims);
    bytes += element_count(t.dims) * size_of(t.dtype);
    if (v.trainable) trainable += element_count(t.dims);
  }
  double flops = 0;
  for (const Op& op : g.ops) flops += cost_of(view_of(g, op)).flops;
  out += rule + "\n";
  out += fmt::format("{} parameters ({} trained, {}B), {} ops, {} FLOPs forward for the whole batch\n",
                     scaled(static_cast<double>(parameters)), scaled(static_cast<double>(trainable)),
                     scaled(static_cast<double>(bytes)), g.ops.size(), scaled(flops));
  for (const TensorId id : g.inputs) {
    const Tensor& t = g.tensor(id);
    out += fmt::format("input {}\n", fit(fmt::format("{} {} {}", t.name, name_of(t.dtype), to_string(t.dims)), 90));
  }
  if (g.training.loss != kNone) {
    out += fmt::format("trained by {}, learning rate {}, in {}\n", pick(kOptimizers, g.training.optimizer.kind),
                       g.training.optimizer.learning_rate, pick(kPrecisions, g.training.precision));
  }
  // Padding at the ends of lines is for nobody.
  std::string trimmed;
  for (const char c : out) {
    if (c == '\n') trimmed.erase(trimmed.find_last_not_of(' ') + 1);
    trimmed += c;
  }
  return trimmed;
}

// The graph of a whole training step, by the passes that planning runs (grad/passes.h).
Graph training_graph(Graph g) {
  if (g.training.loss == kNone)
    throw error(Code::kFailedPrecondition, "graph '{}' minimizes nothing; call whale_graph_minimize", g.name);
  verify(g);  // it may not be sealed
  canonicalise(g);
  apply_precision(g);
  clean(g);
  differentiate(g);
  split_weights(g);
  add_updates(g);
  clean(g);
  assign_regions(g);
  return g;
}

std::unique_ptr<whale_graph> sealed(Graph graph) {
  auto out = std::make_unique<whale_graph>();
  out->graph = std::make_shared<Graph>(std::move(graph));
  out->sealed = true;
  return out;
}

std::unique_ptr<whale_graph> loaded(const whale_engine& engine, Graph graph, const std::string& path) {
  check_limits(engine.limits, graph);
  auto out = sealed(std::move(graph));
  out->init_files = init_files_of(engine.limits, path, "model");
  return out;
}

}  // namespace
}  // namespace whale::capi

whale_status* whale_graph_parse(whale_engine* engine, const void* data, size_t size, whale_graph** out) {
  return guard([&] {
    need(engine, "engine");
    array(static_cast<const char*>(data), size, "data");
    need(out, "out");
    check_file_bytes(engine->limits, static_cast<int64_t>(size), "a graph as bytes");
    const auto* bytes = static_cast<const uint8_t*>(data);
    *out = loaded(*engine, read_graph(bytes, checked_size(bytes, size, "the graph")), "").release();
  });
}

whale_status* whale_graph_load(whale_engine* engine, whale_str path, whale_graph** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const std::string file = nonempty(path, "path");
    const std::vector<uint8_t> bytes = read_file(file, engine->limits.file_bytes);
    try {
      *out = loaded(*engine, read_graph(bytes.data(), checked_size(bytes.data(), bytes.size(), "it")), file).release();
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("'{}': {}", brief(file), e.message()))
          .at_op(e.where().op)
          .at_scope(e.where().scope);
    }
  });
}

whale_status* whale_graph_print(const whale_graph* graph, whale_str level, whale_text* out) {
  return guard([&] {
    const Graph& g = *need(graph, "graph").graph;
    need(out, "out");
    const std::string which = text(level, "level");
    if (which == "graph" || which.empty()) {
      *out = make_text(print(g));
    } else if (which == "train") {
      *out = make_text(print(training_graph(g)));
    } else {
      throw invalid("level '{}' is unknown, expected 'graph' or 'train'", which);
    }
  });
}

whale_status* whale_graph_json(const whale_graph* graph, whale_text* out) {
  return guard([&] {
    const Graph& g = *need(graph, "graph").graph;
    need(out, "out");
    *out = make_text(graph_json(g));
  });
}

whale_status* whale_graph_summary(const whale_graph* graph, whale_text* out) {
  return guard([&] {
    const Graph& g = *need(graph, "graph").graph;
    need(out, "out");
    *out = make_text(graph_summary(g));
  });
}

whale_status* whale_graph_serialize(const whale_graph* graph, whale_bytes* out) {
  return guard([&] {
    const Graph& g = *need(graph, "graph").graph;
    need(out, "out");
    *out = make_bytes(with_checksum(serialize(g)));
  });
}

whale_status* whale_graph_save(const whale_graph* graph, whale_str path) {
  return guard([&] {
    const whale_graph& g = need(graph, "graph");
    write_to(nonempty(path, "path"), *g.graph, g.init_files);
  });
}
