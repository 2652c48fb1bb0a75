// Variables: where they live, what updates read and write.
#include <algorithm>

#include "fault.h"

namespace whale::test {
namespace {

bool updates(const Spot& s) { return is_update(s.at()); }
bool is_variable(const Spot& s, BufferId b) {
  return b != kNone && s.buffer(storage_of(*s.program, b)).kind == BufferKind::kVariable;
}

// Operands of an update: two variables, or two gradients, of one type.
bool swap_in_update(const Spot& s, Dice& dice, bool variables, bool results) {
  BufferIds& in = s.at().in;
  std::vector<size_t> fit;
  for (size_t n = 0; n < in.size(); ++n)
    if (in[n] != kNone && is_variable(s, in[n]) == variables && s.buffer(in[n]).kind != BufferKind::kStep)
      fit.push_back(n);
  for (int tries = 0; tries < 6 && fit.size() > 1; ++tries) {
    const size_t a = fit[dice.below(std::ssize(fit))], b = fit[dice.below(std::ssize(fit))];
    if (in[a] == in[b] || !same_type(s.buffer(in[a]), s.buffer(in[b]))) continue;
    const BufferId one = storage_of(*s.program, in[a]), two = storage_of(*s.program, in[b]);
    std::swap(in[a], in[b]);
    for (BufferId& out : s.at().out)
      if (results && out != kNone && storage_of(*s.program, out) == one)
        for (BufferId& other : s.at().out)
          if (other != kNone && storage_of(*s.program, other) == two) return std::swap(out, other), true;
    if (!results) return true;
  }
  return false;
}

// The gradient of an update is that of another update.
bool other_gradient(const Spot& s, Dice& dice) {
  std::vector<BufferId*> mine, theirs;
  for (BufferId& b : s.at().in)
    if (b != kNone && !is_variable(s, b) && s.buffer(b).kind == BufferKind::kArena && !s.buffer(b).dims.empty())
      mine.push_back(&b);
  if (mine.empty()) return false;
  BufferId& g = *mine[dice.below(std::ssize(mine))];
  for (size_t k = 0; k < s.segment->instructions.size(); ++k) {
    Instruction& i = s.segment->instructions[k];
    if (!is_update(i)) continue;
    for (BufferId& b : i.in)
      if (b != kNone && b != g && !is_variable(s, b) && same_type(s.buffer(b), s.buffer(g))) theirs.push_back(&b);
  }
  if (theirs.empty()) return false;
  std::swap(g, *theirs[dice.below(std::ssize(theirs))]);
  return true;
}

bool no_update(const Spot& s, Dice&) { return erase_instruction(s), true; }

// One member of a grouped update is left out: its variable stays as it is.
bool not_scaled(const Spot& s, Dice&) {
  const std::string& name = s.at().name;
  (void)name;
  for (size_t n = 0; n < s.at().in.size(); ++n) {
    const BufferId b = s.at().in[n];
    if (b == kNone || is_variable(s, b) || s.buffer(b).kind != BufferKind::kArena || !s.buffer(b).dims.empty())
      continue;
    s.at().in[n] = kNone;  // the factor of clipping
    return true;
  }
  return false;
}

bool norm_without(const Spot& s, Dice& dice) {
  if (s.at().op() != OpCode::k_clip_factor || s.at().in.size() < 2) return false;
  s.at().in.erase(s.at().in.begin() + dice.below(std::ssize(s.at().in)));
  return true;
}
bool norm_twice(const Spot& s, Dice& dice) {
  if (s.at().op() != OpCode::k_sum_of_squares) return false;
  s.at().in.push_back(s.at().in[dice.below(std::ssize(s.at().in))]);
  return true;
}

// ---- storage shardings --------------------------------------------------------------------------------------------
bool other_storage_sharding(Plan& plan, Dice& dice, Role role,
                            const std::function<bool(const Plan&, PlanVariable&, Dice&)>& change) {
  for (int tries = 0; tries < 8; ++tries) {
    PlanVariable* v = choose(plan.variables, dice, [&](const PlanVariable& x) {
      return (x.role == Role::kState) == (role == Role::kState) &&
             std::any_of(x.storage_sharding.axes.begin(), x.storage_sharding.axes.end(),
                         [](const AxisSharding& l) { return l.placement == Placement::kShard; });
    });
    if (!v) return false;
    const Sharding before = v->storage_sharding;
    if (change(plan, *v, dice) && !(v->storage_sharding == before)) return true;
    v->storage_sharding = before;
  }
  return false;
}

bool other_sub_axis(const Plan&, PlanVariable& v, Dice& dice) {
  for (AxisSharding& l : v.storage_sharding.axes) {
    if (l.placement != Placement::kShard) continue;
    if (v.dims.size() > 1 && dice.coin())
      l.sub_axis = {static_cast<int>((l.sub_axis.dim + 1) % static_cast<int>(v.dims.size())), 1, 1};
    else
      std::swap(l.sub_axis.outer, l.sub_axis.inner);
    return true;
  }
  return false;
}
bool other_axes(const Plan& plan, PlanVariable& v, Dice&) {
  const std::vector<MeshAxis>& axes = plan.meshes[v.mesh].axes;
  for (size_t a = 0; a < axes.size(); ++a)
    for (size_t b = a + 1; b < axes.size(); ++b)
      if (axes[a].size > 1 && axes[b].size > 1 && !(v.storage_sharding.axes[a] == v.storage_sharding.axes[b]))
        return std::swap(v.storage_sharding.axes[a], v.storage_sharding.axes[b]), true;
  return false;
}
bool not_cut(const Plan&, PlanVariable& v, Dice&) {
  for (AxisSharding& l : v.storage_sharding.axes)
    if (l.placement == Placement::kShard) return l = {}, true;
  return false;
}

// Two variables of a type change places in the programs of some devices.
bool swap_variables(Plan& plan, Dice& dice) {
  Entry& entry = train_of(plan);
  Program& p = entry.programs[dice.below(std::ssize(entry.programs))];
  const auto fits = [](const Buffer& b) { return b.kind == BufferKind::kVariable && b.alias == kNone; };
  Buffer* a = choose(p.buffers, dice, fits);
  if (!a) return false;
  Buffer* b = choose(p.buffers, dice, [&](const Buffer& x) {
    return fits(x) && x.ref != a->ref && same_type(x, *a) && x.memory == a->memory;
  });
  if (!b) return false;
  const int32_t one = a->ref, two = b->ref;
  for (Buffer& x : p.buffers)
    if (x.kind == BufferKind::kVariable && (x.ref == one || x.ref == two)) x.ref = x.ref == one ? two : one;
  return true;
}

bool other_start(Plan& plan, Dice& dice) {
  PlanVariable* v = choose(plan.variables, dice, [](const PlanVariable& x) { return x.init.kind != InitKind::kZeros; });
  if (!v) return false;
  (v->init.kind == InitKind::kNormal || v->init.kind == InitKind::kUniform ? v->init.b : v->init.a) += 0.125;
  return true;
}
bool other_start_of_state(Plan& plan, Dice& dice) {
  PlanVariable* v = choose(plan.variables, dice, [](const PlanVariable& x) { return x.role != Role::kParameter; });
  if (!v || !is_float(v->dtype)) return false;
  v->init = {InitKind::kConstant, 0.01, 0, "", ""};
  return true;
}

// The running value is not what the update makes it.
bool result_elsewhere(const Spot& s, Dice& dice) {
  std::vector<BufferId*> fit;
  for (BufferId& b : s.at().out)
    if (is_variable(s, b)) fit.push_back(&b);
  if (fit.empty()) return false;
  BufferId& b = *fit[dice.below(std::ssize(fit))];
  b = add_buffer(*s.program, s.buffer(b));
  return true;
}

Fault at(const char* kind, Change change, Reach reach = Reach::kAny, Wanted wanted = updates) {
  return {kind, Catcher::kEither, [=](Plan& plan, Dice& dice) { return damage(plan, dice, reach, wanted, change); }};
}
Fault stored(const char* kind, Role role, bool (*change)(const Plan&, PlanVariable&, Dice&)) {
  return {kind, Catcher::kEither,
          [=](Plan& plan, Dice& dice) { return other_storage_sharding(plan, dice, role, change); }};
}

}  // namespace

std::vector<Fault> faults_of_variables() {
  const auto either = Catcher::kEither;
  const auto any = [](const Spot&) { return true; };
  return {
      at("an update reads other state", [](const Spot& s, Dice& d) { return swap_in_update(s, d, true, false); }),
      at("an update's variables for one another",
         [](const Spot& s, Dice& d) { return swap_in_update(s, d, true, true); }),
      at("an update's gradients exchanged", [](const Spot& s, Dice& d) { return swap_in_update(s, d, false, false); }),
      at("the gradient of another update", other_gradient),
      at("an update dropped", no_update),
      at("an update made twice",
         [](const Spot& s, Dice&) {
           Instruction again = s.at();
           again.waits = {};
           insert_instruction(s, s.index + 1, std::move(again));
           return true;
         }),
      at("an update's result elsewhere", result_elsewhere),
      at("an update without its scale", not_scaled),
      at("a norm without a tensor", norm_without, Reach::kAny, any),
      at("a norm with a tensor twice", norm_twice, Reach::kAny, any),
      stored("the sub-axis of a parameter's storage sharding", Role::kParameter, other_sub_axis),
      stored("the sub-axis of a state's storage sharding", Role::kState, other_sub_axis),
      stored("the axes of a parameter's storage sharding", Role::kParameter, other_axes),
      stored("the axes of a state's storage sharding", Role::kState, other_axes),
      stored("a parameter not cut", Role::kParameter, not_cut),
      stored("a state not cut with its parameter", Role::kState, not_cut),
      {"two variables exchanged", either, swap_variables},
      {"a parameter's initial value", either, other_start},
      {"a state's initial value", either, other_start_of_state},
  };
}

}  // namespace whale::test
