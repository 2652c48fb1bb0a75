#include "plan_case.h"

#include <algorithm>
#include <charconv>
#include <functional>

#include "base/error.h"
#include "plan_blocks.h"
#include "property_graph.h"
#include "task/strategy.h"

namespace whale::test {
namespace {

// ---- text -------------------------------------------------------------------------------------------------------
struct Field {
  const char* name;
  std::string (*write)(const PlanCase&);
  void (*read)(PlanCase&, std::string_view);
};

template <class Number>
Number number(std::string_view text) {
  Number n{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc{} || end != text.data() + text.size()) throw invalid("'{}', expected a number", text);
  return n;
}
std::vector<std::string> words(std::string_view text, char by) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == by)
      out.emplace_back();
    else
      out.back() += c;
  std::erase(out, "");
  return out;
}
template <auto kMember>
constexpr Field field(const char* name) {
  return {name, [](const PlanCase& c) { return fmt::format("{}", c.*kMember); },
          [](PlanCase& c, std::string_view text) {
            using Type = std::remove_reference_t<decltype(c.*kMember)>;
            if constexpr (std::is_same_v<Type, bool>)
              c.*kMember = text == "true";
            else if constexpr (std::is_same_v<Type, std::string>)
              c.*kMember = text;
            else
              c.*kMember = number<Type>(text);
          }};
}
const Field kFields[] = {
    {"graph", [](const PlanCase& c) { return fmt::format("{}", fmt::join(c.graph, " ")); },
     [](PlanCase& c, std::string_view text) { c.graph = words(text, ' '); }},
    field<&PlanCase::batch>("batch"),
    field<&PlanCase::devices>("devices"),
    field<&PlanCase::strategy>("strategy"),
    field<&PlanCase::kind>("kind"),
    field<&PlanCase::ranks>("ranks"),
    field<&PlanCase::micro_batches>("micro_batches"),
    field<&PlanCase::optimizer>("optimizer"),
    field<&PlanCase::zero>("zero"),
    {"state_shares", [](const PlanCase& c) { return fmt::format("{}", fmt::join(c.state_shares, ",")); },
     [](PlanCase& c, std::string_view text) {
       c.state_shares.clear();
       for (const std::string& w : words(text, ',')) c.state_shares.push_back(number<double>(w));
     }},
    field<&PlanCase::recompute>("recompute"),
    field<&PlanCase::exact>("exact"),
    field<&PlanCase::fusion>("fusion"),
    field<&PlanCase::overlap>("overlap"),
    field<&PlanCase::bucket_bytes>("bucket_bytes"),
    field<&PlanCase::steps>("steps"),
    field<&PlanCase::last>("last"),
    field<&PlanCase::evaluated>("evaluated"),
    field<&PlanCase::gradients>("gradients"),
    field<&PlanCase::sparse_updates>("sparse_updates"),
    field<&PlanCase::sliced>("sliced"),
    field<&PlanCase::matmul_chunks>("matmul_chunks"),
    field<&PlanCase::prefetch>("prefetch"),
    field<&PlanCase::offload>("offload"),
    field<&PlanCase::narrow_sums>("narrow_sums"),
    field<&PlanCase::profile>("profile"),
    field<&PlanCase::unlike>("unlike"),
};

// ---- the graph --------------------------------------------------------------------------------------------------
struct Named {
  std::string_view name;
  uint32_t word = 0;
};
Named named(std::string_view text) {
  const size_t at = text.find('#');
  if (at == text.npos) return {text, 0};
  return {text.substr(0, at), number<uint32_t>(text.substr(at + 1))};
}

// Blocks in their scopes: add(i, name, word) for each.
void walk(const std::vector<std::string>& items, GraphMaker& m,
          const std::function<void(size_t, std::string_view, uint32_t)>& add) {
  std::vector<ScopeId> open;
  size_t i = 0;
  for (const std::string& item : items) {
    if (item == "}") {
      if (open.empty()) continue;
      m.scope = open.back();
      open.pop_back();
    } else if (item.back() == '{') {
      Scope scope = parse_strategy(std::string_view(item).substr(0, item.size() - 1)).at(0);
      scope.parent = m.scope;
      open.push_back(m.scope);
      m.g.scopes.push_back(std::move(scope));
      m.scope = static_cast<ScopeId>(m.g.scopes.size()) - 1;
    } else {
      const ScopeId around = m.scope;
      Scope scope;
      scope.kind = ScopeKind::kName, scope.parent = around, scope.name = "b" + std::to_string(i);
      m.g.scopes.push_back(std::move(scope));
      m.scope = static_cast<ScopeId>(m.g.scopes.size()) - 1;
      const auto [name, word] = named(item);
      add(i++, name, word);
      m.scope = around;
    }
  }
}

