#include "prove/walk.h"

#include <algorithm>

#include "base/watch.h"
#include "plan/lives.h"
#include "plan/part.h"
#include "plan/placed.h"
#include "prove/outputs.h"

namespace whale::proof {
namespace {

// Does the plan take a loss scale back, as those in f16 do?
bool unscales(const Entry& entry) {
  return std::ranges::any_of(entry.programs, [](const Program& p) {
    return std::ranges::any_of(p.segments, [](const Segment& s) {
      return std::ranges::any_of(s.instructions, [](const Instruction& i) { return i.verb() == "unscale"; });
    });
  });
}

Region region_of(const Dims& dims, const Part& part) {
  std::vector<Digit> digits;
  for (size_t d = 0; d < dims.size(); ++d) {
    Set set;
    for (const Interval& i : part.dims[d]) set.append(i);
    digits.push_back({dims[d], std::move(set)});
  }
  return Region(std::move(digits));
}

bool same_box(const Value& a, const Value& b, const Dims& dims) {
  const auto x = a.region.in(dims), y = b.region.in(dims);
  return x && y && same(*x, *y);
}

// Digits that hold any of their positions hold as many as the dimension has, of those beside each other.
Region fitted(const Region& region, const Dims& local) {
  Dims extents;
  for (const Digit& d : region.digits()) extents.push_back(d.extent);
  return extents.size() == local.size() ? region.spread(extents, local) : region;
}

std::vector<DType> sum_dtypes_of(const PlanOptions& options) {
  std::vector<DType> out;
  for (const auto& dtype : {options.gradient_dtype, options.accumulate_dtype})
    if (dtype) out.push_back(*dtype);
  return out;
}

}  // namespace

Walk::Walk(const Plan& plan, const Entry& entry, Reference& reference, const Symmetry& symmetry)
    : plan_(plan),
      entry_(entry),
      ref_(reference),
      symmetry_(symmetry),
      gaps_(symmetry.micro_batches().any_long()),
      tree_(reference, entry, plan.options.exact),
      kernels_(reference, sum_dtypes_of(plan.options), tree_) {
  for (const Group& g : plan.groups) {
    std::vector<int32_t> of(plan.devices.size(), -1);
    for (size_t p = 0; p < g.parts.size(); ++p)
      for (const int32_t d : g.parts[p]) of[d] = static_cast<int32_t>(p);
    part_of_.push_back(std::move(of));
  }
  devices_.reserve(entry.rows.size());
  for (const DeviceRow& row : entry.rows) {
    Watch::look();
    Device d{.row = &row, .program = {}, .memory = {}, .at = {row.device, 0, 0}};
    if (symmetry.walked(row.device)) d.program = bound(entry.programs[row.program], row);
    devices_.push_back(std::move(d));
  }
  of_devices_.resize(devices_.size());
}

Walk::Device& Walk::stand_in(int32_t device) {
  while (!symmetry_.walked(device)) device = symmetry_.line(device).first;
  return devices_[device];
}

const ScheduleRow& Walk::schedule_row(const At& at) const { return devices_[at.device].program.schedule[at.row]; }
const Segment& Walk::segment(const At& at) const {
  return devices_[at.device].program.segments[schedule_row(at).segment];
}
const Instruction& Walk::instruction(const At& at) const { return segment(at).instructions[at.instruction]; }

int64_t Walk::runs(const At& at) const {
  return std::ranges::count(devices_[at.device].program.schedule, schedule_row(at).segment, &ScheduleRow::segment);
}

int64_t Walk::to_walk() const {
  int64_t out = 0;
  for (const Device& d : devices_)  // of one that is not walked, nothing
    for (const ScheduleRow& row : d.program.schedule)
      if (!is_left_out(row)) out += std::ssize(d.program.segments[row.segment].instructions);
  return out;
}

std::optional<Stopped> Walk::run(Progress* progress) {
  try {
    for (Device& d : devices_) begin(d);  // of one that is not walked, nothing
    for (bool moved = true; moved;) {
      moved = false;
      for (Device& d : devices_)
        while (step(d)) {
          moved = true;
          if (progress) progress->reach(static_cast<size_t>(walked_));
        }
    }
    here_ = {};
    reads_.clear();
    for (Device& d : devices_)
      if (static_cast<size_t>(d.at.row) < d.program.schedule.size()) {
        here_ = d.at;
        no_rule("an order of instructions in which devices do not wait for each other");
      }
    for (Device& d : devices_)
      if (symmetry_.walked(d.at.device)) end(d);
    end();
  } catch (Stopped& stopped) {
    return std::move(stopped);
  } catch (Stop& stop) {
    stop.covered &= !kernels_.guessed();
    if (reads_.empty()) reads_ = lying();
    return Stopped{std::move(stop), here_, std::move(reads_)};
  }
  return {};
}

std::vector<Held> Walk::lying() {
  std::vector<Held> out;
  if (here_.device < 0 || here_.instruction < 0 || !symmetry_.walked(here_.device)) return out;
  Device& d = devices_[here_.device];
  if (static_cast<size_t>(d.at.row) >= d.program.schedule.size()) return out;
  for (const BufferId id : instruction(here_).in) {
    if (!is_there(d, id)) continue;
    try {
      if (Held value = d.memory.read(ref_, readable(d, id), buffer(d, id).dtype)) out.push_back(std::move(value));
    } catch (const Stop&) {  // what it stopped at is told
    }
  }
  return out;
}

Held Walk::initial(const Device& d, int32_t variable) const {
  const PlanVariable& v = plan_.variables[variable];
  const TensorId id = ref_.variable(v.name);
  if (id == kNone) return nullptr;
  const Tensor& t = ref_.tensor(id);
  if (t.dims != v.dims || t.dtype != v.dtype)
    refuse("variable {} is {} of {}, in the one-device program {} of {}", v.name, to_string(v.dims), name_of(v.dtype),
           to_string(t.dims), name_of(t.dtype));
  if (v.mesh != d.row->mesh) refuse("variable {} is not one of the device's mesh", v.name);
  const auto& axes = plan_.meshes[v.mesh].axes;
  Value out{.tensor = ref_.root(id), .dtype = v.dtype};
  out.region = region_of(v.dims, part_of(v.dims, v.storage_sharding, axes, d.row->coordinates));
  return std::make_shared<const Value>(std::move(out));
}

void Walk::begin(Device& d) {
  here_ = {};
  Watch::look();
  for (size_t b = 0; b < d.program.buffers.size(); ++b) {
    const Buffer& x = d.program.buffers[b];
    if (x.kind != BufferKind::kVariable || x.alias != kNone || x.bytes == 0) continue;
    const Held value = initial(d, x.ref);
    const std::string& name = plan_.variables[x.ref].name;
    if (!value) refuse("variable {} is none of the one-device program", name);
    if (value->dtype != x.dtype || value->region.size() != element_count(x.dims))
      refuse("variable {} is kept as {} of {} on device {}, where its sharding says {}", name, to_string(x.dims),
             name_of(x.dtype), d.at.device, to_string(value->region));
    d.memory.write(place_of(d.program, static_cast<BufferId>(b), 0), value);
  }
}

Interval Walk::samples(const Device& d, int32_t cut) const {
  const SampleCut& c = d.row->samples.at(static_cast<size_t>(cut));
  const ScheduleRow& row = now(d);
  return row.whole || c.micro_batches.empty() ? c.whole : c.micro_batches.at(static_cast<size_t>(row.micro_batch));
}

Held Walk::read(Device& d, BufferId id) {
  const Buffer& b = buffer(d, id);
  if (b.kind == BufferKind::kStep) {
    const TensorId step = ref_.step(static_cast<StepScalar>(b.ref));
    if (step == kNone && b.ref == static_cast<int32_t>(StepScalar::kLossScale) && unscales(entry_))
      no_rule("a loss scale outside of f16, as the float64 form of a plan in f16 has one; prove that plan");
    if (step == kNone) refuse("the one-device program does not ask for {}", b.name);
    Value v{.tensor = step, .dtype = b.dtype};
    reads_.push_back(std::make_shared<const Value>(std::move(v)));
    return reads_.back();
  }
  if (element_count(b.dims) == 0) {
    Value v{.dtype = b.dtype};
    v.region = Region({Digit{0, Set{}}});
    return std::make_shared<const Value>(std::move(v));
  }
  const Held value = d.memory.read(ref_, readable(d, id), b.dtype);
  if (!value) refuse("it reads {}, which nobody wrote, or in whose place something else was put", b.name);
  reads_.push_back(value);
  if (value->dtype != b.dtype)
    refuse("it reads {} as {}, and {} lies there", b.name, name_of(b.dtype), name_of(value->dtype));
  if (value->region.size() != element_count(b.dims))
    refuse("it reads {} of {}, and {} lies there", b.name, to_string(b.dims), describe(ref_, *value));
  return value;
}

void Walk::write(Device& d, BufferId id, Value value) {
  const Buffer& b = buffer(d, id);
  if (element_count(b.dims) == 0) return;
  if (b.kind == BufferKind::kStep) refuse("it writes {}, which is given", b.name);
  check_decided(d, b);
  if (value.dtype != b.dtype)
    refuse("it writes {} as {}, and makes {}", b.name, name_of(b.dtype), name_of(value.dtype));
  if (value.region.size() != element_count(b.dims))
    refuse("it writes {} as {}, and makes {}", b.name, to_string(b.dims), describe(ref_, value));
  value.region = fitted(value.region, b.dims);
  put(d, place_of(d.program, id, now(d).version), std::move(value));
}

void Walk::check_decided(const Device& d, const Buffer& b) {
  if (b.kind == BufferKind::kVariable && !d.committed)
    refuse("it writes {} before the step is decided: a commit has to come first", b.name);
}

bool Walk::is_left_out(const ScheduleRow& row) const {
  return !row.whole && symmetry_.micro_batches().stands_for(row.micro_batch) == 0;
}

void Walk::next_row(Device& d) {
  const auto& schedule = d.program.schedule;
  d.at.instruction = 0;
  do ++d.at.row;
  while (static_cast<size_t>(d.at.row) < schedule.size() && is_left_out(schedule[d.at.row]));
}

bool Walk::step(Device& d) {
  if (d.waits || static_cast<size_t>(d.at.row) >= d.program.schedule.size()) return false;
  const Segment& s = d.program.segments[now(d).segment];
  if (static_cast<size_t>(d.at.instruction) >= s.instructions.size()) {
    next_row(d);
    return true;
  }
  Watch::look();
  here_ = d.at;
  begin_reads();
  const Instruction& i = s.instructions[d.at.instruction];
  switch (i.kind()) {
    case InstructionKind::kKernel: kernel(d, i, *i.kernel()); break;
    case InstructionKind::kCollective:
      if (!collective(d, *i.as<work::Collective>())) return false;
      return true;
    case InstructionKind::kFeed: feed(d, i, *i.as<work::Feed>()); break;
    case InstructionKind::kFetch: fetch(d, i, *i.as<work::Fetch>()); break;
    case InstructionKind::kSend: send(d, i, *i.as<work::Send>()); break;
    case InstructionKind::kReceive:
      if (!receive(d, i, *i.as<work::Receive>())) return false;
      break;
    case InstructionKind::kCopy:
      check_apart(d, i, false, false);
      for (size_t k = 0; k < i.out.size(); ++k) {
        if (const auto rows = rows_of(d, i.in.at(k)); !rows.empty())
          write_rows(d, i.out[k], rows);
        else if (buffer(d, i.out[k]).bytes > 0)
          write(d, i.out[k], *read(d, i.in[k]));
      }
      break;
    case InstructionKind::kVote: {
      const Held loss = read(d, i.in.at(0));
      if (loss->tensor != ref_.root(ref_.output("loss")) || !loss->terms.whole())
        refuse("expected the loss of the whole batch, found {}", describe(ref_, *loss));
      if (d.committed) refuse("it votes when the step is decided");
      voted_ = true;
      break;
    }
    case InstructionKind::kCommit: d.committed = true; break;
  }
  ++walked_;
  ++d.at.instruction;
  return true;
}

void Walk::kernel(Device& d, const Instruction& i, const work::Kernel& k) {
  check_in_place(d, i, k);
  const bool own = k.op == OpCode::k_concat && may_be_own_concat(i);
  if (!own && rows(d, i, k)) return;
  KernelCall call{.code = k.op,
                  .attrs = k.attrs,
                  .key = k.key,
                  .box = &k.box,
                  .samples = samples(d, k.samples),
                  .device = d.at.device,
                  .name = i.name,
                  .forward = i.phase == Phase::kForward};
  std::vector<Held> held;
  for (const BufferId id : i.in) {
    held.push_back(id == kNone ? nullptr : read(d, id));
    call.in.emplace_back();
    if (id != kNone) call.in.back() = {held.back().get(), buffer(d, id).dims, buffer(d, id).name};
  }
  for (const BufferId id : i.out) call.out.push_back({buffer(d, id).dims, buffer(d, id).dtype});
  if (std::all_of(call.out.begin(), call.out.end(), [](const Result& r) { return element_count(r.local) == 0; }))
    return;
  std::vector<Value> made;
  try {
    made = kernels_.run(call);
  } catch (const Stop& stop) {
    if (own && rows(d, i, k)) return;
    if (!stop.operands.empty()) reads_.clear();  // the others are right
    for (const size_t n : stop.operands)
      if (held[n]) reads_.push_back(held[n]);
    throw;
  }
  for (size_t o = 0; o < made.size() && o < i.out.size(); ++o)
    if (i.out[o] != kNone) write(d, i.out[o], std::move(made[o]));
}

void Walk::feed(Device& d, const Instruction& i, const work::Feed& f) {
  const PlanInput& input = entry_.inputs[f.input];
  const TensorId id = ref_.input(input.name);
  if (id == kNone && std::ranges::any_of(plan_.source.inputs, [&](TensorId x) {
        const Tensor& t = plan_.source.tensor(x);
        return t.name == input.name && t.dtype == input.dtype;
      }))
    return;  // the program reads nothing of it, so nobody may
  if (id == kNone) refuse("input {} is none of the one-device program", input.name);
  if (ref_.tensor(id).dims != input.dims || ref_.tensor(id).dtype != input.dtype)
    refuse("input {} is {} of {}, expected {} of {}", input.name, to_string(input.dims), name_of(input.dtype),
           to_string(ref_.tensor(id).dims), name_of(ref_.tensor(id).dtype));
  if (ref_.tensor(id).batch_dim != input.batch_dim)
    refuse("input {} has its samples along dimension {}, in the one-device program along {}", input.name,
           input.batch_dim, ref_.tensor(id).batch_dim);
  Region region = Region::whole(input.dims);
  if (input.batch_dim >= 0) {
    const SampleCut& cut = d.row->samples.at(static_cast<size_t>(f.samples));
    const Interval range = f.whole_batch ? cut.whole : samples(d, f.samples);
    const auto b = static_cast<size_t>(input.batch_dim);
    const int64_t each = input.dims[b] / entry_.batch;
    std::vector<Digit> digits = region.digits();
    digits[b].set = Set(Interval{range.begin * each, range.end * each});
    region = Region(std::move(digits));
  }
  Value v{.tensor = ref_.root(id), .dtype = input.dtype};
  v.region = std::move(region);
  write(d, i.out.at(0), std::move(v));
}

void Walk::fetch(Device& d, const Instruction& i, const work::Fetch& f) {
  const PlanOutput& port = entry_.outputs[f.output];
  if (!hands_over(*d.row, port) || element_count(buffer(d, i.in.at(0)).dims) == 0) return;
  const Held value = read(d, i.in.at(0));
  const TensorId id = ref_.output(port.name);
  if (id == kNone) refuse("the one-device program has no output {}", port.name);
  if (ref_.tensor(id).dims != port.dims || value->dtype != port.dtype)
    refuse("output {} is {} of {}, handed out as {} of {}", port.name, to_string(ref_.tensor(id).dims),
           name_of(value->dtype), to_string(port.dims), name_of(port.dtype));
  const Region wanted = region_of(port.dims, part_of(port.dims, handed_over(plan_, entry_, *d.row, now(d), f)));
  const auto found = value->region.in(port.dims);
  const bool there =
      ref_.constant(value->tensor) ? value->region.size() == wanted.size() : found && same(*found, wanted);
  const bool right = value->tensor == ref_.root(id) && value->terms.whole() && there;
  if (!right) {
    Value expected{.tensor = id};
    expected.region = wanted;
    throw Stop{.what = fmt::format("output {}: expected {}, found {}", port.name, describe(ref_, expected),
                                   describe(ref_, *value)),
               .lacks = value->tensor == ref_.root(id) && !value->terms.whole()};
  }
  tree_.deliver("output " + port.name, port.dims, *value);
}

// Every copy of every variable is what the one-device program makes of it.
void Walk::end(Device& d) {
  std::vector<BufferIds> buffers(plan_.variables.size());  // of each
  for (size_t b = 0; b < d.program.buffers.size(); ++b)
    if (const Buffer& x = d.program.buffers[b]; x.kind == BufferKind::kVariable && x.alias == kNone)
      buffers.at(static_cast<size_t>(x.ref)).push_back(static_cast<BufferId>(b));
  for (size_t v = 0; v < plan_.variables.size(); ++v) {
    Watch::look();
    const PlanVariable& variable = plan_.variables[v];
    if (variable.mesh != d.row->mesh) continue;
    const Held before = initial(d, static_cast<int32_t>(v));
    if (!before || before->region.size() == 0) continue;
    const TensorId wanted = ref_.after_step(ref_.variable(variable.name));
    Held after = before;
    reads_.clear();
    std::string several = "several things";
    for (const BufferId b : buffers[v]) {
      const Place place = place_of(d.program, b, 0);
      bring_up(d, place);
      try {
        after = d.memory.read(ref_, place, d.program.buffers[b].dtype);
      } catch (const Stop& stop) {
        if (!stop.covered) throw;
        after = nullptr, several = "several things (" + stop.what + ")";
        for (const Memory::Part& part : d.memory.parts(place)) reads_.push_back(part.value);
      }
    }
    Value expected = *before;
    expected.tensor = wanted;
    if (after && after->tensor == wanted && after->terms.whole() && same_box(*after, *before, variable.dims)) {
      tree_.deliver("variable " + variable.name, variable.dims, *after);
      continue;
    }
    if (after) reads_ = {after};
    here_ = {d.at.device, -1, -1};
    throw Stop{.what = fmt::format("it ends with {} in the place of variable {}; expected {}",
                                   after ? describe(ref_, *after) : several, variable.name, describe(ref_, expected)),
               .lacks = after && after->tensor == wanted && !after->terms.whole()};
  }
}

void Walk::end() {
  const bool changes = std::any_of(devices_.begin(), devices_.end(), [](const Device& d) { return d.committed; });
  if (changes && entry_.loss() != kNone && !voted_)
    refuse("no device votes on the loss, and the step changes variables");
  check_outputs(plan_, entry_);
  for (const auto& [channel, left] : channels_)
    if (!left.empty()) {
      here_ = {channel[1], -1, -1};
      refuse("it sends '{}' to device {}, which does not take it", entry_.links[channel[0]].name, channel[2]);
    }
}

}  // namespace whale::proof
