// Which values instructions read and write.
#include <algorithm>

#include "fault.h"

namespace whale::test {
namespace {

bool is_kernel(const Spot& s) { return s.at().kind() == InstructionKind::kKernel; }

bool swap_operands(const Spot& s, Dice& dice) {
  BufferIds& in = s.at().in;
  for (int tries = 0; tries < 6 && in.size() > 1; ++tries) {
    const auto a = static_cast<size_t>(dice.below(std::ssize(in))), b = static_cast<size_t>(dice.below(std::ssize(in)));
    if (in[a] == in[b] || in[a] == kNone || in[b] == kNone || !same_type(s.buffer(in[a]), s.buffer(in[b]))) continue;
    std::swap(in[a], in[b]);
    return true;
  }
  return false;
}

// Another value of the type that this segment has made before.
bool other_operand(const Spot& s, Dice& dice) {
  BufferIds& in = s.at().in;
  const auto n = static_cast<size_t>(dice.below(std::max<std::ptrdiff_t>(std::ssize(in), 1)));
  if (in.empty() || in[n] == kNone) return false;
  BufferIds made;
  for (size_t k = 0; k < s.index; ++k)
    for (const BufferId b : s.segment->instructions[k].out)
      if (b != kNone && b != in[n] && same_type(s.buffer(b), s.buffer(in[n])) &&
          s.segment->instructions[k].queue == s.at().queue)
        made.push_back(b);
  if (made.empty()) return false;
  in[n] = made[dice.below(std::ssize(made))];
  return true;
}

bool drop_operand(const Spot& s, Dice& dice) {
  if (is_update(s.at()) || s.at().in.empty()) return false;
  BufferId& b = s.at().in[dice.below(std::ssize(s.at().in))];
  if (b == kNone) return false;
  b = kNone;
  return true;
}

bool swap_results(const Spot& s, Dice& dice) {
  BufferIds& out = s.at().out;
  for (int tries = 0; tries < 6 && out.size() > 1; ++tries) {
    const auto a = static_cast<size_t>(dice.below(std::ssize(out))),
               b = static_cast<size_t>(dice.below(std::ssize(out)));
    if (a == b || out[a] == kNone || out[b] == kNone || !same_type(s.buffer(out[a]), s.buffer(out[b]))) continue;
    std::swap(out[a], out[b]);
    return true;
  }
  return false;
}

// A kernel that does not run: its result is what lies there.
bool not_run(const Spot& s, Dice&) { return erase_instruction(s), true; }
bool run_twice(const Spot& s, Dice&) {
  Instruction again = s.at();
  again.waits = {};
  insert_instruction(s, s.index + 1, std::move(again));
  return true;
}

// ---- sums over micro-batches --------------------------------------------------------------------------------------
bool is_accumulate(const Spot& s) { return s.at().op() == OpCode::k_accumulate; }
bool overwrite(const Spot& s, Dice&) {
  s.at().as<work::Kernel>()->op = OpCode::k_stop_gradient;  // y = x
  s.at().in = {s.at().in[1]};
  return true;
}
bool add_to_another(const Spot& s, Dice& dice) {
  std::vector<Instruction>& list = s.segment->instructions;
  for (size_t k = 0; k < list.size(); ++k) {
    if (k == s.index || list[k].op() != OpCode::k_accumulate) continue;
    if (!same_type(s.buffer(list[k].in[1]), s.buffer(s.at().in[1])) || dice.coin()) continue;
    std::swap(list[k].in[1], s.at().in[1]);
    return true;
  }
  return false;
}

// ---- rounding -----------------------------------------------------------------------------------------------------
// A result goes through another dtype and back.
bool round_result(const Spot& s, Dice& dice) {
  if (s.at().out.empty() || s.at().out[0] == kNone) return false;
  const BufferId exact = s.at().out[0];
  if (s.buffer(exact).dtype != DType::kF64 || s.buffer(exact).kind != BufferKind::kArena ||
      s.buffer(exact).versions > 1 || s.buffer(exact).bytes == 0)
    return false;
  constexpr DType kNarrow[] = {DType::kBF16, DType::kF16, DType::kF32};
  Buffer like = s.buffer(exact);
  const DType narrow = kNarrow[dice.below(3)];
  like.name += ".wide";
  const BufferId wide = add_buffer(*s.program, like);
  like.name += ".narrow", like.dtype = narrow;
  const BufferId rounded = add_buffer(*s.program, like);
  read_instead(*s.program, exact, wide, s.segment, s.index);
  const auto cast = [&](BufferId from, BufferId to) {
    Instruction i;
    i.name = s.at().name + ".rounded";
    i.queue = s.at().queue, i.scope = s.at().scope, i.phase = s.at().phase;
    auto& kernel = i.work.emplace<work::Kernel>();
    kernel.op = OpCode::k_cast, kernel.samples = s.at().samples();
    kernel.attrs["dtype"] = std::string(name_of(s.buffer(to).dtype));
    i.in = {from}, i.out = {to};
    return i;
  };
  insert_instruction(s, s.index + 1, cast(rounded, wide));
  insert_instruction(s, s.index + 1, cast(exact, rounded));
  // Who waited for the result waits for the rounded one.
  for (size_t k = s.index + 3; k < s.segment->instructions.size(); ++k)
    for (Wait& w : s.segment->instructions[k].waits)
      if (w.index == static_cast<int32_t>(s.index)) w.index += 2;
  return true;
}

Fault at(const char* kind, Wanted wanted, Change change, Reach reach = Reach::kAny) {
  return {kind, Catcher::kEither, [=](Plan& plan, Dice& dice) { return damage(plan, dice, reach, wanted, change); }};
}

}  // namespace

std::vector<Fault> faults_of_values() {
  const auto forward = [](const Spot& s) { return is_kernel(s) && s.at().phase == Phase::kForward; };
  const auto recomputed = [](const Spot& s) {
    return is_kernel(s) && s.at().phase != Phase::kForward && s.at().name.find("again") != std::string::npos;
  };
  return {
      at("two operands exchanged", is_kernel, swap_operands),
      at("another operand", is_kernel, other_operand),
      at("another operand of a recomputed op", recomputed, other_operand),
      at("an operand left out", is_kernel, drop_operand),
      at("two results exchanged", is_kernel, swap_results),
      at("an instruction dropped", is_kernel, not_run),
      at("an instruction run twice", is_kernel, run_twice),
      at("a sum that is overwritten", is_accumulate, overwrite),
      at("a part added twice", is_accumulate, run_twice),
      at("a part not added", is_accumulate, not_run),
      at("two parts of sums exchanged", is_accumulate, add_to_another),
      at("a cast to another dtype", forward, round_result),
      at(
          "a cast of a gradient", [=](const Spot& s) { return is_kernel(s) && !forward(s); }, round_result),
  };
}

}  // namespace whale::test
