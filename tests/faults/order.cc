// Queues, waits, the order of instructions, and the rows of the schedule.
#include <algorithm>

#include "fault.h"
#include "plan/row_waits.h"

namespace whale::test {
namespace {

bool waits(const Spot& s) {
  return std::any_of(s.at().waits.begin(), s.at().waits.end(), [&](const Wait& w) { return w.queue != s.at().queue; });
}

bool drop_wait(const Spot& s, Dice& dice) {
  s.at().waits.erase(s.at().waits.begin() + dice.below(std::ssize(s.at().waits)));
  return true;
}

// For an earlier instruction of the same queue.
bool wait_too_early(const Spot& s, Dice& dice) {
  Wait& w = s.at().waits[dice.below(std::ssize(s.at().waits))];
  for (int32_t k = w.index; k-- > 0;)
    if (s.segment->instructions[k].queue == w.queue) return w.index = k, true;
  return false;
}

bool other_queue(const Spot& s, Dice& dice) {
  const auto to = static_cast<Queue>((static_cast<int>(s.at().queue) + 1 + dice.below(kQueues - 1)) % kQueues);
  s.at().queue = to;
  for (size_t k = s.index + 1; k < s.segment->instructions.size(); ++k)
    for (Wait& w : s.segment->instructions[k].waits)
      if (w.index == static_cast<int32_t>(s.index)) w.queue = to;
  return true;
}

// Behind the next instruction, if it needs this one's result.
bool swap_with_next(const Spot& s, Dice&) {
  std::vector<Instruction>& list = s.segment->instructions;
  const size_t k = s.index;
  if (k + 1 >= list.size() || list[k].queue != list[k + 1].queue) return false;
  bool needs = false;
  for (const BufferId b : list[k].out)
    needs |= b != kNone && std::find(list[k + 1].in.begin(), list[k + 1].in.end(), b) != list[k + 1].in.end();
  if (!needs) return false;
  std::swap(list[k], list[k + 1]);
  std::swap(list[k].waits, list[k + 1].waits);
  return true;
}

bool communicates(const Instruction& i) { return i.group() != kNone || i.link() != kNone; }

// Two collectives of one queue on some devices, where nothing else forbids it.
bool swap_collectives(const Spot& s, Dice&) {
  std::vector<Instruction>& list = s.segment->instructions;
  for (size_t k = s.index + 1; k < list.size(); ++k) {
    if (!communicates(list[k])) continue;
    if (list[k].queue != s.at().queue) return false;
    std::swap(list[s.index], list[k]);
    std::swap(list[s.index].waits, list[k].waits);
    return true;
  }
  return false;
}

// An update before the last instruction that reads the old value of what it writes.
bool update_early(const Spot& s, Dice&) {
  std::vector<Instruction>& list = s.segment->instructions;
  for (size_t k = s.index; k-- > 0;) {
    if (list[k].queue != s.at().queue) continue;
    bool reads = false;
    for (const BufferId in : list[k].in)
      for (const BufferId out : s.at().out)
        reads |= in != kNone && storage_of(*s.program, in) == storage_of(*s.program, out);
    for (const BufferId made : list[k].out)
      if (std::find(s.at().in.begin(), s.at().in.end(), made) != s.at().in.end()) return false;
    if (!reads) continue;
    Instruction reader = list[k];
    for (const Wait& w : s.at().waits)
      if (w.index > static_cast<int32_t>(k)) return false;
    const Spot before{s.program, s.segment, k};
    reader.waits.clear();
    insert_instruction(s, s.index + 1, std::move(reader));
    erase_instruction(before);
    return true;
  }
  return false;
}

// ---- votes and commits ----------------------------------------------------------------------------------------------
bool drop(const Spot& s, Dice&) {
  erase_instruction(s);
  return true;
}

void move_to(const Spot& s, size_t at) {
  Instruction moved = s.at();
  std::erase_if(moved.waits, [&](const Wait& w) { return w.index >= static_cast<int32_t>(at); });
  insert_instruction(s, at, std::move(moved));
  erase_instruction({s.program, s.segment, s.index + (at <= s.index)});
}

// Behind the first instruction that it lets write.
bool commit_late(const Spot& s, Dice&) {
  const std::vector<Instruction>& list = s.segment->instructions;
  for (size_t k = s.index + 1; k < list.size(); ++k)
    if (writes_variable(*s.program, list[k])) return move_to(s, k + 1), true;
  return false;
}

// Before the instruction that makes the loss.
bool vote_early(const Spot& s, Dice&) {
  const BufferId loss = storage_of(*s.program, s.at().in[0]);
  for (size_t k = s.index; k-- > 0;)
    for (const BufferId b : s.segment->instructions[k].out)
      if (b != kNone && storage_of(*s.program, b) == loss) return move_to(s, k), true;
  return false;
}

// On a value that is not the loss.
bool vote_on_another(const Spot& s, Dice& dice) {
  const BufferId loss = s.at().in[0];
  std::vector<BufferId> like;
  for (size_t b = 0; b < s.program->buffers.size(); ++b)
    if (const auto id = static_cast<BufferId>(b);
        storage_of(*s.program, id) != storage_of(*s.program, loss) && same_type(s.buffer(id), s.buffer(loss)))
      like.push_back(id);
  if (like.empty()) return false;
  s.at().in[0] = like[dice.below(std::ssize(like))];
  return true;
}

// ---- the schedule -------------------------------------------------------------------------------------------------
bool change_rows(Plan& plan, Dice& dice, const std::function<bool(Program&, size_t, Dice&)>& change) {
  Entry& entry = train_of(plan);
  std::vector<std::pair<Program*, size_t>> rows;
  for (Program& p : entry.programs)
    for (size_t r = 0; r < p.schedule.size() && p.schedule.size() > 1; ++r) rows.emplace_back(&p, r);
  for (int tries = 0; tries < 8 && !rows.empty(); ++tries) {
    const auto [p, r] = rows[dice.below(std::ssize(rows))];
    if (change(*p, r, dice)) return true;
  }
  return false;
}

// In every program: the rows of one segment and micro-batch.
bool everywhere(Plan& plan, Dice& dice, bool body, const std::function<void(Program&, size_t)>& change) {
  std::string name;
  int32_t u = 0;
  if (!change_rows(plan, dice, [&](Program& p, size_t r, Dice&) {
        if (p.schedule[r].whole == body) return false;
        name = base_name(p.segments[p.schedule[r].segment].name);
        u = p.schedule[r].micro_batch;
        return true;
      }))
    return false;
  for (Program& p : train_of(plan).programs)
    for (size_t r = p.schedule.size(); r-- > 0;)
      if (base_name(p.segments[p.schedule[r].segment].name) == name && p.schedule[r].micro_batch == u &&
          p.schedule[r].whole != body && p.schedule.size() > 1)
        change(p, r);
  return true;
}

// What else the rows say is of those that follow each other now.
void erase_row(Program& p, size_t r) {
  p.schedule.erase(p.schedule.begin() + static_cast<std::ptrdiff_t>(r));
  add_row_waits(p);
}
void double_row(Program& p, size_t r) {
  const ScheduleRow row = p.schedule[r];
  p.schedule.insert(p.schedule.begin() + static_cast<std::ptrdiff_t>(r), row);
  add_row_waits(p);
}

bool other_micro_batch(Program& p, size_t r, Dice& dice) {
  std::vector<int32_t> others;
  for (const ScheduleRow& row : p.schedule)
    if (!row.whole && row.micro_batch != p.schedule[r].micro_batch) others.push_back(row.micro_batch);
  if (p.schedule[r].whole || others.empty()) return false;
  p.schedule[r].micro_batch = others[dice.below(std::ssize(others))];
  return true;
}

bool swap_rows(Program& p, size_t r, Dice& dice) {
  const auto other = static_cast<size_t>(dice.below(std::ssize(p.schedule)));
  const ScheduleRow &a = p.schedule[r], &b = p.schedule[other];
  if (a.segment == b.segment) return false;  // sums do not care
  std::swap(p.schedule[r], p.schedule[other]);
  add_row_waits(p);
  return true;
}

// One of the waits for the row before is gone, or for something earlier.
bool change_row_waits(Program& p, size_t r, const std::function<bool(RowWaits&)>& change) {
  if (p.schedule[r].waits == kNone) return false;
  RowWaits waits = p.row_waits[p.schedule[r].waits];
  if (!change(waits)) return false;
  p.schedule[r].waits = static_cast<int32_t>(p.row_waits.size());
  p.row_waits.push_back(std::move(waits));
  return true;
}
bool drop_row_wait(Program& p, size_t r, Dice& dice) {
  return change_row_waits(p, r, [&](RowWaits& waits) {
    waits.erase(waits.begin() + dice.below(std::ssize(waits)));
    return true;
  });
}
bool row_wait_too_early(Program& p, size_t r, Dice& dice) {
  return change_row_waits(p, r, [&](RowWaits& waits) {
    Wait& on = waits[dice.below(std::ssize(waits))].on;
    const Segment& before = p.segments[p.schedule[r - 1].segment];
    for (int32_t k = on.index; k-- > 0;)
      if (before.instructions[k].queue == on.queue) return on.index = k, true;
    return false;
  });
}

bool other_version(Program& p, size_t r, Dice& dice) {
  int32_t versions = 1;
  for (const Buffer& b : p.buffers) versions = std::max(versions, b.versions);
  if (versions < 2 || p.schedule[r].whole) return false;
  p.schedule[r].version = static_cast<int32_t>((p.schedule[r].version + 1 + dice.below(versions - 1)) % versions);
  return true;
}

std::function<bool(Plan&, Dice&)> at(Reach reach, Wanted wanted, Change change) {
  return [=](Plan& plan, Dice& dice) { return damage(plan, dice, reach, wanted, change); };
}
std::function<bool(Plan&, Dice&)> row(bool (*change)(Program&, size_t, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return change_rows(plan, dice, change); };
}

}  // namespace

std::vector<Fault> faults_of_order() {
  using enum Reach;
  const auto either = Catcher::kEither, verifier = Catcher::kVerifier;
  const auto any = [](const Spot&) { return true; };
  const auto talks = [](const Spot& s) { return communicates(s.at()); };
  const auto updates = [](const Spot& s) { return is_update(s.at()); };
  const auto commits = [](const Spot& s) { return s.at().kind() == InstructionKind::kCommit; };
  const auto votes = [](const Spot& s) { return s.at().kind() == InstructionKind::kVote; };
  return {
      {"a missing wait", verifier, at(kAny, waits, drop_wait)},
      {"a wait for an earlier instruction", verifier, at(kAny, waits, wait_too_early)},
      {"another queue", verifier, at(kAny, any, other_queue)},
      {"an instruction before its operand", either, at(kAny, any, swap_with_next)},
      {"the order of two collectives", verifier, at(kOne, talks, swap_collectives)},
      {"an update before the last read", verifier, at(kAny, updates, update_early)},
      {"no commit", verifier, at(kAny, commits, drop)},
      {"a commit behind what it lets write", verifier, at(kAny, commits, commit_late)},
      {"no vote", verifier, at(kAny, votes, drop)},
      {"a vote before the loss", verifier, at(kAny, votes, vote_early)},
      {"a vote on another value", verifier, at(kAny, votes, vote_on_another)},
      {"a schedule row missing", either, [](Plan& p, Dice& d) { return everywhere(p, d, true, erase_row); }},
      {"a schedule row doubled", either, [](Plan& p, Dice& d) { return everywhere(p, d, true, double_row); }},
      {"no prologue or epilogue", either, [](Plan& p, Dice& d) { return everywhere(p, d, false, erase_row); }},
      {"a prologue or epilogue doubled", either, [](Plan& p, Dice& d) { return everywhere(p, d, false, double_row); }},
      {"a schedule row with another micro-batch", either, row(other_micro_batch)},
      {"two schedule rows exchanged", either, row(swap_rows)},
      {"a missing wait for the row before", verifier, row(drop_row_wait)},
      {"a wait for less of the row before", verifier, row(row_wait_too_early)},
      {"a schedule row's version", verifier, row(other_version)},
  };
}

}  // namespace whale::test
