// The table of all ops, expanded from ops.def, and what every op goes through: attributes, types, cost.
#include <algorithm>
#include <array>
#include <unordered_map>

#include "base/watch.h"
#include "ops/cost.h"
#include "ops/family.h"

namespace whale {
namespace {

struct Entry {
  OpCode code;
  const OpDef* def;
};

constexpr Entry kEntries[] = {
#define WHALE_OP(number, name) {OpCode::k_##name, &op_def_##name},
#include "ops/ops.def"
#undef WHALE_OP
};

constexpr size_t kCount = std::size(kEntries);

constexpr std::array<OpCode, kCount> kCodes = [] {
  std::array<OpCode, kCount> codes{};
  for (size_t i = 0; i < kCount; ++i) codes[i] = kEntries[i].code;
  return codes;
}();
static_assert(std::is_sorted(kCodes.begin(), kCodes.end()), "ops.def stands in order of number");

constexpr size_t kNumbers = static_cast<size_t>(kEntries[kCount - 1].code) + 1;
constexpr std::array<const OpDef*, kNumbers> kByNumber = [] {
  std::array<const OpDef*, kNumbers> table{};
  for (const Entry& e : kEntries) table[static_cast<size_t>(e.code)] = e.def;
  return table;
}();

constexpr const char* kAttrTypes[] = {"an integer", "a floating point number", "true or false",
                                      "a string",   "a list of integers",      "a list of floating point numbers"};
static_assert(std::variant_size_v<Attr> == std::size(kAttrTypes));

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// An integer where a floating point number is declared: the same one, or the caller would not learn that it is another.
double exactly(const AttrSpec& spec, int64_t value) {
  const auto real = static_cast<double>(value);
  if (real >= 0x1p63 || static_cast<int64_t>(real) != value)
    throw invalid("attribute '{}' is {}, expected a number that f64 has, such as {:.0f}", spec.name, value, real);
  return real;
}

// The value as the declared type: integers are accepted for floats, an empty list for any list.
Attr coerce(const AttrSpec& spec, Attr value) {
  const auto wanted = static_cast<size_t>(spec.type);
  if (value.index() == wanted) return value;
  if (spec.type == AttrType::kFloat)
    if (const auto* i = std::get_if<int64_t>(&value)) return exactly(spec, *i);
  if (const auto* ints = std::get_if<Ints>(&value); ints && spec.type == AttrType::kFloats) {
    std::vector<double> floats;
    for (const int64_t i : *ints) floats.push_back(exactly(spec, i));
    return floats;
  }
  if (const auto* floats = std::get_if<std::vector<double>>(&value))
    if (spec.type == AttrType::kInts && floats->empty()) return Ints{};
  throw invalid("attribute '{}' is {}, expected {}", spec.name, to_string(value), kAttrTypes[wanted]);
}

// Errors of an op's rules begin with its name.
template <class F>
auto named(const OpDef& def, F rules) {
  try {
    return rules();
  } catch (const Error& e) {
    Error whole(e.code(), fmt::format("{}: {}", def.name, e.message()));
    throw whole.with_damage(e.damage());
  }
}

void check_operands(const OpDef& def, const std::vector<bool>& present) {
  const bool variadic = !def.inputs.empty() && def.inputs.back().kind == PortKind::kVariadic;
  const size_t most = def.inputs.size();
  if (present.size() > most && !variadic)
    throw invalid("has {} operands, expected {} ({})", present.size(), most, signature(def));
  for (size_t i = 0; i < std::max(present.size(), most); ++i) {
    const PortSpec& port = def.inputs[std::min(i, most - 1)];
    const bool there = i < present.size() && present[i];
    if (there || port.kind == PortKind::kOptional) continue;
    if (port.kind == PortKind::kVariadic && i >= present.size()) continue;
    throw invalid("operand {} ('{}') is missing ({})", i, port.name, signature(def));
  }
}

size_t fixed_operands(const OpDef& def) {
  const bool variadic = !def.inputs.empty() && def.inputs.back().kind == PortKind::kVariadic;
  return def.inputs.size() - (variadic ? 1 : 0);
}

// Absent optional operands at the end are written out, so that operand i of an op always exists.
template <class T>
void pad_operands(const OpDef& def, T& operands, const typename T::value_type& absent) {
  if (const size_t fixed = fixed_operands(def); operands.size() < fixed) operands.resize(fixed, absent);
}

}  // namespace

const OpDef& def(OpCode code) {
  const auto number = static_cast<size_t>(code);
  if (number >= kNumbers || kByNumber[number] == nullptr) throw invalid("no op has number {}", number);
  return *kByNumber[number];
}

const OpDef* find_op(std::string_view name) {
  const auto it =
      std::find_if(std::begin(kEntries), std::end(kEntries), [&](const Entry& e) { return name == e.def->name; });
  return it == std::end(kEntries) ? nullptr : it->def;
}

OpCode code_of(std::string_view name) {
  for (const Entry& e : kEntries)
    if (name == e.def->name) return e.code;
  const Entry* closest = nullptr;
  size_t best = SIZE_MAX;
  for (const Entry& e : kEntries)
    if (const size_t distance = edit_distance(name.substr(0, 64), e.def->name); distance < best)
      best = distance, closest = &e;
  throw error(Code::kNotFound, "there is no op named '{}'; did you mean '{}'?", name.substr(0, 64), closest->def->name);
}

std::span<const OpCode> all_ops() { return kCodes; }

bool is_valid_op(int number) {
  return number >= 0 && static_cast<size_t>(number) < kNumbers && kByNumber[static_cast<size_t>(number)] != nullptr;
}

std::string signature(const OpDef& def) {
  std::vector<std::string> ports;
  for (const PortSpec& port : def.inputs)
    ports.push_back(std::string(port.name) + (port.kind == PortKind::kOptional   ? "?"
                                              : port.kind == PortKind::kVariadic ? "*"
                                                                                 : ""));
  return fmt::format("{}({})", def.name, fmt::join(ports, ", "));
}

AttrRole role_of(const OpDef& def, std::string_view attr) {
  const auto spec = std::find_if(def.attrs.begin(), def.attrs.end(), [&](const AttrSpec& s) { return s.name == attr; });
  return spec == def.attrs.end() ? AttrRole::kOwn : spec->role;
}

namespace {
// Every attribute is there, in its type, and no other.
bool are_complete(const OpDef& def, const Attrs& attrs) {
  return attrs.size() == def.attrs.size() && std::all_of(def.attrs.begin(), def.attrs.end(), [&](const AttrSpec& spec) {
           const auto it = attrs.find(spec.name);
           return it != attrs.end() && it->second.index() == static_cast<size_t>(spec.type);
         });
}
}  // namespace

Attrs complete_attrs(const OpDef& def, Attrs given) {
  if (are_complete(def, given)) return given;
  Attrs all;
  all.reserve(def.attrs.size());
  for (const AttrSpec& spec : def.attrs) {
    const auto it = given.find(spec.name);
    if (it != given.end()) {
      all[spec.name] = coerce(spec, std::move(it->second));
      given.erase(it);
    } else if (spec.required) {
      throw invalid("attribute '{}' is missing; expected {}", spec.name, kAttrTypes[static_cast<size_t>(spec.type)]);
    } else {
      all[spec.name] = coerce(spec, spec.fallback);
    }
  }
  if (!given.empty()) {
    std::vector<const char*> names;
    for (const AttrSpec& spec : def.attrs) names.push_back(spec.name);
    throw invalid("has no attribute '{}'; it has [{}]", given.begin()->first, fmt::join(names, ", "));
  }
  return all;
}

namespace {
// In the place of what the list held before, whose memory it takes.
void put_types(const Graph& graph, const TensorIds& ids, std::vector<TensorType>& types) {
  types.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    types[i].dtype = ids[i] == kNone ? DType::kF32 : graph.tensor(ids[i]).dtype;
    if (ids[i] == kNone)
      types[i].dims.clear();
    else
      types[i].dims = graph.tensor(ids[i]).dims;
  }
}

void put_operands(const Graph& graph, const Op& op, OpView& view) {
  view.code = op.code;
  view.attrs = &op.attrs;
  put_types(graph, op.inputs, view.inputs);
  view.present.resize(op.inputs.size());
  for (size_t i = 0; i < op.inputs.size(); ++i) view.present[i] = op.inputs[i] != kNone;
}
}  // namespace