void set_optimizer(Graph& g, std::string_view text) {
  Training& t = g.training;
  const auto [name, word] = named(text);
  constexpr std::pair<std::string_view, OptimizerKind> kKinds[] = {
      {"sgd", OptimizerKind::kSgd},   {"adam", OptimizerKind::kAdam},       {"adamw", OptimizerKind::kAdamW},
      {"lamb", OptimizerKind::kLamb}, {"adagrad", OptimizerKind::kAdagrad}, {"adafactor", OptimizerKind::kAdafactor}};
  Optimizer& o = t.optimizer;
  for (const auto& [known, kind] : kKinds)
    if (name == known) o.kind = kind;
  if (o.kind == OptimizerKind::kNone) throw invalid("optimizer '{}' is not known", name);
  Dice dice(word);
  const bool plain = o.kind == OptimizerKind::kSgd;
  o.learning_rate = plain ? 0.05 : 0.003;
  // Where the true gradient is zero (one key to attend to), it is rounding, which Adam would turn into full steps.
  o.epsilon = o.kind == OptimizerKind::kAdafactor ? 1e-10 : 1e-5;
  if (o.kind == OptimizerKind::kLamb) {  // whose steps are as long as the parameter, whatever the gradient
    o.weight_decay = 0.01;
    for (Variable& v : g.variables) v.decay = true;
  }
  if (word == 0) return;
  o.momentum = plain && dice.coin() ? 0.9 : 0;
  o.nesterov = o.momentum > 0 && dice.coin();
  if (dice.coin()) o.weight_decay = 0.01;
  if (dice.coin()) t.clip_norm = 0.1;
  if (dice.below(3) == 0) t.lr_schedule = {LrScheduleKind::kCosine, 2, 20, 0.1};
}

}  // namespace

std::string to_string(const PlanCase& c) {
  const PlanCase usual;
  std::string out;
  for (const Field& f : kFields)
    if (const std::string text = f.write(c); text != f.write(usual) || &f == kFields)
      out += fmt::format("{}{} {}", out.empty() ? "" : " | ", f.name, text);
  return out;
}

PlanCase parse_case(std::string_view line) {
  PlanCase c;
  for (size_t at = 0; at < line.size();) {
    const size_t end = std::min(line.find(" | ", at), line.size());
    const std::string_view part = line.substr(at, end - at);
    const size_t space = std::min(part.find(' '), part.size());
    const Field* known = nullptr;
    for (const Field& f : kFields)
      if (part.substr(0, space) == f.name) known = &f;
    if (!known) throw invalid("case '{}': no field is called '{}'", line, part.substr(0, space));
    known->read(c, part.substr(std::min(space + 1, part.size())));
    at = end + 3;
  }
  return c;
}

Graph graph_of(const PlanCase& c) {
  const bool ops =
      std::any_of(c.graph.begin(), c.graph.end(), [](const std::string& i) { return i.starts_with("op."); });
  Graph g;
  if (ops) {
    RandomGraph random(c.batch);
    walk(c.graph, random.maker(), [&](size_t, std::string_view name, uint32_t word) {
      random.add(name.starts_with("op.") ? name.substr(3) : name, word);
    });
    g = random.finish();
  } else {
    BlockGraph blocks(c.batch);
    walk(c.graph, blocks, [&](size_t i, std::string_view name, uint32_t word) {
      blocks.add(name, word, "b" + std::to_string(i) + ".");
    });
    g = blocks.finish();
  }
  g.training.precision = Precision::kFloat64;
  set_optimizer(g, c.optimizer);
  if (c.sparse_updates)
    g.training.optimizer.sparse_updates = true, g.training.optimizer.nesterov = false,
    g.training.optimizer.momentum = 0, g.training.clip_norm = 0;
  return g;
}

int64_t micro_batches_of(const PlanCase& c) {
  for (const StrategyClause& clause : parse_clauses(c.strategy.empty() ? "replica" : c.strategy))
    for (const Scope& s : clause.nest)
      if (s.kind == ScopeKind::kPipeline && s.micro_batches) return s.micro_batches;
  for (const std::string& item : c.graph)
    if (item.back() == '{')
      if (const Scope s = parse_strategy(std::string_view(item).substr(0, item.size() - 1)).at(0);
          s.kind == ScopeKind::kPipeline && s.micro_batches)
        return s.micro_batches;
  return c.micro_batches;
}

bool splits(const PlanCase& c) {
  return c.strategy.find("split") != std::string::npos ||
         std::any_of(c.graph.begin(), c.graph.end(), [](const std::string& i) { return i.starts_with("split"); });
}

std::string devices_of(const PlanCase& c) {
  return fmt::format("{}{}{}{}", c.kind, c.kind.find('@') == c.kind.npos ? ':' : '*', c.devices,
                     c.unlike > 0 ? fmt::format(" unlike {}", c.unlike) : "");
}

CompileOptions options_of(const PlanCase& c, const Graph& graph) {
  CompileOptions o;
  o.strategy = c.strategy;
  o.accumulation = micro_batches_of(c);
  o.zero = c.zero;
  o.state_shares = c.state_shares;
  o.recompute = static_cast<Recompute>(c.recompute);
  o.exact = c.exact;
  o.fusion = c.fusion;
  o.overlap = c.overlap;
  o.bucket_bytes = c.bucket_bytes;
  o.update = c.sliced ? UpdateForm::kSliced : UpdateForm::kWhole;
  o.matmul_chunks = c.matmul_chunks;
  o.prefetch = c.prefetch;
  o.offload = c.offload;
  if (c.narrow_sums) o.accumulate_dtype = DType::kF32;
  if (c.profile > 0) {
    Profile& p = o.profile;
    p.cached_bytes = p.worth_copying_bytes = p.product_rows = p.copied_bytes = p.spread = 1;
    p.worth_seconds = 0;
  }
  if (c.profile > 1) o.memory_price = 1 << 20;
  if (c.gradients)
    for (const Variable& v : graph.variables)
      if (v.role == Role::kParameter && v.trainable) o.fetch.push_back("grad:" + graph.tensor(v.tensor).name);
  return o;
}

}  // namespace whale::test
