// Checks a Plan against what plan.h promises, without trusting how it was made: references, sizes, waits, order of
// collectives, and that no two values share bytes while both are needed (from the happens-before order of the streams,
// not from the planner's lives).
#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"
#include "plan/plan.h"

namespace whale {
namespace {

struct Context {
  const Plan& plan;
  const Entry& entry;
  size_t program_number;
  const Program& program;
  [[noreturn]] void fail(const std::string& what) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}', program {}: {}", plan.model, entry.name, program_number, what);
  }
  [[noreturn]] void fail(const Segment& s, size_t k, const std::string& what) const {
    fail(fmt::format("segment '{}', instruction {} ('{}'): {}", s.name, k, s.instructions[k].name, what));
  }
};

template <class T>
bool inside(int64_t i, const std::vector<T>& list) {
  return i >= 0 && i < static_cast<int64_t>(list.size());
}

bool in_arena(const Buffer& b) { return b.kind == BufferKind::kArena || b.kind == BufferKind::kInput; }

int64_t checked_bytes(const Context& c, const Buffer& b) {
  for (const int64_t d : b.dims)
    if (d < 0) c.fail(fmt::format("buffer '{}' has a negative dimension", b.name));
  return element_count(b.dims) * size_of(b.dtype);
}

void check_buffers(const Context& c) {
  const Program& p = c.program;
  if (p.arena_bytes < 0 || p.variable_bytes < 0) c.fail("negative sizes");
  for (size_t i = 0; i < p.buffers.size(); ++i) {
    const Buffer& b = p.buffers[i];
    const int64_t bytes = checked_bytes(c, b);
    if (b.bytes != bytes) c.fail(fmt::format("buffer '{}' has {} bytes, its type {}", b.name, b.bytes, bytes));
    if (b.alias != kNone) {
      if (!inside(b.alias, p.buffers) || p.buffers[static_cast<size_t>(b.alias)].alias != kNone)
        c.fail(fmt::format("buffer '{}': bad alias", b.name));
      const Buffer& s = p.buffers[static_cast<size_t>(b.alias)];
      if (b.bytes > s.bytes || (in_arena(s) && b.offset != s.offset))
        c.fail(fmt::format("buffer '{}' does not fit its storage '{}'", b.name, s.name));
      if (in_arena(s) != in_arena(b) || (s.kind == BufferKind::kVariable && (b.kind != s.kind || b.ref != s.ref)))
        c.fail(fmt::format("buffer '{}' and its storage '{}' are of different kinds", b.name, s.name));
    }
    if (in_arena(b) && b.offset >= 0 && (b.offset % 64 || b.offset > p.arena_bytes - b.bytes))
      c.fail(fmt::format("buffer '{}' at {} is not aligned inside the arena of {} bytes", b.name, b.offset,
                         p.arena_bytes));
    if (b.kind == BufferKind::kVariable && !inside(b.ref, c.plan.variables))
      c.fail(fmt::format("buffer '{}': no variable {}", b.name, b.ref));
    if (b.kind == BufferKind::kVariable) {
      const PlanVariable& v = c.plan.variables[static_cast<size_t>(b.ref)];
      if (element_count(v.dims) != element_count(b.dims) || v.dtype != b.dtype)
        c.fail(fmt::format("buffer '{}' is not of the type of variable '{}'", b.name, v.name));
    }
    if (b.kind == BufferKind::kInput && !inside(b.ref, c.entry.inputs))
      c.fail(fmt::format("buffer '{}': no input {}", b.name, b.ref));
    if (b.kind == BufferKind::kStep && (b.ref < 0 || b.ref > static_cast<int32_t>(StepScalar::kLossScale)))
      c.fail(fmt::format("buffer '{}': no step scalar {}", b.name, b.ref));
  }
}

