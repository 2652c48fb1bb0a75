// Attributes of ops, keys of random ops, and the numbers of the optimizer.
#include <algorithm>

#include "fault.h"

namespace whale::test {
namespace {

// Changes one attribute of these names; false: the instruction has none of them.
template <class Type>
Change attribute(std::vector<const char*> names, std::function<bool(Type&, Dice&)> change) {
  return [=](const Spot& s, Dice& dice) {
    std::vector<Type*> fit;
    for (const char* name : names)
      if (const auto at = s.attrs().find(name); at != s.attrs().end())
        if (Type* value = std::get_if<Type>(&at->second)) fit.push_back(value);
    return !fit.empty() && change(*fit[dice.below(std::ssize(fit))], dice);
  };
}

bool scale(double& x, Dice& dice) {
  constexpr double kBy[] = {0.5, 2, 1.125, 0.99, 0};
  x = x == 0 ? 0.125 : x * kBy[dice.below(5)];
  return true;
}
bool scale_a_little(double& x, Dice& dice) {
  x = x == 0 ? 0.01 : x * (dice.coin() ? 0.9 : 1.1);
  return true;
}
bool flip(bool& x, Dice&) { return x = !x, true; }
bool step(int64_t& x, Dice& dice) { return x += dice.coin() || x <= 0 ? 1 : -1, true; }

bool other_key(const Spot& s, Dice& dice) {
  auto* k = s.at().as<work::Kernel>();
  if (k == nullptr || !has_flag(k->op, kRandom)) return false;
  if (attr_int(k->attrs, "key") != 0) k->attrs["key"] = attr_int(k->attrs, "key") + 1 + dice.below(100);
  k->key += 1 + static_cast<uint64_t>(dice.below(100));
  return true;
}

bool other_decays(const Spot& s, Dice& dice) {
  Ints decays = attr_ints(s.attrs(), "decays");
  if (decays.empty() || attr_float(s.attrs(), "weight_decay") == 0) return false;
  int64_t& one = decays[dice.below(std::ssize(decays))];
  one = 1 - one;
  s.attrs()["decays"] = std::move(decays);
  return true;
}

bool other_activation(const Spot& s, Dice& dice) {
  const auto at = s.attrs().find("activation");
  if (at == s.attrs().end()) return false;
  constexpr const char* kAll[] = {"none", "relu", "gelu", "tanh", "sigmoid"};
  std::string to = kAll[dice.below(5)];
  if (Attr(to) == at->second) to = Attr(std::string("none")) == at->second ? "relu" : "none";
  at->second = std::move(to);
  return true;
}

bool other_axis(const Spot& s, Dice&) {
  const auto at = s.attrs().find("axis");
  if (at == s.attrs().end() || !std::holds_alternative<int64_t>(at->second) || s.at().in[0] == kNone) return false;
  const int64_t rank = std::ssize(s.buffer(s.at().in[0]).dims);
  if (rank < 2) return false;
  at->second = (std::get<int64_t>(at->second) + 1 + rank) % rank;
  return true;
}

bool other_op(const Spot& s, Dice& dice) {
  using enum OpCode;
  constexpr OpCode kOnes[] = {k_tanh, k_sigmoid, k_relu, k_gelu,   k_silu,
                              k_neg,  k_abs,     k_sin,  k_square, k_stop_gradient};
  constexpr OpCode kTwos[] = {k_add, k_sub, k_mul, k_maximum, k_minimum, k_squared_difference};
  const auto among = [&](auto& list) {
    const auto at = std::find(std::begin(list), std::end(list), s.at().op());
    if (at == std::end(list)) return false;
    const auto n = static_cast<int64_t>(std::size(list));
    s.at().as<work::Kernel>()->op = list[(at - std::begin(list) + 1 + dice.below(n - 1)) % n];
    return true;
  };
  return s.at().kind() == InstructionKind::kKernel && (among(kOnes) || among(kTwos));
}

// Of a fused chain: one op or operand. What is no chain any more is refused.
bool other_chain(const Spot& s, Dice& dice) {
  Ints ops = attr_ints(s.attrs(), "ops");
  if (s.at().op() != OpCode::k_fused || ops.empty()) return false;
  int64_t& x = ops[dice.below(std::ssize(ops))];
  x += x > 0 && dice.coin() ? -1 : 1;
  s.attrs()["ops"] = std::move(ops);
  return true;
}

Fault at(const char* kind, Change change, Reach reach = Reach::kAny) {
  return {kind, Catcher::kEither, [=](Plan& plan, Dice& dice) {
            return damage(
                plan, dice, reach, [](const Spot&) { return true; }, change);
          }};
}

bool optimizer_rate(Plan& plan, Dice& dice) { return scale_a_little(plan.optimizer.learning_rate, dice); }
bool step_scalar(Plan& plan, Dice& dice) {
  Entry& entry = train_of(plan);
  std::vector<Buffer*> scalars;
  for (Program& p : entry.programs)
    for (Buffer& b : p.buffers)
      if (b.kind == BufferKind::kStep) scalars.push_back(&b);
  if (scalars.empty()) return false;
  Buffer& b = *scalars[dice.below(std::ssize(scalars))];
  b.ref = static_cast<int32_t>((b.ref + 1 + dice.below(2)) % 3);
  return true;
}

}  // namespace

std::vector<Fault> faults_of_attributes() {
  const auto either = Catcher::kEither;
  return {
      at("a scale or denominator", attribute<double>({"value", "scale"}, scale)),
      at("a count", attribute<int64_t>({"count", "vocabulary", "groups"}, step)),
      at("an epsilon",
         attribute<double>({"epsilon"}, [](double& x, Dice& d) { return x *= d.coin() ? 10 : 0.1, true; })),
      at("a number of the update",
         attribute<double>({"momentum", "beta1", "beta2", "weight_decay", "max_norm"}, scale_a_little)),
      at("a form of the update", attribute<bool>({"nesterov", "decoupled", "mean"}, flip)),
      at("what decays", other_decays),
      at("where an interval begins", attribute<int64_t>({"begin", "label_begin", "row_begin", "expert_begin"}, step)),
      at("a random key", other_key),
      at("a rate of dropout", attribute<double>({"rate", "dropout"}, scale_a_little)),
      at("a flag", attribute<bool>({"causal", "transpose_a", "transpose_b", "exclusive", "reverse", "inverse",
                                    "normalize", "include_pad", "interleaved", "relu"},
                                   flip)),
      at("an activation", other_activation),
      at("an axis", other_axis),
      at("a number of an op", attribute<double>({"base", "label_smoothing", "capacity_factor"}, scale_a_little)),
      at("an integer of an op",
         attribute<int64_t>({"ignore_index", "k", "heads", "kv_heads", "capacity", "group"}, step)),
      at("another op", other_op),
      at("another op in a fused chain", other_chain),
      {"the learning rate", either, optimizer_rate},
      {"another scalar of the step", either, step_scalar},
  };
}

}  // namespace whale::test
