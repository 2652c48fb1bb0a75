#include "plan/fault.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/watch.h"

namespace whale {
namespace {

constexpr size_t kMostOperands = 4, kMostSteps = 4;  // of a path

// Also of an op that there is not.
std::string verb_of(const Instruction& i) {
  const auto op = i.op();
  if (op && !is_valid_op(static_cast<int>(*op))) return fmt::format("op {}", static_cast<int>(*op));
  return std::string(i.verb());
}

int32_t first_device(const Entry& entry, const Program* program) {
  for (const DeviceRow& row : entry.rows)
    if (row.program >= 0 && row.program < std::ssize(entry.programs) && &entry.programs[row.program] == program)
      return row.device;
  return kNone;
}

// Who made what, and who reads it, in a program of which nothing is known to be right.
class Paths {
 public:
  // `row`: of the schedule, from which the path begins; nullptr: the last one that runs the segment.
  Paths(const Plan& plan, const Program& program, const Segment& segment, const ScheduleRow* row)
      : plan_(plan), p_(program), s_(static_cast<size_t>(&segment - program.segments.data())) {
    const auto is_own = [&](const ScheduleRow& r) { return r.segment == static_cast<int32_t>(s_); };
    size_t number = p_.schedule.size();
    while (row == nullptr && number > 0 && !is_own(p_.schedule[number - 1])) --number;
    row_ = row != nullptr ? static_cast<size_t>(row - p_.schedule.data()) : number - (number > 0);
  }

  std::vector<std::string> to(size_t k) const {
    std::vector<std::string> out;
    std::vector<BufferId> seen;
    for (const BufferId b : p_.segments[s_].instructions[k].in) {
      if (!there(b) || std::ranges::count(seen, b) || seen.size() == kMostOperands) continue;
      seen.push_back(b);
      const auto maker = maker_of(b, {row_, s_, k});
      out.push_back(fmt::format("it reads '{}', {}", buffer(b).name, source(b, maker)));
      if (seen.size() == 1) follow(maker, out);
    }
    if (std::string variable = goes_into(k); !variable.empty()) out.push_back(std::move(variable));
    for (const BufferId b : p_.segments[s_].instructions[k].out)
      if (const auto reader = there(b) ? reader_of(b, k) : std::nullopt; reader && out.size() < 2 * kMostOperands)
        out.push_back(fmt::format("'{}' is read by instruction {}", buffer(b).name, text(*reader)));
    return out;
  }

 private:
  struct Place {
    size_t row, segment, index;
  };

  bool there(BufferId b) const { return b >= 0 && b < std::ssize(p_.buffers); }
  const Buffer& buffer(BufferId b) const { return p_.buffers[b]; }
  BufferId storage(BufferId b) const { return there(buffer(b).alias) ? buffer(b).alias : b; }
  bool meet(BufferId a, BufferId b) const {
    if (!there(a) || !there(b) || storage(a) != storage(b)) return false;
    const Buffer &x = buffer(a), &y = buffer(b);
    return a == b || (x.at < y.at + y.bytes && y.at < x.at + x.bytes);
  }
  std::string text(const Place& at) const { return told(plan_, p_.segments[at.segment], at.index); }

