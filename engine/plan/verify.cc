// Checks a Plan against what plan.h promises, without trusting how it was made: here references, sizes and waits;
// memory and communication in files of their own.
#include "plan/verify.h"
#include "base/watch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "plan/figures.h"
#include "plan/limits.h"
#include "plan/part.h"
#include "plan/placed.h"

namespace whale {

void VerifyContext::fail(FaultSite site, const std::string& what) const {
  int64_t others = -1;  // beside the first device that runs it
  int32_t first = kNone;
  for (const DeviceRow& row : entry.rows)
    if (row.program == static_cast<int32_t>(program_number) && ++others == 0) first = row.device;
  std::string of = first == kNone ? "" : fmt::format(" (device {}", first);
  if (first != kNone) of += others > 0 ? fmt::format(" and {} more)", others) : ")";
  site.program = &program;
  fail_at(plan, entry, site, fmt::format(", program {}{}", program_number, of), what);
}

void VerifyContext::fail_row(const ScheduleRow& row, const std::string& what) const {
  FaultSite site;
  site.row = &row, site.micro_batch = row.micro_batch;
  if (row.segment >= 0 && row.segment < std::ssize(program.segments)) site.segment = &program.segments[row.segment];
  fail(std::move(site), what);
}

namespace {

using Context = VerifyContext;

constexpr int64_t kMostDevices = int64_t{1} << 20;

template <class List>
bool inside(int64_t i, const List& list) {
  return i >= 0 && i < static_cast<int64_t>(list.size());
}

int64_t checked_bytes(const Context& c, BufferId id) {
  const Buffer& b = c.program.buffers[id];
  for (const int64_t d : b.dims)
    if (d < 0) c.fail_buffer(id, fmt::format("buffer '{}' has a negative dimension", b.name));
  return element_count(b.dims) * size_of(b.dtype);
}

void check_buffers(const Context& c) {
  const Program& p = c.program;
  if (p.arena_bytes < 0 || p.variable_bytes < 0 || p.host_bytes < 0) c.fail("negative sizes");
  for (size_t i = 0; i < p.buffers.size(); ++i) {
    const Buffer& b = p.buffers[i];
    const auto id = static_cast<BufferId>(i);
    const auto fail = [&](const std::string& what) { c.fail_buffer(id, what); };
    const int64_t bytes = checked_bytes(c, id);
    if (b.bytes != bytes) fail(fmt::format("buffer '{}' has {} bytes, its type {}", b.name, b.bytes, bytes));
    if (b.versions < 1 || b.versions > kMostVersions || (b.versions > 1 && !in_arena(b)))
      fail(fmt::format("buffer '{}' has {} versions", b.name, b.versions));
    if (b.alias != kNone) {
      if (!inside(b.alias, p.buffers) || p.buffers[b.alias].alias != kNone)
        fail(fmt::format("buffer '{}': bad alias", b.name));
      const Buffer& s = p.buffers[b.alias];
      if (b.at < 0 || b.at > s.bytes - b.bytes || b.at % size_of(b.dtype) || (in_arena(s) && b.offset != s.offset))
        fail(fmt::format("buffer '{}' does not fit its storage '{}'", b.name, s.name));
      if (b.versions != s.versions)
        fail(fmt::format("buffer '{}' and its storage '{}' have other versions", b.name, s.name));
      if (b.memory != s.memory)
        fail(fmt::format("buffer '{}' and its storage '{}' are in two memories", b.name, s.name));
      if (in_arena(s) != in_arena(b) || (!in_arena(s) && (b.kind != s.kind || b.ref != s.ref)))
        fail(fmt::format("buffer '{}' and its storage '{}' are of different kinds", b.name, s.name));
    }
    if (b.alias == kNone && b.at != 0) fail(fmt::format("buffer '{}' lies inside of nothing", b.name));
    if (in_arena(b) && b.bytes > 0 && b.offset < 0)
      fail(fmt::format("buffer '{}' has no place: nothing uses it, or its storage was not placed", b.name));
    if (in_arena(b) && b.offset >= 0 && (b.offset % kAlignment || b.offset > arena_of(p, b) - bytes_of_versions(b)))
      fail(fmt::format("buffer '{}' at {} is not aligned inside the arena of {} bytes", b.name, b.offset,
                       arena_of(p, b)));
    if (b.kind == BufferKind::kVariable && !inside(b.ref, c.plan.variables))
      fail(fmt::format("buffer '{}': no variable {}", b.name, b.ref));
    if (b.kind == BufferKind::kVariable && c.plan.variables[b.ref].memory != b.memory)
      fail(fmt::format("buffer '{}' is not in the memory of variable '{}'", b.name, c.plan.variables[b.ref].name));
    if (b.memory == Memory::kHost && b.kind != BufferKind::kArena && b.kind != BufferKind::kVariable)
      fail(fmt::format("buffer '{}' is none of those that are kept in the host's memory", b.name));
    if (b.kind == BufferKind::kVariable && c.plan.variables[b.ref].dtype != b.dtype)
      fail(fmt::format("buffer '{}' is not of the type of variable '{}'", b.name, c.plan.variables[b.ref].name));
    if (b.kind == BufferKind::kInput && !inside(b.ref, c.entry.inputs))
      fail(fmt::format("buffer '{}': no input {}", b.name, b.ref));
    if (b.kind == BufferKind::kStep && element_count(b.dims) != 1)
      fail(fmt::format("buffer '{}' of shape {} is a step scalar", b.name, to_string(b.dims)));
    if (b.kind == BufferKind::kStep && (b.ref < 0 || b.ref > static_cast<int32_t>(StepScalar::kLossScale)))
      fail(fmt::format("buffer '{}': no step scalar {}", b.name, b.ref));
  }
}

// Copies between the memories, and nothing else, touch what is in the host's.
void check_memories(const Context& c, const Segment& s, size_t k) {
  const Instruction& i = s.instructions[k];
  const bool moves = i.kind() == InstructionKind::kCopy, stores = i.copies_to(Memory::kHost);
  const auto buffer = [&](BufferId b) -> const Buffer& { return c.program.buffers[b]; };
  const auto check = [&](BufferId b, Memory want) {
    if (b != kNone && buffer(b).memory != want)
      c.fail(s, k,
             fmt::format("'{}' is in the {}'s memory", buffer(b).name, want == Memory::kHost ? "device" : "host"));
  };
  const bool over = stores && i.in.size() == 2 * i.out.size();  // places follow
  if (moves && i.in.size() != i.out.size() && !over)
    c.fail(s, k, "a copy between memories has a result for each operand");
  for (size_t n = 0; n < i.in.size(); ++n)
    check(i.in[n], moves && (!stores || n >= i.out.size()) ? Memory::kHost : Memory::kDevice);
  for (const BufferId b : i.out) check(b, stores ? Memory::kHost : Memory::kDevice);
  for (size_t n = 0; moves && n < i.out.size(); ++n)
    if (i.in[n] == kNone || buffer(i.in[n]).bytes != buffer(i.out[n]).bytes)
      c.fail(s, k, fmt::format("'{}' is a copy of another size", buffer(i.out[n]).name));
}

void check_instruction(const Context& c, const Segment& s, size_t k) {
  const Program& p = c.program;
  const Instruction& i = s.instructions[k];
  if (static_cast<int>(i.queue) >= kQueues) c.fail(s, k, "no such queue");
  for (const BufferId b : i.in) {
    if (b == kNone && i.kind() == InstructionKind::kCollective) c.fail(s, k, "a collective without an operand");
    if (b == kNone) continue;
    if (!inside(b, p.buffers)) c.fail(s, k, fmt::format("operand {} does not exist", b));
    const Buffer& buffer = p.buffers[b];
    if (in_arena(buffer) && buffer.offset < 0) c.fail(s, k, fmt::format("operand '{}' has no place", buffer.name));
  }
  for (const BufferId b : i.out) {
    if (!inside(b, p.buffers)) c.fail(s, k, fmt::format("result {} does not exist", b));
    const Buffer& buffer = p.buffers[b];
    if (in_arena(buffer) && buffer.offset < 0) c.fail(s, k, fmt::format("result '{}' has no place", buffer.name));
    if (buffer.kind == BufferKind::kStep) c.fail(s, k, fmt::format("writes the step scalar '{}'", buffer.name));
  }
  const bool one_in = i.in.size() == 1 && i.in[0] != kNone && i.out.empty(),
             one_out = i.out.size() == 1 && i.in.empty();
  const auto check_op = [&](OpCode op, bool collective) {
    if (!is_valid_op(static_cast<int>(op))) c.fail(s, k, fmt::format("no op has number {}", static_cast<int>(op)));
    if (has_flag(op, kCollective) != collective || has_flag(op, kMemoryCopy))
      c.fail(s, k, fmt::format("'{}' is no {}", def(op).name, collective ? "collective" : "kernel"));
  };
  if (const auto* kernel = i.kernel()) check_op(kernel->op, false);
  if (const auto* collective = i.as<work::Collective>()) {
    check_op(collective->op, true);
    if (!inside(collective->group, c.plan.groups)) c.fail(s, k, fmt::format("no group {}", collective->group));
  }
  if (const auto* feed = i.as<work::Feed>(); feed && (!inside(feed->input, c.entry.inputs) || !one_out))
    c.fail(s, k, "a feed names one input and one result");
  if (const auto* fetch = i.as<work::Fetch>(); fetch && (!inside(fetch->output, c.entry.outputs) || !one_in))
    c.fail(s, k, "a fetch names one output and one operand");
  if (const auto* send = i.as<work::Send>(); send && (!inside(send->link, c.entry.links) || !one_in))
    c.fail(s, k, "a send names one link and one operand");
  if (const auto* receive = i.as<work::Receive>(); receive && (!inside(receive->link, c.entry.links) || !one_out))
    c.fail(s, k, "a receive names one link and one result");
  if (i.kind() == InstructionKind::kVote && !one_in) c.fail(s, k, "a vote has one operand");
  if (i.kind() == InstructionKind::kCommit && !(i.in.empty() && i.out.empty()))
    c.fail(s, k, "a commit has no operands");
  check_memories(c, s, k);
  if (!inside(i.scope, c.plan.scopes)) c.fail(s, k, "no such scope");
  if (i.samples() < 0) c.fail(s, k, fmt::format("no samples {}", i.samples()));
  for (const Wait& w : i.waits) {
    if (w.index < 0 || static_cast<size_t>(w.index) >= k)
      c.fail(s, k, fmt::format("waits for {}, which is not earlier", w.index));
    if (s.instructions[w.index].queue != w.queue)
      c.fail(s, k,
             fmt::format("waits for instruction {} on another queue than its own",
                         told(c.plan, s, static_cast<size_t>(w.index))));
  }
}

// It has none before it to wait for.
void check_first_row(const Context& c, const ScheduleRow& row) {
  const Segment& segment = c.program.segments[row.segment];
  for (const RowWait& w : c.program.row_waits[row.waits]) {
    FaultSite site{.segment = &segment, .micro_batch = row.micro_batch, .row = &row};
    if (inside(w.at, segment.instructions)) site.instruction = static_cast<size_t>(w.at);
    c.fail(site,
           fmt::format("waits for instruction {} of the row before, and this row is the schedule's first", w.on.index));
  }
  c.fail_row(row, "the first row of the schedule has waits for one before it");
}

// Each names, for an instruction, one of another queue in the row before.
void check_row_waits(const Context& c) {
  const Program& p = c.program;
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;  // segments of both rows, waits
  for (size_t r = 0; r < p.schedule.size(); ++r) {
    Watch::look();
    const ScheduleRow& row = p.schedule[r];
    if (row.waits == kNone) continue;
    if (!inside(row.waits, p.row_waits))
      c.fail_row(row, fmt::format("a schedule row has the waits number {}, of {}", row.waits, p.row_waits.size()));
    if (r == 0) check_first_row(c, row);
    if (!seen.emplace(p.schedule[r - 1].segment, row.segment, row.waits).second) continue;
    const auto& before = p.segments[p.schedule[r - 1].segment].instructions;
    const auto& now = p.segments[row.segment].instructions;
    int32_t last = 0;
    for (const RowWait& w : p.row_waits[row.waits]) {
      FaultSite site{.segment = &p.segments[row.segment], .micro_batch = row.micro_batch, .row = &row};
      const Segment& earlier = p.segments[p.schedule[r - 1].segment];
      const std::string awaited = inside(w.on.index, before)
                                      ? "instruction " + told(c.plan, earlier, static_cast<size_t>(w.on.index))
                                      : fmt::format("instruction {} of {}", w.on.index, earlier.name);
      if (!inside(w.at, now) || w.at < last)
        c.fail(site, fmt::format("instruction {} waits for the row before, and is not the next one that does", w.at));
      site.instruction = static_cast<size_t>(w.at);
      if (!inside(w.on.index, before) || before[w.on.index].queue != w.on.queue)
        c.fail(site, fmt::format("waits for {}, of the row before, on another queue than its own", awaited));
      if (w.on.queue == now[w.at].queue)
        c.fail(site, fmt::format("waits for {}, of the row before, which is on its own queue", awaited));
      last = w.at;
    }
  }
}

// Of a hole: the instruction that it is in, or the first one that has its buffer.
FaultSite site_of_hole(const Program& p, const Hole& hole) {
  if (hole.kind == HoleKind::kAt) return site_of(p, hole.buffer);
  if (!inside(hole.segment, p.segments)) return {};
  return {.segment = &p.segments[hole.segment], .instruction = static_cast<size_t>(hole.instruction)};
}

void check_program(const Context& c) {
  const Program& p = c.program;
  check_buffers(c);
  if (p.schedule.empty()) c.fail("an empty schedule");
  for (const Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      Watch::look();
      check_instruction(c, s, k);
    }
  if (const HoleFault fault = fault_of_holes(p); !fault.what.empty())
    c.fail(site_of_hole(p, p.holes[fault.hole]), fault.what);
  for (const ScheduleRow& row : watched(p.schedule))
    if (!inside(row.segment, p.segments) || row.micro_batch < 0 || row.version < 0)
      c.fail_row(row, "a schedule row names no segment");
  check_row_waits(c);
}

// Which names the last of the cuts of the batch; null: there is no instruction.
const Instruction* with_last_cut(const Program& p) {
  const Instruction* last = nullptr;
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      if (!last || i.samples() > last->samples()) last = &i;
  return last;
}

// Of each variable, the first one of its shape that is cut alike: a device holds as much of it.
std::vector<size_t> first_alike(const std::vector<PlanVariable>& variables) {
  std::vector<size_t> shapes, out;
  for (const PlanVariable& v : variables) {
    const auto known = std::ranges::find_if(shapes, [&](size_t w) {
      return variables[w].mesh == v.mesh && variables[w].dims == v.dims &&
             variables[w].storage_sharding == v.storage_sharding;
    });
    const size_t first = known == shapes.end() ? out.size() : *known;
    if (first == out.size()) shapes.push_back(first);
    out.push_back(first);
  }
  return out;
}

// A device's row: its place in the mesh, its samples, and variables of the sizes that their storage shardings say.
// `last_cuts`: of each program, what names the last cut of the batch.
void check_row(const Plan& plan, const Entry& entry, size_t r, const std::vector<const Instruction*>& last_cuts,
               const std::vector<size_t>& alike) {
  const DeviceRow& row = entry.rows[r];
  FaultSite site{.device = row.device};
  const auto fail = [&](const std::string& what) { fail_at(plan, entry, site, "", what); };
  if (row.device != static_cast<int32_t>(r) || !inside(row.program, entry.programs)) {
    site.device = static_cast<int32_t>(r);
    fail(fmt::format("row {} is not of device {}", r, r));
  }
  if (!inside(row.mesh, plan.meshes)) fail(fmt::format("row {} names mesh {}", r, row.mesh));
  const PlanMesh& mesh = plan.meshes[row.mesh];
  const auto at = std::find(mesh.devices.begin(), mesh.devices.end(), row.device) - mesh.devices.begin();
  if (at == static_cast<int64_t>(mesh.devices.size()) || row.coordinates != mesh.coordinates(at))
    fail(fmt::format("row {} is at {}, which is not its device's place in mesh {}", r, to_string(row.coordinates),
                     row.mesh));
  const Program& p = entry.programs[row.program];
  const Instruction* last_cut = last_cuts[row.program];
  if (row.samples.empty()) fail(fmt::format("row {} has no samples", r));
  for (const SampleCut& cut : row.samples) {
    Watch::look();
    for (const ScheduleRow& s : watched(p.schedule))
      if (!inside(s.micro_batch, cut.micro_batches)) {
        site.micro_batch = s.micro_batch;
        fail(fmt::format("row {} has no micro-batch {}", r, s.micro_batch));
      }
    for (const Interval& m : watched(cut.micro_batches))
      if (m.begin < 0 || m.end < m.begin || m.end > entry.batch)
        fail(fmt::format("row {}: samples [{}, {}) of {}", r, m.begin, m.end, entry.batch));
  }
  const auto fail_in = [&](FaultSite in, const std::string& what) {
    in.program = &p, in.device = row.device;
    fail_at(plan, entry, in, "", what);
  };
  if (last_cut && last_cut->samples() >= std::ssize(row.samples))
    fail_in(site_of(p, [&](const Instruction& i) { return &i == last_cut; }),
            fmt::format("row {} has no samples {} for '{}'", r, last_cut->samples(), last_cut->name));
  std::map<size_t, int64_t> held;  // elements, by the first variable alike
  for (const Buffer& b : p.buffers) {
    if (b.kind != BufferKind::kVariable || b.alias != kNone) continue;
    const PlanVariable& v = plan.variables[b.ref];
    const auto [known, fresh] = held.try_emplace(alike[b.ref]);
    int64_t& local = known->second;
    if (fresh)
      local = element_count(v.mesh == row.mesh
                                ? local_dims(v.dims, cuts_of(v.dims, v.storage_sharding, mesh.axes, row.coordinates))
                                : local_dims(plan, v, row.device));
    if (local != element_count(b.dims))
      fail_in(site_of(p, static_cast<BufferId>(&b - p.buffers.data())),
              fmt::format("buffer '{}' of device {} has shape {}, but the device holds {} elements of variable '{}'",
                          b.name, r, to_string(b.dims), local, v.name));
  }
}

// The rows of a program fill its holes with values that it could have itself: parts stay inside of their storages, and
// lie to each other as the program's, whose memory is verified. The first row's are the program's own.
void check_places(const Context& c, const std::vector<const DeviceRow*>& rows) {
  const Program& p = c.program;
  const Overlaps overlaps(p, p.holes);
  const auto parts =
      std::ranges::find_if(p.holes, [](const Hole& h) { return h.kind != HoleKind::kAt; }) - p.holes.begin();
  std::set<Ints> seen;  // places of parts, which come first
  for (const DeviceRow* row : rows) {
    Watch::look();
    const auto fail = [&](FaultSite site, const std::string& what) {
      site.device = row->device;
      c.fail(site, fmt::format("on device {}, {}", row->device, what));
    };
    if (row->placed.size() != p.holes.size())
      fail({}, fmt::format("there are {} values for {} holes", row->placed.size(), p.holes.size()));
    if (const HoleFault fault = fault_of_values(p, row->placed); !fault.what.empty())
      fail(site_of_hole(p, p.holes[fault.hole]), fault.what);
    if (seen.emplace(row->placed.begin(), row->placed.begin() + parts).second && !overlaps.hold(p, row->placed))
      fail(p.holes.empty() ? FaultSite{} : site_of_hole(p, p.holes[0]),
           "parts of a storage lie to each other in another way than in the program");
    for (size_t k = 0; row == rows[0] && k < p.holes.size(); ++k)
      if (row->placed[k] != value_of(p, p.holes[k]))
        fail(site_of_hole(p, p.holes[k]),
             fmt::format("hole {} is {}, in the program it is {}", k, row->placed[k], value_of(p, p.holes[k])));
  }
}

// What is wrong with the way in which devices hold parts of a tensor; "": nothing. It cuts whole sub-axes, and has no
// terms of a sum.
std::string fault_of_sharding(const Dims& dims, const Sharding& sharding, size_t axes) {
  if (sharding.axes.size() != axes) return "is of another mesh";
  for (const AxisSharding& l : sharding.axes) {
    if (l.placement == Placement::kPartial) return "is partial";
    if (l.placement != Placement::kShard) continue;
    const SubAxis& d = l.sub_axis;
    if (!inside(d.dim, dims) || d.outer < 1 || d.inner < 1) return "cuts no dimension of it";
    const int64_t n = dims[d.dim];
    if (n != 0 && (d.outer > n || d.inner > n / d.outer || n % (d.outer * d.inner)))
      return fmt::format("cuts a sub-axis ({}, {}, {}) that its dimension does not have", d.dim, d.outer, d.inner);
  }
  return "";
}

// Every device that hands an output over fetches it.
void check_output(const Plan& plan, const Entry& entry, size_t o) {
  const PlanOutput& output = entry.outputs[o];
  const auto fail = [&](int32_t device, const std::string& what) {
    fail_at(plan, entry, FaultSite{.device = device}, "", what);
  };
  const bool unlike = output.mesh == kNone && output.merge == OutputMerge::kConcat && output.batch_dim >= 0;
  if (!unlike && !inside(output.mesh, plan.meshes))
    fail(0, fmt::format("output '{}' names mesh {}", output.name, output.mesh));
  const PlanMesh& mesh = plan.meshes[unlike ? 0 : static_cast<size_t>(output.mesh)];
  if (output.cut_by.size() != mesh.axes.size())
    fail(mesh.devices.empty() ? 0 : mesh.devices[0], fmt::format("output '{}' is cut by {} axes, its mesh has {}",
                                                                 output.name, output.cut_by.size(), mesh.axes.size()));
  if (output.merge == OutputMerge::kConcat && output.batch_dim >= 0 &&
      (!inside(output.batch_dim, output.dims) || output.dims[output.batch_dim] % std::max<int64_t>(entry.batch, 1)))
    fail(
        mesh.devices.empty() ? 0 : mesh.devices[0],
        fmt::format("output '{}' of shape {} has its samples along dimension {}, which the batch of {} does not divide",
                    output.name, to_string(output.dims), output.batch_dim, entry.batch));
  if (!output.parts.axes.empty()) {
    const std::string fault = fault_of_sharding(output.dims, output.parts, mesh.axes.size());
    if (!fault.empty())
      fail(mesh.devices.empty() ? 0 : mesh.devices[0],
           fmt::format("the sharding of output '{}' of shape {} {}", output.name, to_string(output.dims), fault));
  }
  if (output.merge == OutputMerge::kConcat || element_count(output.dims) == 0) return;
  for (size_t k = 0; k < mesh.devices.size(); ++k) {
    const Ints at = mesh.coordinates(static_cast<int64_t>(k));
    bool hands_over = true;
    for (size_t a = 0; a < at.size(); ++a) hands_over &= output.cut_by[a] || at[a] == 0;
    if (!hands_over || mesh.devices[k] < 0) continue;
    const DeviceRow& row = entry.rows[mesh.devices[k]];
    bool fetched = false;
    for (const Segment& s : entry.programs[row.program].segments)
      for (const Instruction& i : s.instructions)
        if (const auto* fetch = i.as<work::Fetch>()) fetched |= fetch->output == static_cast<int32_t>(o);
    if (!fetched) fail(row.device, fmt::format("output '{}' is not fetched on device {}", output.name, row.device));
  }
}

bool writes_variables(const Program& p) {
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      if (writes_variable(p, i)) return true;
  return false;
}

void check_entry(const Plan& plan, const Entry& entry) {
  std::set<const Program*, decltype(&before_in_memory)> seen(before_in_memory);
  const auto rows = rows_of_programs(entry);
  for (size_t p = 0; p < entry.programs.size(); ++p) {
    const Context c{plan, entry, p, entry.programs[p]};
    check_program(c);
    check_places(c, rows[p]);
    if (seen.insert(&c.program).second) verify_memory(c);
  }
  const bool step = std::ranges::any_of(entry.programs, [](const Program& p) { return writes_variables(p); });
  for (size_t p = 0; p < entry.programs.size(); ++p) verify_commit({plan, entry, p, entry.programs[p]}, step);
  if (entry.rows.size() != plan.devices.size())
    fail_at(plan, entry, {}, "", fmt::format("{} rows for {} devices", entry.rows.size(), plan.devices.size()));
  std::vector<const Instruction*> last_cuts;
  for (const Program& p : entry.programs) last_cuts.push_back(with_last_cut(p));
  const std::vector<size_t> alike = first_alike(plan.variables);
  for (size_t r = 0; r < entry.rows.size(); ++r) check_row(plan, entry, r, last_cuts, alike);
  for (size_t o = 0; o < entry.outputs.size(); ++o) check_output(plan, entry, o);
  verify_communication(plan, entry);
  verify_collectives(plan, entry);
  verify_work(plan, entry);
}

// Of a mesh: at the first of its devices.
[[noreturn]] void fail_mesh(const Plan& plan, const PlanMesh& mesh, const std::string& what) {
  const auto there = std::ranges::find_if(mesh.devices, [](int32_t d) { return d != kNone; });
  fail_at(plan, there == mesh.devices.end() ? kNone : *there, what);
}

// Every row has a positive sum, and gaps at its end alone.
void check_rows(const Plan& plan, const PlanMesh& mesh, const MeshAxis& axis, const std::vector<double>& shares) {
  const auto columns = static_cast<size_t>(axis.size);
  double sum = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    const bool first = i % columns == 0, gap = shares[i] == kNoDevice;
    sum = (first ? 0 : sum) + (gap ? 0 : shares[i]);
    const bool lonely = gap ? first || shares.size() == columns : !first && shares[i - 1] == kNoDevice;
    if (lonely || ((i + 1) % columns == 0 && !(sum > 0)))
      fail_mesh(
          plan, mesh,
          fmt::format("mesh axis '{}' has shares ({}) that nothing can be cut by", axis.name, fmt::join(shares, ",")));
  }
}

// Of unlike replicas.
void check_parts(const Plan& plan, const PlanMesh& mesh, const MeshAxis& axis) {
  double sum = 0;
  for (const double share : axis.shares) sum += share < 0 ? NAN : share;
  if (!(sum > 0) || !std::isfinite(sum))
    fail_mesh(plan, mesh,
              fmt::format("mesh axis '{}' has shares ({}) that nothing can be cut by", axis.name,
                          fmt::join(axis.shares, ",")));
}

void check_mesh(const Plan& plan, const PlanMesh& mesh) {
  int64_t size = 1;
  for (const MeshAxis& axis : mesh.axes) {
    if (axis.size < 1 || axis.size > kMostDevices)
      fail_mesh(plan, mesh, fmt::format("mesh axis '{}' has size {}", axis.name, axis.size));
    const auto parts = std::ssize(axis.shares);
    if (axis.only >= 0 && (axis.size != 1 || axis.only >= parts || &axis != mesh.axes.data() ||
                           axis.shares != plan.meshes[0].axes[0].shares || plan.meshes[0].axes[0].only < 0))
      fail_mesh(plan, mesh,
                fmt::format("mesh axis '{}' has part {} of {} of unlike replicas", axis.name, axis.only, parts));
    for (const auto* shares : {&axis.shares, &axis.state_shares}) {
      if (axis.only >= 0 && shares == &axis.shares) {
        check_parts(plan, mesh, axis);
        continue;
      }
      const auto n = static_cast<int64_t>(shares->size());
      if (n != 0 && n != axis.size && !(shares == &axis.shares && n == axis.size * size))
        fail_mesh(plan, mesh, fmt::format("mesh axis '{}' of size {} has {} shares", axis.name, axis.size, n));
      check_rows(plan, mesh, axis, *shares);
    }
    size *= axis.size;
    if (size > kMostDevices) fail_mesh(plan, mesh, "the mesh is too large");
  }
  if (size != static_cast<int64_t>(mesh.devices.size()))
    fail_mesh(plan, mesh, fmt::format("a mesh of {} for {} devices", size, mesh.devices.size()));
  for (size_t k = 0; k < mesh.devices.size(); ++k)
    if (mesh.has_position(static_cast<int64_t>(k)) != (mesh.devices[k] != kNone))
      fail_mesh(
          plan, mesh,
          fmt::format("position {} of a mesh should {} a device", k, mesh.devices[k] == kNone ? "have" : "not have"));
  std::set<int32_t> seen;
  for (const int32_t d : mesh.devices)
    if (d != kNone && (!inside(d, plan.devices) || !seen.insert(d).second))
      fail_at(plan, d, fmt::format("a mesh names device {}, or names it twice", d));
  if (mesh.axes.size() != plan.meshes[0].axes.size()) fail_mesh(plan, mesh, "its meshes have different axes");
}

void check_storage_sharding(const Plan& plan, const PlanVariable& v) {
  const bool known = inside(v.mesh, plan.meshes);
  const auto fail = [&](const std::string& what) {
    const std::string text = fmt::format("variable '{}' of shape {}: {}", v.name, to_string(v.dims), what);
    if (known) fail_mesh(plan, plan.meshes[v.mesh], text);
    fail_at(plan, kNone, text);
  };
  if (!known) fail("there is no such mesh");
  for (const int64_t n : v.dims)
    if (n < 0) fail("a dimension is negative");
  const size_t axes = plan.meshes[v.mesh].axes.size();
  if (const std::string fault = fault_of_sharding(v.dims, v.storage_sharding, axes); !fault.empty())
    fail("its storage sharding " + fault);
}

}  // namespace

void verify(const Plan& plan) {
  if (plan.devices.empty()) fail_at(plan, kNone, "it has no devices");
  if (plan.meshes.empty()) fail_at(plan, kNone, "it has no mesh");
  for (const PlanMesh& mesh : plan.meshes) check_mesh(plan, mesh);
  if (plan.scopes.empty()) fail_at(plan, kNone, "it has no root scope");
  verify_groups(plan);
  for (const PlanVariable& v : plan.variables) check_storage_sharding(plan, v);
  for (const Entry& entry : plan.entries) check_entry(plan, entry);
}

}  // namespace whale