void check_instruction(const Context& c, const Segment& s, size_t k) {
  const Program& p = c.program;
  const Instruction& i = s.instructions[k];
  const auto is_feed = i.kind == InstructionKind::kFeed, is_fetch = i.kind == InstructionKind::kFetch;
  if (static_cast<int>(i.stream) >= kStreams) c.fail(s, k, "no such stream");
  for (const BufferId b : i.in) {
    if (b == kNone) continue;
    if (!inside(b, p.buffers)) c.fail(s, k, fmt::format("operand {} does not exist", b));
    const Buffer& buffer = p.buffers[static_cast<size_t>(b)];
    if (in_arena(buffer) && buffer.offset < 0) c.fail(s, k, fmt::format("operand '{}' has no place", buffer.name));
  }
  for (const BufferId b : i.out) {
    if (!inside(b, p.buffers)) c.fail(s, k, fmt::format("result {} does not exist", b));
    const Buffer& buffer = p.buffers[static_cast<size_t>(b)];
    if (in_arena(buffer) && buffer.offset < 0) c.fail(s, k, fmt::format("result '{}' has no place", buffer.name));
    if (buffer.kind == BufferKind::kStep) c.fail(s, k, fmt::format("writes the step scalar '{}'", buffer.name));
  }
  if (is_feed && (!inside(i.ref, c.entry.inputs) || i.out.size() != 1 || !i.in.empty()))
    c.fail(s, k, "a feed names one input and one result");
  if (is_fetch && (!inside(i.ref, c.entry.outputs) || i.in.size() != 1 || i.in[0] == kNone || !i.out.empty()))
    c.fail(s, k, "a fetch names one output and one operand");
  if (i.kind == InstructionKind::kCollective && !inside(i.ref, c.plan.groups))
    c.fail(s, k, fmt::format("no group {}", i.ref));
  if (!is_feed && !is_fetch && !is_valid_op(static_cast<int>(i.op)))
    c.fail(s, k, fmt::format("no op has number {}", static_cast<int>(i.op)));
  if ((i.kind == InstructionKind::kCollective) != (!is_feed && !is_fetch && has_flag(i.op, kCollective)))
    c.fail(s, k, "kind and op disagree");
  if (!inside(i.scope, c.plan.scopes)) c.fail(s, k, "no such scope");
  for (const WaitPoint& w : i.waits) {
    if (w.index < 0 || static_cast<size_t>(w.index) >= k)
      c.fail(s, k, fmt::format("waits for {}, which is not earlier", w.index));
    if (s.instructions[static_cast<size_t>(w.index)].stream != w.stream)
      c.fail(s, k, fmt::format("waits for {} on another stream than its own", w.index));
  }
}

// clock[k][t]: the last instruction of stream t that is done before k begins; -1: none.
using Clock = std::array<int64_t, kStreams>;
std::vector<Clock> clocks_of(const Segment& s) {
  std::vector<Clock> begin(s.instructions.size());
  std::array<Clock, kStreams> now;
  for (Clock& c : now) c.fill(-1);
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    Clock& mine = now[static_cast<size_t>(i.stream)];
    for (const WaitPoint& w : i.waits) {
      const Clock& other = begin[static_cast<size_t>(w.index)];
      for (size_t t = 0; t < mine.size(); ++t) mine[t] = std::max(mine[t], other[t]);
      mine[static_cast<size_t>(w.stream)] = std::max<int64_t>(mine[static_cast<size_t>(w.stream)], w.index);
    }
    begin[k] = mine;
    mine[static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
  }
  return begin;
}

// Accesses of one storage in one segment.
struct Access {
  Clock first, last;  // per stream, instruction numbers; -1: none
  bool any = false;
  bool reads_first = false;  // its value comes from outside
};

struct SegmentUse {
  std::vector<Clock> clocks;
  std::vector<Access> of;  // per buffer (storages)
};

bool all_before(const SegmentUse& s, const Access& a, const Access& b) {
  for (size_t t = 0; t < kStreams; ++t) {
    if (b.first[t] < 0) continue;
    const Clock& clock = s.clocks[static_cast<size_t>(b.first[t])];
    for (size_t u = 0; u < kStreams; ++u)
      if (a.last[u] > clock[u]) return false;
  }
  return true;
}

