#include "session/restore.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <set>

#include "base/error.h"
#include "checkpoint/shards.h"
#include "data/convert.h"

namespace whale {
namespace {

constexpr size_t kBlockElements = 1 << 16;
constexpr const char* kLow = "low";  // state name of the lower halves of split weights

void join(const char* high, const char* low, char* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t h = 0, l = 0;
    std::memcpy(&h, high + 2 * i, 2);
    std::memcpy(&l, low + 2 * i, 2);
    const uint32_t bits = uint32_t{h} << 16 | l;
    std::memcpy(to + 4 * i, &bits, 4);
  }
}

void cut(const char* from, char* high, char* low, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, from + 4 * i, 4);
    const auto h = static_cast<uint16_t>(bits >> 16), l = static_cast<uint16_t>(bits);
    std::memcpy(high + 2 * i, &h, 2);
    std::memcpy(low + 2 * i, &l, 2);
  }
}

std::string state_name_of(const std::string& state) { return state.substr(state.rfind('/') + 1); }

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

}  // namespace

std::string optimizer_name(const Optimizer& optimizer) {
  switch (optimizer.kind) {
    case OptimizerKind::kNone: return "none";
    case OptimizerKind::kSgd: return optimizer.momentum != 0 ? "sgd with momentum" : "sgd";
    case OptimizerKind::kAdam: return "adam";
    case OptimizerKind::kAdamW: return "adamw";
    case OptimizerKind::kLamb: return "lamb";
    case OptimizerKind::kAdagrad: return "adagrad";
    case OptimizerKind::kAdafactor: return "adafactor";
  }
  throw internal("optimizer number {}", static_cast<int>(optimizer.kind));
}

Restoration::Restoration(const Plan& plan, const Checkpoint& checkpoint, const RankOf& mine)
    : plan_(plan), from_(checkpoint), mine_(mine) {
  match_model();
  match_state();
}

// The lower half of a weight of which the file has the upper one; null: it has the whole weight.
const StoredTensor* Restoration::low_of(const StoredTensor& weight) const {
  const StoredTensor* low = weight.dtype == DType::kBF16 ? from_.optimizer->find(weight.name + "/" + kLow) : nullptr;
  return low != nullptr && low->dtype == DType::kU16 && low->dims == weight.dims ? low : nullptr;
}

std::optional<size_t> Restoration::low_of(const PlanVariable& weight) const {
  if (weight.dtype != DType::kBF16) return {};
  for (size_t v = 0; v < plan_.variables.size(); ++v)
    if (const PlanVariable& low = plan_.variables[v];
        low.role == Role::kState && low.dtype == DType::kU16 && low.state_name == kLow && low.owner == weight.name)
      return v;
  return {};
}

void Restoration::check_type(const StoredTensors& file, const StoredTensor& stored, const Row& row) const {
  const PlanVariable& variable = plan_.variables[row.variable];
  if (stored.dims != variable.dims || !convertible(stored.dtype, variable.dtype))
    throw invalid("'{}': tensor '{}' is {} {}, this model needs {} {}", file.path(), stored.name, name_of(stored.dtype),
                  to_string(stored.dims), name_of(variable.dtype), to_string(variable.dims));
}

void Restoration::match_model() {
  const StoredTensors& file = *from_.model;
  std::map<std::string_view, size_t> names;
  for (size_t v = 0; v < plan_.variables.size(); ++v)
    if (plan_.variables[v].role != Role::kState) names.emplace(plan_.variables[v].name, v);
  for (const StoredTensor& stored : file.tensors()) {
    const auto at = names.find(stored.name);
    if (at == names.end())
      throw invalid("'{}' holds tensor '{}', which this model does not have", file.path(), stored.name);
    rows_.push_back({at->second, low_of(plan_.variables[at->second]), &stored, low_of(stored)});
    check_type(file, stored, rows_.back());
    names.erase(at);
  }
  if (!names.empty())
    throw invalid("'{}' lacks tensor '{}' ({} are missing)", file.path(), names.begin()->first, names.size());
}

// Lower halves of weights are no state of an optimizer: they went with their weights.
void Restoration::match_state() {
  std::set<const StoredTensor*> halves_stored;
  std::set<size_t> halves;
  for (const Row& row : rows_) {
    if (row.low_stored != nullptr) halves_stored.insert(row.low_stored);
    if (row.low_variable) halves.insert(*row.low_variable);
  }
  std::vector<const StoredTensor*> stored;
  for (const StoredTensor& tensor : from_.optimizer->tensors())
    if (!halves_stored.contains(&tensor)) stored.push_back(&tensor);
  std::vector<size_t> kept;
  for (size_t v = 0; v < plan_.variables.size(); ++v)
    if (plan_.variables[v].role == Role::kState && !halves.contains(v)) kept.push_back(v);
  if (kept.empty()) {
    for (const StoredTensor* tensor : stored) left_out_.push_back(tensor->name);
    return;
  }
  check_optimizer(stored, kept);
  std::map<std::string_view, size_t> names;
  for (const size_t v : kept) names.emplace(plan_.variables[v].name, v);
  const std::string own = optimizer_name(plan_.optimizer);
  for (const StoredTensor* tensor : stored) {
    const auto at = names.find(tensor->name);
    if (at == names.end())
      throw invalid("'{}' holds optimizer state '{}', which {} does not keep in this job: it trains other parameters",
                    from_.optimizer->path(), tensor->name, own);
    rows_.push_back({at->second, {}, tensor, nullptr});
    check_type(*from_.optimizer, *tensor, rows_.back());
    names.erase(at);
  }
  if (!names.empty())
    throw invalid(
        "'{}' lacks optimizer state '{}' ({} are missing), which {} keeps in this job: it trains other parameters",
        from_.optimizer->path(), names.begin()->first, names.size(), own);
}