  std::optional<size_t> last_writer(BufferId b, size_t segment, size_t before) const {
    const auto& list = p_.segments[segment].instructions;
    for (size_t k = std::min(before, list.size()); k-- > 0;)
      if (std::ranges::any_of(list[k].out, [&](BufferId o) { return meet(o, b); })) return k;
    return {};
  }
  std::optional<Place> maker_of(BufferId b, const Place& reader) const {
    if (const auto here = last_writer(b, reader.segment, reader.index)) return Place{reader.row, reader.segment, *here};
    std::vector<char> seen(p_.segments.size());
    for (size_t r = std::min(reader.row, p_.schedule.size()); r-- > 0;) {
      const auto s = static_cast<size_t>(p_.schedule[r].segment);
      if (s >= seen.size() || std::exchange(seen[s], 1)) continue;
      if (const auto there = last_writer(b, s, SIZE_MAX)) return Place{r, s, *there};
    }
    return {};
  }
  std::optional<Place> reader_of(BufferId b, size_t behind) const {
    const auto& list = p_.segments[s_].instructions;
    for (size_t k = behind + 1; k < list.size(); ++k)
      if (std::ranges::any_of(list[k].in, [&](BufferId i) { return meet(i, b); })) return Place{row_, s_, k};
    return {};
  }
  std::string source(BufferId b, const std::optional<Place>& maker) const {
    if (maker) return "of instruction " + text(*maker);
    switch (buffer(b).kind) {
      case BufferKind::kVariable: return "a variable's";
      case BufferKind::kInput: return "an input";
      case BufferKind::kStep: return "of the step";
      default: return "which no instruction before it makes";
    }
  }
  // Whether it hands on what it reads, or adds it to more of the same.
  static bool hands_on(const Instruction& i) {
    constexpr OpCode kThose[] = {OpCode::k_accumulate, OpCode::k_add,         OpCode::k_cast,
                                 OpCode::k_concat,     OpCode::k_local_slice, OpCode::k_part_view};
    const work::Kernel* kernel = i.kernel();
    return kernel == nullptr || std::ranges::count(kThose, kernel->op) > 0;
  }
  // Updates read a gradient behind its parameter: that one's name. "": the operand is none.
  std::string updated(const Instruction& i, size_t operand) const {
    const BufferId before = operand > 0 ? i.in[operand - 1] : kNone;
    if (!there(before) || buffer(before).kind != BufferKind::kVariable || !inside(buffer(before).ref)) return "";
    const PlanVariable& v = plan_.variables[buffer(before).ref];
    return v.role == Role::kParameter ? v.name : "";
  }
  bool inside(int32_t variable) const { return variable >= 0 && variable < std::ssize(plan_.variables); }

  // The parameter whose gradient, or a part of it, an instruction makes, or reads where it makes nothing, as the plan's
  // own updates say; "": of none.
  std::string goes_into(size_t k) const {
    const Instruction& first = p_.segments[s_].instructions[k];
    if (first.phase == Phase::kForward) return "";
    std::unordered_map<BufferId, std::vector<BufferId>> held;  // by storage
    const auto hold = [&](BufferId b) {
      if (!there(b)) return;
      std::vector<BufferId>& list = held[storage(b)];
      if (!std::ranges::count(list, b)) list.push_back(b);
    };
    const auto is_held = [&](BufferId b) {
      const auto list = there(b) ? held.find(storage(b)) : held.end();
      return list != held.end() && std::ranges::any_of(list->second, [&](BufferId h) { return meet(h, b); });
    };
    for (const BufferId b : first.out.empty() ? first.in : first.out) hold(b);
    std::vector<char> seen(p_.segments.size());
    for (size_t r = row_; r < p_.schedule.size(); ++r) {
      const auto s = static_cast<size_t>(p_.schedule[r].segment);
      if (s >= seen.size() || std::exchange(seen[s], 1)) continue;
      const auto& list = p_.segments[s].instructions;
      for (size_t n = s == s_ ? k : 0; n < list.size(); ++n) {
        Watch::look();
        const Instruction& i = list[n];
        const auto at = std::ranges::find_if(i.in, is_held) - i.in.begin();
        if (at == std::ssize(i.in)) continue;
        const bool updates =
            std::ranges::any_of(i.out, [&](BufferId b) { return there(b) && buffer(b).kind == BufferKind::kVariable; });
        if (updates && n == k && s == s_) return "";  // its own names say it
        if (updates) {
          const std::string name = updated(i, static_cast<size_t>(at));
          return name.empty() ? ""
                              : fmt::format("it is of the gradient of {}, which instruction {} reads", name,
                                            told(plan_, p_.segments[s], n));
        }
        if (n == k && s == s_) continue;
        if (!hands_on(i)) continue;
        const bool each = i.group() != kNone && i.in.size() == i.out.size();
        for (size_t o = 0; o < i.out.size(); ++o)
          if (!each || is_held(i.in[o])) hold(i.out[o]);
      }
    }
    return "";
  }