// Whatever passes over ops asks for this, so here planning looks whether it is to stop.
void put_view(const Graph& graph, const Op& op, OpView& view) {
  Watch::look();
  put_operands(graph, op, view);
  put_types(graph, op.outputs, view.outputs);
}

OpView view_of(const Graph& graph, const Op& op) {
  OpView view;
  put_view(graph, op, view);
  return view;
}

// Where its definition asks for a view of the op, it gets one without dimensions: aliases do not follow from them.
std::vector<Alias> aliases_of(const Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  if (!d.aliases_of) return d.aliases;
  Watch::look();
  static thread_local OpView view;
  view.code = op.code, view.attrs = &op.attrs;
  view.inputs.assign(op.inputs.size(), {});
  view.present.assign(op.inputs.size(), false);
  for (size_t i = 0; i < op.inputs.size(); ++i)
    if (const TensorId id = op.inputs[i]; id != kNone)
      view.inputs[i].dtype = graph.tensor(id).dtype, view.present[i] = true;
  return d.aliases_of(view);
}

namespace {
// Of a view without results; its operands are padded.
std::vector<TensorType> infer(OpView& view) {
  const OpDef& d = def(view.code);
  return named(d, [&] {
    check_operands(d, view.present);
    Attrs completed;
    if (!are_complete(d, *view.attrs)) {
      completed = complete_attrs(d, *view.attrs);
      view.attrs = &completed;
    }
    pad_operands(d, view.inputs, TensorType{});
    pad_operands(d, view.present, false);
    std::vector<TensorType> outputs = d.infer(view);
    for (const TensorType& type : outputs) {
      if (type.dims.size() > static_cast<size_t>(kMaxRank))
        throw invalid("the result {} has rank {}; at most {} is supported", to_string(type.dims), type.dims.size(),
                      kMaxRank);
      if (element_count(type.dims) > INT64_MAX / 16) throw invalid("the result {} is too large", to_string(type.dims));
    }
    return outputs;
  });
}
}  // namespace