// Where the checkpoint does not name its optimizer (older ones), the names of its state must be those of this job's.
void Restoration::check_optimizer(const std::vector<const StoredTensor*>& stored,
                                  const std::vector<size_t>& kept) const {
  const std::string own = optimizer_name(plan_.optimizer);
  std::string theirs = from_.index.meta.optimizer;
  if (theirs == own) return;
  if (theirs.empty()) {
    std::set<std::string> state_names, own_state_names;
    for (const StoredTensor* tensor : stored) state_names.insert(state_name_of(tensor->name));
    for (const size_t v : kept) own_state_names.insert(plan_.variables[v].state_name);
    if (state_names == own_state_names) return;
    theirs = state_names.empty() ? "one without state" : "one with state " + listed(state_names);
  }
  throw invalid(
      "the optimizer differs (checkpoint '{}': {}; this job: {}), and none goes on from another one's state. Train "
      "with "
      "the checkpoint's, or take its parameters alone, as initial values from '{}'",
      from_.directory, theirs, own, from_.model->path());
}

void Restoration::write_to(Machine& machine) const {
  for (const Row& row : rows_) write(machine, row);
}

// Those that have anything of what the devices here hold; halves of a weight may be cut in other ways than each other.
Wanted Restoration::wanted(const Row& row) const {
  if (mine_.ranks.empty()) return {};
  std::vector<Part> here;
  for (const std::optional<size_t> v : {std::optional(row.variable), row.low_variable})
    for (const HeldPart& held : v ? held_parts(plan_, plan_.variables[*v]) : std::vector<HeldPart>{})
      if (std::ranges::any_of(held.devices, [&](size_t d) { return mine_.ranks[d] == mine_.rank; }))
        here.push_back(held.part.part());
  return [here](const Part& piece) {
    return std::ranges::any_of(here, [&](const Part& part) { return overlap(part, piece); });
  };
}

void Restoration::verify() const {
  for (const Row& row : rows_) {
    const Wanted some = wanted(row);
    const bool state = plan_.variables[row.variable].role == Role::kState;
    (state ? from_.optimizer : from_.model)->verify(*row.stored, some);
    if (row.low_stored != nullptr) from_.optimizer->verify(*row.low_stored, some);
  }
  int next = 0;  // what nobody needs, each by one
  for (const std::string& name : left_out_)
    if (next++ % mine_.size == mine_.rank) from_.optimizer->verify(*from_.optimizer->find(name));
}

void Restoration::write(Machine& machine, const Row& row) const {
  const PlanVariable& variable = plan_.variables[row.variable];
  const bool state = variable.role == Role::kState, joined = row.low_stored != nullptr;
  const Wanted some = wanted(row);
  TensorReader blocks(state ? *from_.optimizer : *from_.model, *row.stored, some);
  std::optional<TensorReader> low_blocks;
  if (joined) low_blocks.emplace(*from_.optimizer, *row.low_stored, some);
  // Halves become the number that they are before it is converted, and are cut from an fp32 number.
  const DType from = joined ? DType::kF32 : row.stored->dtype, to = row.low_variable ? DType::kF32 : variable.dtype;
  const size_t size = static_cast<size_t>(size_of(variable.dtype));
  std::vector<char> whole(joined ? kBlockElements * 4 : 0), value(kBlockElements * static_cast<size_t>(size_of(to))),
      high(row.low_variable ? kBlockElements * 2 : 0), low(high.size());
  const auto count = static_cast<uint64_t>(element_count(variable.dims));
  for (uint64_t at = 0; at < count; at += kBlockElements) {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(kBlockElements, count - at));
    const char* read = blocks.next(n);
    const char* low_read = joined ? low_blocks->next(n) : read;
    if (read == nullptr || low_read == nullptr) continue;  // what the devices here hold is in both
    if (joined) {
      join(read, low_read, whole.data(), n);
      read = whole.data();
    }
    convert(from, read, to, value.data(), n);
    if (row.low_variable) {
      cut(value.data(), high.data(), low.data(), n);
      machine.write_variable(*row.low_variable, at * 2, low.data(), n * 2);
    }
    machine.write_variable(row.variable, at * size, row.low_variable ? high.data() : value.data(), n * size);
  }
  machine.variable_written(row.variable);
  if (row.low_variable) machine.variable_written(*row.low_variable);
  blocks.check();
  if (joined) low_blocks->check();
}

}  // namespace whale