  // Back from the first operand to its first operand, and so on; of a sum that goes on, to what is added to it.
  void follow(std::optional<Place> at, std::vector<std::string>& out) const {
    for (size_t step = 0; at && step < kMostSteps; ++step) {
      const Instruction& i = p_.segments[at->segment].instructions[at->index];
      const auto goes_on = [&](BufferId b) {
        return i.group() == kNone && std::ranges::any_of(i.out, [&](BufferId o) { return meet(o, b); });
      };
      auto first = std::ranges::find_if(i.in, [&](BufferId b) { return there(b) && !goes_on(b); });
      if (first == i.in.end()) first = std::ranges::find_if(i.in, [&](BufferId b) { return there(b); });
      if (first == i.in.end()) return;
      const BufferId b = *first;
      at = maker_of(b, *at);
      out.push_back(fmt::format("that was made of '{}', {}", buffer(b).name, source(b, at)));
    }
  }

  const Plan& plan_;
  const Program& p_;
  size_t s_, row_ = 0;
};

}  // namespace

std::string told(const Plan& plan, const Segment& segment, size_t instruction) {
  const Instruction& i = segment.instructions[instruction];
  const std::string scope = plan.scope_path(i.scope);
  return fmt::format("{} of {}: {} '{}'{}", instruction, segment.name, verb_of(i), i.name,
                     scope.empty() ? "" : " in " + scope);
}

FaultSite site_of(const Program& program, const std::function<bool(const Instruction&)>& is_it) {
  for (const Segment& s : program.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (is_it(s.instructions[k])) return {.program = &program, .segment = &s, .instruction = k};
  return {.program = &program};
}

FaultSite site_of(const Program& program, BufferId buffer) {
  return site_of(program, [&](const Instruction& i) {
    return std::ranges::count(i.in, buffer) > 0 || std::ranges::count(i.out, buffer) > 0;
  });
}

PlanFault::PlanFault(std::string message, const Entry* of_entry, std::string what_is_found, InstructionPlace place,
                     std::vector<std::string> that_led_there)
    : Error(Code::kDataLoss, std::move(message)),
      entry(of_entry != nullptr ? of_entry->name : "all"),
      batch(of_entry != nullptr ? of_entry->batch : 0),
      found(std::move(what_is_found)),
      at(std::move(place)),
      path(std::move(that_led_there)) {
  at_device(at.device).at_op(at.instruction).at_scope(at.scope);
}

void fail_at(const Plan& plan, const Entry& entry, const FaultSite& site, const std::string& where,
             const std::string& found) {
  InstructionPlace at;
  at.device = site.device == kNone && site.program != nullptr ? first_device(entry, site.program) : site.device;
  at.micro_batch = site.micro_batch;
  std::vector<std::string> path = site.path;
  if (site.program != nullptr && site.segment != nullptr) {
    const Program& p = *site.program;
    const auto number = static_cast<int32_t>(site.segment - p.segments.data());
    at.segment = site.segment->name;
    const auto is_own = [&](const ScheduleRow& row) { return row.segment == number; };
    if (at.micro_batch == kNone && std::ranges::count_if(p.schedule, is_own) > 1)
      at.micro_batch = (site.row != nullptr ? *site.row : *std::ranges::find_if(p.schedule, is_own)).micro_batch;
    if (site.instruction < site.segment->instructions.size()) {
      const Instruction& i = site.segment->instructions[site.instruction];
      at.number = static_cast<int32_t>(site.instruction);
      at.instruction = i.name, at.verb = verb_of(i), at.scope = plan.scope_path(i.scope);
      for (std::string& step : Paths(plan, p, *site.segment, site.row).to(site.instruction))
        path.push_back(std::move(step));
    }
  }
  const std::string instruction = at.number < 0
                                      ? ""
                                      : fmt::format("segment '{}', instruction {}: {} '{}'{}: ", at.segment, at.number,
                                                    at.verb, at.instruction, at.scope.empty() ? "" : " in " + at.scope);
  throw PlanFault(fmt::format("plan '{}', entry '{}'{}: {}{}", plan.model, entry.name, where, instruction, found),
                  &entry, found, std::move(at), std::move(path));
}

void fail_at(const Plan& plan, int32_t device, const std::string& found) {
  InstructionPlace at;
  at.device = device;
  throw PlanFault(fmt::format("plan '{}': {}", plan.model, found), nullptr, found, std::move(at), {});
}

}  // namespace whale