// Reads of a value that another stream makes must wait for it; done for every pair of writer and reader in a segment.
void check_races(const Context& c, const Segment& s, const SegmentUse& use) {
  const auto storage = [&](BufferId b) {
    return c.program.buffers[static_cast<size_t>(b)].alias == kNone ? b
                                                                    : c.program.buffers[static_cast<size_t>(b)].alias;
  };
  std::vector<Clock> writer(c.program.buffers.size()), reader(c.program.buffers.size());
  for (Clock& w : writer) w.fill(-1);
  for (Clock& r : reader) r.fill(-1);
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    const auto check = [&](const Clock& earlier, const char* what, BufferId b) {
      for (size_t t = 0; t < kStreams; ++t)
        if (t != static_cast<size_t>(i.stream) && earlier[t] > use.clocks[k][t])
          c.fail(s, k,
                 fmt::format("{} '{}' without waiting for instruction {}", what,
                             c.program.buffers[static_cast<size_t>(b)].name, earlier[t]));
    };
    for (const BufferId b : i.in)
      if (b != kNone) check(writer[static_cast<size_t>(storage(b))], "reads", b);
    for (const BufferId b : i.out) {
      check(writer[static_cast<size_t>(storage(b))], "writes", b);
      check(reader[static_cast<size_t>(storage(b))], "overwrites", b);
    }
    for (const BufferId b : i.in)
      if (b != kNone) reader[static_cast<size_t>(storage(b))][static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
    for (const BufferId b : i.out)
      writer[static_cast<size_t>(storage(b))][static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
  }
}

void check_memory(const Context& c) {
  const Program& p = c.program;
  std::vector<SegmentUse> uses;
  for (const Segment& s : p.segments) {
    SegmentUse use{clocks_of(s), std::vector<Access>(p.buffers.size())};
    for (Access& a : use.of) a.first.fill(-1), a.last.fill(-1);
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      const Instruction& i = s.instructions[k];
      const auto touch = [&](BufferId b, bool reads) {
        if (b == kNone) return;
        const BufferId storage =
            p.buffers[static_cast<size_t>(b)].alias == kNone ? b : p.buffers[static_cast<size_t>(b)].alias;
        Access& a = use.of[static_cast<size_t>(storage)];
        if (!a.any) a.reads_first = reads;
        a.any = true;
        auto& first = a.first[static_cast<size_t>(i.stream)];
        if (first < 0) first = static_cast<int64_t>(k);
        a.last[static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
      };
      for (const BufferId b : i.in) touch(b, true);
      for (const BufferId b : i.out) touch(b, false);
    }
    check_races(c, s, use);
    uses.push_back(std::move(use));
  }
  // Position of the value in each segment: comes from outside, is needed after it.
  const size_t segments = p.segments.size();
  std::vector<size_t> arena;
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (in_arena(p.buffers[b]) && p.buffers[b].alias == kNone && p.buffers[b].bytes > 0 && p.buffers[b].offset >= 0)
      arena.push_back(b);
  struct Flow {
    bool live_in = false, live_out = false;
  };
  std::vector<std::vector<Flow>> flow(p.buffers.size(), std::vector<Flow>(segments));
  for (const size_t b : arena) {
    for (size_t s = 0; s < segments; ++s) {
      if (!uses[s].of[b].any || !uses[s].of[b].reads_first) continue;
      // Its value is made in an earlier segment (or an earlier run of the body) and passes everything in between.
      size_t from = segments;
      for (size_t e = 0; e < segments; ++e)
        if (e != s && uses[e].of[b].any && !uses[e].of[b].reads_first) from = std::min(from, e);
      if (from == segments || from > s)
        c.fail(
            fmt::format("segment '{}' reads '{}', which nothing has written", p.segments[s].name, p.buffers[b].name));
      flow[b][from].live_out = true;
      flow[b][s].live_in = true;
      const bool body = s > 0 && s + 1 < segments;
      for (size_t e = from + 1; e < segments; ++e)
        if (e < s || (body && e + 1 < segments)) flow[b][e].live_in = flow[b][e].live_out = true;
      if (body) flow[b][s].live_out = true;  // the next run reads it again
    }
  }
  std::sort(arena.begin(), arena.end(), [&](size_t a, size_t b) { return p.buffers[a].offset < p.buffers[b].offset; });
  for (size_t x = 0; x < arena.size(); ++x) {
    const Buffer& a = p.buffers[arena[x]];
    for (size_t y = x + 1; y < arena.size() && p.buffers[arena[y]].offset < a.offset + a.bytes; ++y) {
      for (size_t s = 0; s < segments; ++s) {
        const Access &ua = uses[s].of[arena[x]], &ub = uses[s].of[arena[y]];
        const Flow &fa = flow[arena[x]][s], &fb = flow[arena[y]][s];
        const bool in_a = ua.any || (fa.live_in && fa.live_out), in_b = ub.any || (fb.live_in && fb.live_out);
        if (!in_a || !in_b) continue;
        const bool a_first = !fa.live_out && !fb.live_in && ua.any && ub.any && all_before(uses[s], ua, ub);
        const bool b_first = !fb.live_out && !fa.live_in && ua.any && ub.any && all_before(uses[s], ub, ua);
        if (!a_first && !b_first)
          c.fail(fmt::format("'{}' and '{}' share bytes and are both alive in segment '{}'", a.name,
                             p.buffers[arena[y]].name, p.segments[s].name));
      }
    }
  }
}

void check_program(const Context& c) {
  const Program& p = c.program;
  check_buffers(c);
  if (p.schedule.empty()) c.fail("an empty schedule");
  std::set<int32_t> fetched;
  for (const Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      check_instruction(c, s, k);
      if (s.instructions[k].kind == InstructionKind::kFetch) fetched.insert(s.instructions[k].ref);
    }
  for (const ScheduleRow& row : p.schedule)
    if (!inside(row.segment, p.segments) || row.micro_batch < 0) c.fail("a schedule row names no segment");
  for (size_t o = 0; o < c.entry.outputs.size(); ++o)
    if (c.entry.outputs[o].merge != OutputMerge::kConcat && !fetched.contains(static_cast<int32_t>(o)))
      c.fail(fmt::format("output '{}' is not fetched", c.entry.outputs[o].name));
  check_memory(c);
}

// Members of a group run the same collectives in the same order, with the same sizes.
std::string collectives_of(const Program& p, const std::vector<ScheduleRow>& schedule, int32_t group) {
  std::string text;
  for (const ScheduleRow& row : schedule)
    for (const Instruction& i : p.segments[static_cast<size_t>(row.segment)].instructions) {
      if (i.kind != InstructionKind::kCollective || i.ref != group) continue;
      text += fmt::format("{} {}", static_cast<int>(i.op), i.name);
      if (i.op == OpCode::k_all_reduce)
        for (const BufferId b : i.in) text += fmt::format(" {}", p.buffers[static_cast<size_t>(b)].bytes);
      text += ';';
    }
  return text;
}

void check_entry(const Plan& plan, const Entry& entry) {
  const auto fail = [&](const std::string& what) {
    throw error(Code::kDataLoss, "plan '{}', entry '{}': {}", plan.model, entry.name, what);
  };
  for (size_t p = 0; p < entry.programs.size(); ++p) check_program({plan, entry, p, entry.programs[p]});
  if (entry.rows.size() != plan.devices.size())
    fail(fmt::format("{} rows for {} devices", entry.rows.size(), plan.devices.size()));
  for (size_t r = 0; r < entry.rows.size(); ++r) {
    const DeviceRow& row = entry.rows[r];
    if (row.device != static_cast<int32_t>(r) || !inside(row.program, entry.programs))
      fail(fmt::format("row {} is not of device {}", r, r));
    if (row.coordinates.size() != plan.mesh.size())
      fail(fmt::format("row {} has {} coordinates, the mesh {} axes", r, row.coordinates.size(), plan.mesh.size()));
    for (const ScheduleRow& s : entry.programs[static_cast<size_t>(row.program)].schedule)
      if (!inside(s.micro_batch, row.micro_batches))
        fail(fmt::format("row {} has no micro-batch {}", r, s.micro_batch));
    for (const Interval& m : row.micro_batches)
      if (m.begin < 0 || m.end < m.begin || m.end > entry.batch)
        fail(fmt::format("row {}: samples [{}, {}) of {}", r, m.begin, m.end, entry.batch));
  }
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    std::string first;
    for (size_t k = 0; k < plan.groups[g].devices.size(); ++k) {
      const int32_t device = plan.groups[g].devices[k];
      if (!inside(device, entry.rows)) fail(fmt::format("group {} names device {}", g, device));
      const Program& p = entry.programs[static_cast<size_t>(entry.rows[static_cast<size_t>(device)].program)];
      std::string mine = collectives_of(p, p.schedule, static_cast<int32_t>(g));
      if (k == 0)
        first = std::move(mine);
      else if (mine != first)
        fail(fmt::format("devices {} and {} of group {} run different collectives", plan.groups[g].devices[0], device,
                         g));
    }
  }
}

}  // namespace

void verify(const Plan& plan) {
  if (plan.devices.empty()) throw error(Code::kDataLoss, "plan '{}' has no devices", plan.model);
  int64_t size = 1;
  for (const MeshAxis& axis : plan.mesh) {
    if (axis.size < 1 || axis.size > (int64_t{1} << 20))
      throw error(Code::kDataLoss, "plan '{}': mesh axis '{}' has size {}", plan.model, axis.name, axis.size);
    size *= axis.size;
    if (size > (int64_t{1} << 20)) throw error(Code::kDataLoss, "plan '{}': the mesh is too large", plan.model);
  }
  if (size != static_cast<int64_t>(plan.devices.size()))
    throw error(Code::kDataLoss, "plan '{}': a mesh of {} for {} devices", plan.model, size, plan.devices.size());
  if (plan.scopes.empty()) throw error(Code::kDataLoss, "plan '{}' has no root scope", plan.model);
  for (const Entry& entry : plan.entries) check_entry(plan, entry);
}

}  // namespace whale