std::vector<TensorType> infer(OpCode code, const Attrs& attrs, const std::vector<TensorType>& inputs,
                              const std::vector<bool>& present) {
  OpView view{code, &attrs, inputs, present, {}};
  return infer(view);
}

OpCost cost_of(const OpView& view) {
  const OpDef& d = def(view.code);
  if (d.cost) return d.cost(view);
  return {output_elements(view), bytes_of(view)};
}
OpCost cost_of(const Graph& graph, const Op& op) {
  static thread_local OpView view;  // of what costs are asked is asked of all ops, often
  put_view(graph, op, view);
  return cost_of(view);
}

namespace {
void check_whole(const Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  if (d.check_whole) named(d, [&] { d.check_whole(view_of(graph, op)); });
}
}  // namespace

OpId append_op(Graph& graph, OpCode code, TensorIds inputs, Attrs attrs, ScopeId scope, std::string name) {
  const OpDef& d = def(code);
  const auto id = static_cast<OpId>(graph.ops.size());
  if (name.empty()) name = fmt::format("{}_{}", d.name, id);
  Op op;
  try {
    if (scope < 0 || static_cast<size_t>(scope) >= graph.scopes.size())
      throw invalid("{}: scope {} does not exist; the graph has {}", d.name, scope, graph.scopes.size());
    for (const TensorId input : inputs)
      if (input != kNone && (input < 0 || static_cast<size_t>(input) >= graph.tensors.size()))
        throw invalid("{}: operand is tensor {}, which does not exist; the graph has {}", d.name, input,
                      graph.tensors.size());
    op.code = code;
    op.name = name;
    op.inputs = std::move(inputs);
    op.scope = scope;
    OpView view = view_of(graph, op);
    op.attrs = named(d, [&] {
      check_operands(d, view.present);
      return complete_attrs(d, std::move(attrs));
    });
    view.outputs.clear();
    std::vector<TensorType> types = infer(view);
    pad_operands(d, op.inputs, kNone);
    check_whole(graph, op);
    if (has_flag(code, kRandom)) op.key = static_cast<uint64_t>(attr_int(op.attrs, "key"));
    for (size_t i = 0; i < types.size(); ++i) {
      Tensor t;
      t.name = i == 0 ? name
                      : fmt::format("{}.{}", name,
                                    d.outputs.empty() ? "out" : d.outputs[std::min(i, d.outputs.size() - 1)].name);
      t.dtype = types[i].dtype;
      t.dims = std::move(types[i].dims);
      t.producer = id;
      t.output = static_cast<int>(i);
      op.outputs.push_back(static_cast<TensorId>(graph.tensors.size()));
      graph.tensors.push_back(std::move(t));
    }
  } catch (Error& e) {
    e.at_op(name).at_scope(graph.scope_path(scope));
    throw;
  }
  graph.ops.push_back(std::move(op));
  return id;
}

void verify_ops(const Graph& graph) {
  OpView view;
  std::vector<TensorType> there;
  for (const Op& op : graph.ops) {
    try {
      const OpDef& d = def(op.code);
      Watch::look();
      put_operands(graph, op, view);
      put_types(graph, op.outputs, there);
      const std::vector<TensorType> types = infer(view);
      if (const size_t fixed = fixed_operands(d); op.inputs.size() < fixed)
        throw invalid("{}: has {} operands, expected {} (absent ones as {})", d.name, op.inputs.size(), fixed, kNone);
      if (!are_complete(d, op.attrs))
        throw invalid("{}: attributes are incomplete or of the wrong type; every default must be written out", d.name);
      check_whole(graph, op);
      if (types != there) {
        std::vector<std::string> want, found;
        for (const TensorType& t : types) want.push_back(to_string(t));
        for (const TensorType& t : there) found.push_back(to_string(t));
        throw invalid("{}: results are ({}), expected ({})", d.name, fmt::join(found, ", "), fmt::join(want, ", "));
      }
    } catch (Error& e) {
      e.at_op(op.name).at_scope(graph.scope_path(op.scope));
      throw;
    }
  }
}

std::string to_string(const IndexRange& range) {
  const std::string also = range.ignored ? fmt::format(" or {}", *range.ignored) : "";
  return range.limit > 0 ? fmt::format("0 to {}{}", range.limit - 1, also) : "nothing" + also;
}

IndexRange index_range(OpCode code, const Attrs& attrs, int64_t limit) {
  const IndexOperand& index = def(code).index;
  IndexRange range{limit, {}};
  if (index.ignored != nullptr) range.ignored = attr_int(attrs, index.ignored);
  if (index.or_none) range.ignored = -1;
  return range;
}

IndexRange index_range(const OpView& view) {
  return index_range(view.code, *view.attrs, element_count(def(view.code).index.of(view)));
}

std::string to_string(const TensorType& type) {
  return fmt::format("{}[{}]", name_of(type.dtype), fmt::join(type.dims, ","));
}

}  // namespace whale
