// Plan <-> bytes (schema/plan.fbs). Reading stands behind the same fences as reading a graph: flatbuffers::Verifier,
// ranges of every number, id and size here, then verify().
#include <algorithm>

#include <set>

#include "cost/measured.h"
#include "plan/fault.h"
#include "plan/limits.h"
#include "plan/memory.h"
#include "plan/placed.h"
#include "plan/plan.h"
#include "schema/fields.h"
#include "schema/graph_file.h"
#include "schema/plan_generated.h"

namespace whale {

using namespace schema;

namespace {

static_assert(kMostBytes == kMaxTensorBytes);
constexpr uint32_t kPlanFormatVersion = 15;  // plans are made again, not converted
template <class T>
using Tables = const flatbuffers::Vector<Off<T>>*;
template <class T>
using Structs = const flatbuffers::Vector<const T*>*;

// ---- writing
// ------------------------------------------------------------------------------------------------------------------
fb::Interval to_fb(const Interval& i) { return {i.begin, i.end}; }
fb::SubAxis to_fb(const SubAxis& d) { return {d.dim, d.outer, d.inner}; }
fb::Wait to_fb(const Wait& w) { return {static_cast<int32_t>(w.queue), w.index}; }
fb::RowWait to_fb(const RowWait& w) { return {w.at, to_fb(w.on)}; }
fb::ScheduleRow to_fb(const ScheduleRow& r) { return {r.segment, r.micro_batch, r.version, r.waits, r.whole}; }
fb::BoxCut to_fb(const BoxCut& c) { return {to_fb(c.sub_axis), c.extent, c.begin, c.size}; }

template <class T>
auto write_structs(Builder& b, const std::vector<T>& list) {
  std::vector<decltype(to_fb(list[0]))> out;
  for (const T& t : list) out.push_back(to_fb(t));
  return out.empty() ? 0 : b.CreateVectorOfStructs(out);
}

// Templates find only what is declared before them.
Off<fb::Device> write_one(Builder& b, const DeviceSpec& d);
Off<fb::MeshAxis> write_one(Builder& b, const MeshAxis& a);
Off<fb::Mesh> write_one(Builder& b, const PlanMesh& m);
Off<fb::GroupPart> write_one(Builder& b, const std::vector<int32_t>& part);
Off<fb::Group> write_one(Builder& b, const Group& g);
Off<fb::AxisSharding> write_one(Builder& b, const AxisSharding& a);
Off<fb::PlanVariable> write_one(Builder& b, const PlanVariable& v);
Off<fb::PlanInput> write_one(Builder& b, const PlanInput& i);
Off<fb::PlanOutput> write_one(Builder& b, const PlanOutput& o);
Off<fb::PlanBuffer> write_one(Builder& b, const Buffer& x);
Off<fb::SubAxisCuts> write_one(Builder& b, const SubAxisCuts& c);
Off<fb::Instruction> write_one(Builder& b, const Instruction& i);
Off<fb::Segment> write_one(Builder& b, const Segment& s);
Off<fb::Hole> write_one(Builder& b, const Hole& h);
Off<fb::RowWaits> write_one(Builder& b, const RowWaits& w);
Off<fb::Program> write_one(Builder& b, const Program& p);
Off<fb::SampleCut> write_one(Builder& b, const SampleCut& s);
Off<fb::DeviceRow> write_one(Builder& b, const DeviceRow& r);
Off<fb::Transfer> write_one(Builder& b, const Transfer& t);
Off<fb::Link> write_one(Builder& b, const Link& l);
Off<fb::Entry> write_one(Builder& b, const Entry& e);

// write_all(b, list): each element by the write_one that fits, then the vector of them.
template <class T>
auto write_all(Builder& b, const std::vector<T>& list) {
  std::vector<decltype(write_one(b, list[0]))> out;
  for (const T& t : list) out.push_back(write_one(b, t));
  return write(b, out);
}

Off<fb::Device> write_one(Builder& b, const DeviceSpec& d) {
  Off<flatbuffers::String> type;
  Off<flatbuffers::Vector<double>> figures;
  if (!d.type.empty()) type = write(b, d.type);
  if (d.figures != DeviceFigures{}) {
    std::vector<double> list;
    each_figure_of_device(d.figures, [&](const char*, double figure) { list.push_back(figure); });
    figures = write(b, list);
  }
  std::vector<fb::NodeLink> links;
  for (const auto& [place, rates] : d.links) {
    const auto& [rate, latency] = rates;
    links.emplace_back(place, rate, latency);
  }
  return fb::CreateDevice(b, number<fb::DeviceKind>(d.kind),
                          write(b, std::vector<int32_t>(d.cores.begin(), d.cores.end())), d.index, d.node, d.named,
                          d.memory_bytes, type, figures, d.zone, d.place,
                          links.empty() ? 0 : b.CreateVectorOfStructs(links));
}

Off<fb::MeshAxis> write_one(Builder& b, const MeshAxis& a) {
  const auto name = write(b, a.name);
  const auto shares = write(b, a.shares);
  return fb::CreateMeshAxis(b, name, a.size, shares, write(b, a.state_shares), a.only);
}

Off<fb::Mesh> write_one(Builder& b, const PlanMesh& m) {
  const auto axes = write_all(b, m.axes);
  return fb::CreateMesh(b, axes, write(b, m.devices));
}

Off<fb::GroupPart> write_one(Builder& b, const std::vector<int32_t>& part) {
  return fb::CreateGroupPart(b, write(b, part));
}

Off<fb::Group> write_one(Builder& b, const Group& g) {
  const auto axis = write(b, g.axis);
  return fb::CreateGroup(b, axis, write_all(b, g.parts));
}

Off<fb::AxisSharding> write_one(Builder& b, const AxisSharding& a) {
  const fb::SubAxis sub_axis = to_fb(a.sub_axis);
  return fb::CreateAxisSharding(b, number<fb::Placement>(a.placement), &sub_axis, a.state,
                                number<fb::Combine>(a.combine));
}

Off<fb::PlanVariable> write_one(Builder& b, const PlanVariable& v) {
  const auto name = write(b, v.name), owner = write(b, v.owner), state_name = write(b, v.state_name);
  const auto dims = write(b, v.dims);
  const auto init = write(b, v.init);
  return fb::CreatePlanVariable(b, name, number<fb::DType>(v.dtype), dims, number<fb::Role>(v.role), v.trainable, init,
                                owner, state_name, v.mesh, write_all(b, v.storage_sharding.axes),
                                number<fb::Memory>(v.memory));
}

Off<fb::PlanInput> write_one(Builder& b, const PlanInput& i) {
  const auto name = write(b, i.name);
  std::vector<fb::IndexRange> indices;
  for (const IndexRange& r : i.indices) indices.emplace_back(r.limit, r.ignored.value_or(0), r.ignored.has_value());
  const auto dims = write(b, i.dims);
  return fb::CreatePlanInput(b, name, number<fb::DType>(i.dtype), dims, i.batch_dim, b.CreateVectorOfStructs(indices));
}

Off<fb::PlanOutput> write_one(Builder& b, const PlanOutput& o) {
  const auto name = write(b, o.name);
  const auto dims = write(b, o.dims);
  const auto cut_by = o.cut_by.empty() ? 0 : b.CreateVector(o.cut_by);
  return fb::CreatePlanOutput(b, name, number<fb::DType>(o.dtype), dims, number<fb::OutputMerge>(o.merge), o.batch_dim,
                              o.mesh, cut_by, o.parts.axes.empty() ? 0 : write_all(b, o.parts.axes));
}

Off<fb::PlanBuffer> write_one(Builder& b, const Buffer& x) {
  const auto name = write(b, x.name);
  return fb::CreatePlanBuffer(b, name, number<fb::BufferKind>(x.kind), number<fb::DType>(x.dtype), write(b, x.dims),
                              x.ref, x.offset, x.bytes, x.versions, x.alias, number<fb::Memory>(x.memory), x.at);
}

Off<fb::SubAxisCuts> write_one(Builder& b, const SubAxisCuts& c) {
  const fb::SubAxis sub_axis = to_fb(c.sub_axis);
  return fb::CreateSubAxisCuts(b, &sub_axis, write_structs(b, c.cuts));
}

// ---- the work of an instruction: the members of the union in its order
Off<fb::Kernel> write_work(Builder& b, const work::Kernel& k) {
  const auto attrs = write(b, k.attrs);
  const auto origin = write(b, k.box.origin), global = write(b, k.box.global);
  const fb::SubAxis batch = to_fb(k.box.batch);
  const auto box = fb::CreateBox(b, origin, global, &batch, write_structs(b, k.box.cuts));
  return fb::CreateKernel(b, static_cast<uint16_t>(k.op), attrs, box, k.key, k.samples);
}
Off<fb::Collective> write_work(Builder& b, const work::Collective& c) {
  const auto cuts = write_all(b, c.cuts);
  const auto to = write_one(b, c.to);
  return fb::CreateCollective(b, static_cast<uint16_t>(c.op), c.group, number<fb::Combine>(c.combine), cuts, to,
                              write(b, c.weights));
}
Off<fb::Feed> write_work(Builder& b, const work::Feed& f) {
  return fb::CreateFeed(b, f.input, f.samples, f.whole_batch);
}
Off<fb::Fetch> write_work(Builder& b, const work::Fetch& f) {
  return fb::CreateFetch(b, f.output, f.samples, f.whole_batch);
}
Off<fb::Send> write_work(Builder& b, const work::Send& s) { return fb::CreateSend(b, s.link); }
Off<fb::Receive> write_work(Builder& b, const work::Receive& r) { return fb::CreateReceive(b, r.link); }
Off<fb::Copy> write_work(Builder& b, const work::Copy& c) { return fb::CreateCopy(b, number<fb::Memory>(c.to)); }
Off<fb::Vote> write_work(Builder& b, const work::Vote&) { return fb::CreateVote(b); }
Off<fb::Commit> write_work(Builder& b, const work::Commit&) { return fb::CreateCommit(b); }
static_assert(static_cast<size_t>(InstructionKind::kCommit) + 1 == static_cast<size_t>(fb::Work::MAX));

Off<fb::Instruction> write_one(Builder& b, const Instruction& i) {
  const auto name = write(b, i.name);
  const auto in = write(b, i.in), out = write(b, i.out);
  const auto waits = write_structs(b, i.waits);
  const auto work = std::visit([&](const auto& w) { return write_work(b, w).Union(); }, i.work);
  return fb::CreateInstruction(b, static_cast<fb::Work>(i.work.index() + 1), work, number<fb::Queue>(i.queue), name, in,
                               out, number<fb::Phase>(i.phase), i.scope, waits, i.flops, i.bytes);
}

Off<fb::Segment> write_one(Builder& b, const Segment& s) {
  const auto name = write(b, s.name);
  return fb::CreateSegment(b, name, write_all(b, s.instructions));
}

Off<fb::Hole> write_one(Builder& b, const Hole& h) {
  const auto attribute = write(b, h.attribute);
  return fb::CreateHole(b, number<fb::HoleKind>(h.kind), h.buffer, h.segment, h.instruction, attribute, h.index);
}

Off<fb::RowWaits> write_one(Builder& b, const RowWaits& w) { return fb::CreateRowWaits(b, write_structs(b, w)); }

Off<fb::Program> write_one(Builder& b, const Program& p) {
  const auto buffers = write_all(b, p.buffers);
  const auto segments = write_all(b, p.segments);
  const auto holes = write_all(b, p.holes);
  const auto row_waits = write_all(b, p.row_waits);
  return fb::CreateProgram(b, buffers, segments, write_structs(b, p.schedule), p.arena_bytes, p.variable_bytes,
                           p.peak_live_bytes, p.host_bytes, holes, row_waits);
}

Off<fb::SampleCut> write_one(Builder& b, const SampleCut& s) {
  const auto micro_batches = write_structs(b, s.micro_batches);
  const fb::Interval whole = to_fb(s.whole);
  return fb::CreateSampleCut(b, &whole, micro_batches);
}

Off<fb::DeviceRow> write_one(Builder& b, const DeviceRow& r) {
  const auto coordinates = write(b, r.coordinates);
  const auto samples = write_all(b, r.samples);
  return fb::CreateDeviceRow(b, r.device, r.program, r.mesh, coordinates, samples, write(b, r.placed));
}

Off<fb::Transfer> write_one(Builder& b, const Transfer& t) {
  const auto source = write_structs(b, t.source);
  return fb::CreateTransfer(b, t.from, t.to, source, write_structs(b, t.target));
}

Off<fb::Link> write_one(Builder& b, const Link& l) {
  const auto name = write(b, l.name);
  return fb::CreateLink(b, name, l.capacity, write_all(b, l.transfers));
}

Off<fb::Entry> write_one(Builder& b, const Entry& e) {
  const auto name = write(b, e.name);
  const auto inputs = write_all(b, e.inputs);
  const auto outputs = write_all(b, e.outputs);
  const auto programs = write_all(b, e.programs);
  const auto rows = write_all(b, e.rows);
  return fb::CreateEntry(b, name, e.batch, inputs, outputs, programs, rows, write_all(b, e.links));
}

// ---- reading
// ------------------------------------------------------------------------------------------------------------------
Interval interval(const Fields& f, const fb::Interval& i, int64_t end, const char* what) {
  f.place(&i, alignof(fb::Interval));
  Interval out{i.begin(), i.end()};
  if (out.begin < 0 || out.end < out.begin || out.end > end) {
    throw f.bad(fmt::format("{} is [{}, {}), expected a range inside [0, {})", what, out.begin, out.end, end));
  }
  return out;
}

std::vector<Interval> intervals(Fields& f, Structs<fb::Interval> v, int64_t end, const char* what) {
  std::vector<Interval> out;
  if (v == nullptr) return out;
  f.structs(v, sizeof(Interval));
  for (const fb::Interval* i : *v) out.push_back(interval(f, *i, end, what));
  return out;
}

SubAxis sub_axis(const Fields& f, const fb::SubAxis* d, size_t rank) {
  if (d == nullptr) return {};
  f.place(d, alignof(fb::SubAxis));
  SubAxis out;
  out.dim = static_cast<int>(f.range(d->dim(), -1, static_cast<int64_t>(rank) - 1, "a sub-axis's dimension"));
  out.outer = f.range(d->outer(), 1, kMaxTensorBytes, "a sub-axis's outer extent");
  out.inner = f.range(d->inner(), 1, kMaxTensorBytes, "a sub-axis's inner extent");
  return out;
}

// read_all(f, table vector, read_one, context...)
template <class T, class R, class... C>
auto read_all(Fields& f, Tables<T> v, R read_one, const C&... context) {
  std::vector<decltype(read_one(f, v->Get(0), context...))> out;
  if (v != nullptr) {
    for (const T* t : *v) {
      f.spend(sizeof(out[0]));
      out.push_back(read_one(f, t, context...));
    }
  }
  return out;
}

DeviceSpec read_device(Fields& f, const fb::Device* t) {
  DeviceSpec out;
  out.kind = f.number<DeviceKind>(t->kind(), "a device's kind");
  for (const int32_t core : f.vector(t->cores()))
    out.cores.push_back(static_cast<int>(f.range(core, 0, 65535, "a device's core")));
  out.index = static_cast<int>(f.range(t->index(), 0, 65535, "a device's index"));
  out.node = static_cast<int>(f.range(t->node(), 0, 65535, "a device's node"));
  out.zone = static_cast<int>(f.range(t->zone(), 0, 65535, "a device's zone"));
  out.place = static_cast<int>(f.range(t->place(), 0, 65535, "a device's place"));
  if (t->links() != nullptr)
    for (const fb::NodeLink* l : *t->links()) {
      f.spend(sizeof(NodeLink));
      const double rate = f.finite(l->rate(), "a link's rate"), latency = f.finite(l->latency(), "a link's latency");
      if (!(rate > 0) || latency < 0) throw f.bad("a link has no rate");
      const NodeLink link{static_cast<int>(f.range(l->place(), 0, 65535, "a link's node")), {rate, latency}};
      if (!out.links.empty() && out.links.back().place >= link.place)
        throw f.bad("a device's links are not in the order of their nodes");
      out.links.push_back(link);
    }
  out.named = t->named();
  out.memory_bytes = f.range(t->memory_bytes(), 0, kMostDeviceMemory, "a device's memory");
  if (t->type() != nullptr) out.type = f.name(t->type(), "a device's type");
  if (const std::vector<double> figures = f.vector(t->figures()); !figures.empty()) {
    if (figures.size() != kFiguresOfDevice)
      throw f.bad(fmt::format("a device has {} figures, expected {}", figures.size(), kFiguresOfDevice));
    size_t at = 0;
    each_figure_of_device(out.figures, [&](const char*, double& figure) {
      if (figure = f.finite(figures[at++], "a device's figure"); figure < 0)
        throw f.bad("a device's figure is negative");
    });
  }
  return out;
}

MeshAxis read_axis(Fields& f, const fb::MeshAxis* t) {
  MeshAxis out{f.name(t->name(), "a mesh axis"), f.range(t->size(), 1, kMaxCount, "a mesh axis' size"),
               f.vector(t->shares()), f.vector(t->state_shares()),
               f.range(t->only(), -1, kMaxCount, "a mesh axis' part")};
  if (out.only >= 0 && (out.size != 1 || out.only >= std::ssize(out.shares)))
    throw f.bad("a mesh axis has a part that its shares do not have");
  for (const auto* shares : {&out.shares, &out.state_shares}) {
    for (const double s : *shares) {
      if (f.finite(s, "a share") < 0 && s != kNoDevice) throw f.bad("a share is negative");
    }
  }
  return out;
}

std::vector<int32_t> device_list(Fields& f, const flatbuffers::Vector<int32_t>* v, const Plan& plan, const char* what) {
  std::vector<int32_t> out = f.vector(v);
  for (const int32_t d : out) f.id(d, plan.devices.size(), what);
  return out;
}

PlanMesh read_mesh(Fields& f, const fb::Mesh* t, const Plan& plan) {
  PlanMesh out;
  out.axes = read_all(f, t->axes(), read_axis);
  out.devices = f.vector(t->devices());
  for (const int32_t d : out.devices) f.id_or_none(d, plan.devices.size(), "a mesh's device");
  return out;
}

std::vector<int32_t> read_part(Fields& f, const fb::GroupPart* t, const Plan& plan) {
  return device_list(f, t->devices(), plan, "a group's device");
}

Group read_group(Fields& f, const fb::Group* t, const Plan& plan) {
  Group out;
  out.axis = f.name(t->axis(), "a group's axis");
  out.parts = read_all(f, t->parts(), read_part, plan);
  return out;
}

AxisSharding read_sharding(Fields& f, const fb::AxisSharding* t, const Dims& dims) {
  AxisSharding out;
  out.placement = f.number<Placement>(t->placement(), "a placement");
  out.sub_axis = sub_axis(f, t->sub_axis(), dims.size());
  f.range(out.sub_axis.outer, 1, kMostRuns, "the outer extent of a variable's cut");  // so many runs it has
  out.state = t->state();
  out.combine = f.number<Combine>(t->combine(), "a combine");
  return out;
}

PlanVariable read_variable(Fields& f, const fb::PlanVariable* t, const Plan& plan) {
  PlanVariable out;
  out.name = f.name(t->name(), "a variable's name");
  out.dtype = f.number<DType>(t->dtype(), "a variable's dtype");
  out.dims = f.dims(t->dims(), out.dtype, "a variable");
  out.role = f.number<Role>(t->role(), "a variable's role");
  out.trainable = t->trainable();
  out.init = f.initializer(t->init());
  out.owner = f.name(t->owner(), "a variable's owner");
  out.state_name = f.name(t->state_name(), "a variable's state name");
  out.mesh = f.id(t->mesh(), plan.meshes.size(), "a variable's mesh");
  out.storage_sharding.axes = read_all(f, t->storage_sharding(), read_sharding, out.dims);
  out.memory = f.number<Memory>(t->memory(), "a variable's memory");
  return out;
}

int batch_dim(const Fields& f, int dim, const Dims& dims) {
  return static_cast<int>(f.range(dim, -1, static_cast<int64_t>(dims.size()) - 1, "a batch_dim"));
}

PlanInput read_input(Fields& f, const fb::PlanInput* t) {
  PlanInput out;
  out.name = f.name(t->name(), "an input's name");
  out.dtype = f.number<DType>(t->dtype(), "an input's dtype");
  out.dims = f.dims(t->dims(), out.dtype, "an input");
  out.batch_dim = batch_dim(f, t->batch_dim(), out.dims);
  if (t->indices() != nullptr) {
    f.structs(t->indices(), sizeof(IndexRange));
    for (const fb::IndexRange* r : *t->indices())
      out.indices.push_back({r->limit(), r->ignores() ? std::optional(r->ignored()) : std::nullopt});
  }
  if (!out.indices.empty() && out.dtype != DType::kI32 && out.dtype != DType::kI64)
    throw invalid("input '{}' is {} and an index; indices are i32 or i64", out.name, name_of(out.dtype));
  return out;
}

AxisSharding read_sharding(Fields& f, const fb::AxisSharding* t, const Dims& dims);

PlanOutput read_output(Fields& f, const fb::PlanOutput* t, const Plan& plan) {
  PlanOutput out;
  out.name = f.name(t->name(), "an output's name");
  out.dtype = f.number<DType>(t->dtype(), "an output's dtype");
  out.dims = f.dims(t->dims(), out.dtype, "an output");
  out.merge = f.number<OutputMerge>(t->merge(), "an output's merge");
  out.batch_dim = batch_dim(f, t->batch_dim(), out.dims);
  out.mesh = f.id_or_none(t->mesh(), plan.meshes.size(), "an output's mesh");
  if (t->cut_by() != nullptr) {
    f.spend(t->cut_by()->size());
    for (const uint8_t cut : *t->cut_by()) out.cut_by.push_back(cut != 0);
  }
  if (t->parts() != nullptr) {
    out.parts.axes = read_all(f, t->parts(), read_sharding, out.dims);
    if (out.mesh == kNone || out.parts.axes.size() != plan.meshes[out.mesh].axes.size())
      throw f.bad("an output's parts have axes of another mesh");
  }
  return out;
}

Buffer read_buffer(Fields& f, const fb::PlanBuffer* t, size_t buffers) {
  Buffer out;
  out.name = f.name(t->name(), "a buffer's name");
  out.kind = f.number<BufferKind>(t->kind(), "a buffer's kind");
  out.dtype = f.number<DType>(t->dtype(), "a buffer's dtype");
  out.dims = f.dims(t->dims(), out.dtype, "a buffer");
  out.ref = static_cast<int32_t>(f.range(t->ref(), -1, INT32_MAX, "a buffer's ref"));
  out.offset = f.range(t->offset(), -1, kMostArena, "a buffer's offset");
  out.bytes = f.range(t->bytes(), 0, kMaxTensorBytes, "a buffer's bytes");
  out.versions = static_cast<int32_t>(f.range(t->versions(), 1, kMostVersions, "a buffer's versions"));
  out.alias = f.id_or_none(t->alias(), buffers, "a buffer's alias");
  out.memory = f.number<Memory>(t->memory(), "a buffer's memory");
  out.at = f.range(t->at(), 0, kMaxTensorBytes, "a buffer's place in its storage");
  return out;
}

Box read_box(Fields& f, const fb::Box* t) {
  Box out;
  if (t == nullptr) return out;
  out.origin = f.vector(t->origin());
  out.global = f.vector(t->extents());
  if (std::max(out.origin.size(), out.global.size()) > size_t{kMaxRank}) throw f.bad("a box has too many dimensions");
  for (const auto* list : {&out.origin, &out.global}) {
    for (const int64_t d : *list) f.range(d, 0, kMaxTensorBytes, "a box");
  }
  out.batch = sub_axis(f, t->batch(), out.global.size());
  if (t->cuts() == nullptr) return out;
  f.structs(t->cuts(), sizeof(BoxCut));
  for (const fb::BoxCut* c : *t->cuts()) {
    BoxCut cut{sub_axis(f, &c->sub_axis(), out.global.size()), f.range(c->extent(), 0, kMaxTensorBytes, "a box"), 0, 0};
    cut.begin = f.range(c->begin(), 0, cut.extent, "a box");
    cut.size = f.range(c->size(), 0, cut.extent - cut.begin, "a box");
    out.cuts.push_back(cut);
  }
  return out;
}

SubAxisCuts read_sub_axis_cuts(Fields& f, const fb::SubAxisCuts* t) {
  if (t == nullptr) return {};
  return {sub_axis(f, t->sub_axis(), kMaxRank), intervals(f, t->cuts(), kMaxTensorBytes, "the cut of a collective")};
}

int32_t samples_of(const Fields& f, int32_t given) {
  return static_cast<int32_t>(f.range(given, 0, kMostVersions, "an instruction's samples"));
}
int32_t index_of(const Fields& f, int32_t given, const char* what) {
  return static_cast<int32_t>(f.range(given, 0, INT32_MAX, what));
}

// ---- the work of an instruction
work::Kernel read_work(Fields& f, const fb::Kernel& t) {
  return {f.op_code(t.op()), f.attrs(t.attrs()), read_box(f, t.box()), t.key(), samples_of(f, t.samples())};
}
work::Collective read_work(Fields& f, const fb::Collective& t) {
  return {f.op_code(t.op()),
          index_of(f, t.group(), "a collective's group"),
          f.number<Combine>(t.combine(), "what a collective combines by"),
          read_all(f, t.cuts(), read_sub_axis_cuts),
          read_sub_axis_cuts(f, t.to()),
          f.vector(t.weights())};
}
work::Feed read_work(Fields& f, const fb::Feed& t) {
  return {index_of(f, t.input(), "a feed's input"), samples_of(f, t.samples()), t.whole_batch()};
}
work::Fetch read_work(Fields& f, const fb::Fetch& t) {
  return {index_of(f, t.output(), "a fetch's output"), samples_of(f, t.samples()), t.whole_batch()};
}
work::Send read_work(Fields& f, const fb::Send& t) { return {index_of(f, t.link(), "a send's link")}; }
work::Receive read_work(Fields& f, const fb::Receive& t) { return {index_of(f, t.link(), "a receive's link")}; }
work::Copy read_work(Fields& f, const fb::Copy& t) { return {f.number<Memory>(t.to(), "a copy's memory")}; }

void read_work(Fields& f, const fb::Instruction* t, Instruction& out) {
  switch (t->work_type()) {
    case fb::Work::Kernel: out.work = read_work(f, *t->work_as_Kernel()); return;
    case fb::Work::Collective: out.work = read_work(f, *t->work_as_Collective()); return;
    case fb::Work::Feed: out.work = read_work(f, *t->work_as_Feed()); return;
    case fb::Work::Fetch: out.work = read_work(f, *t->work_as_Fetch()); return;
    case fb::Work::Send: out.work = read_work(f, *t->work_as_Send()); return;
    case fb::Work::Receive: out.work = read_work(f, *t->work_as_Receive()); return;
    case fb::Work::Copy: out.work = read_work(f, *t->work_as_Copy()); return;
    case fb::Work::Vote: out.work = work::Vote{}; return;
    case fb::Work::Commit: out.work = work::Commit{}; return;
    case fb::Work::NONE: break;
  }
  throw f.bad("an instruction of no known kind");
}

Instruction read_instruction(Fields& f, const fb::Instruction* t, const Plan& plan, const Program& program) {
  Instruction out;
  if (t->work() == nullptr) throw f.bad("an instruction without work");
  read_work(f, t, out);
  out.queue = f.number<Queue>(t->queue(), "an instruction's queue");
  out.name = f.name(t->name(), "an instruction's name");
  out.in = f.vector(t->in());
  out.out = f.vector(t->out());
  for (const auto* list : {&out.in, &out.out}) {
    for (const BufferId id : *list) f.id_or_none(id, program.buffers.size(), "an instruction's buffer");
  }
  out.phase = f.number<Phase>(t->phase(), "an instruction's phase");
  out.scope = f.id(t->scope(), plan.scopes.size(), "an instruction's scope");
  if (t->waits() != nullptr) {
    f.structs(t->waits(), sizeof(Wait));
    for (const fb::Wait* w : *t->waits()) {
      out.waits.push_back({static_cast<Queue>(f.id(w->queue(), kQueues, "a wait's queue")),
                           static_cast<int32_t>(f.range(w->index(), 0, INT32_MAX, "a wait"))});
    }
  }
  out.flops = f.finite(t->flops(), "an instruction's flops");
  out.bytes = f.finite(t->bytes(), "an instruction's bytes");
  return out;
}

Segment read_segment(Fields& f, const fb::Segment* t, const Plan& plan, const Program& program) {
  Segment out{f.name(t->name(), "a segment's name"), read_all(f, t->instructions(), read_instruction, plan, program)};
  for (size_t i = 0; i < out.instructions.size(); ++i) {
    for (const Wait& w : out.instructions[i].waits) f.id(w.index, i, "a wait for an earlier instruction");
  }
  return out;
}

TensorType type_of(const Program& program, BufferId id) {
  if (id == kNone) return {};
  const Buffer& b = program.buffers[id];
  return {b.dtype, b.dims};
}

// A kernel trusts that its attributes are there, and their types: what it does not find it would take for zero.
Attrs checked_attrs(const work::Kernel& k) {
  constexpr const char* kTypes[] = {"an integer", "a number", "true or false", "a text", "integers", "numbers"};
  static_assert(std::size(kTypes) == std::variant_size_v<Attr>);
  Attrs all = complete_attrs(def(k.op), k.attrs);
  for (const auto& [name, value] : all) {
    const auto found = k.attrs.find(name);
    if (found != k.attrs.end() && found->second.index() != value.index())
      throw invalid("attribute '{}' is {}, {}, which is not of its type: {}", name, to_string(found->second),
                    kTypes[found->second.index()], kTypes[value.index()]);
  }
  return all;
}

// A kernel trusts the shapes of its operands: they must be those that the op's rule gives.
void check_types(const Program& program, Instruction& i) {
  std::vector<TensorType> in, out;
  std::vector<bool> present;
  for (const BufferId id : i.in) in.push_back(type_of(program, id)), present.push_back(id != kNone);
  for (const BufferId id : i.out) out.push_back(type_of(program, id));
  auto& kernel = *i.as<work::Kernel>();
  kernel.attrs = checked_attrs(kernel);
  const std::vector<TensorType> types = infer(kernel.op, kernel.attrs, in, present);
  if (types == out) return;
  std::vector<std::string> want, found;
  for (const TensorType& t : types) want.push_back(to_string(t));
  for (const TensorType& t : out) found.push_back(to_string(t));
  throw invalid("results are {}, expected {}", fmt::join(found, ", "), fmt::join(want, ", "));
}

// `check`, of an instruction of the program; what it refuses is a fault of the plan.
template <class Check>
void told_of(const Plan& plan, const Entry& entry, const Program& program, size_t segment, size_t instruction,
             int32_t device, Check check) {
  try {
    check();
  } catch (const Error& e) {
    fail_at(plan, entry,
            {.program = &program, .device = device, .segment = &program.segments[segment], .instruction = instruction},
            "", e.message());
  }
}

void check_types(const Plan& plan, Entry& entry) {
  for (Program& program : entry.programs)
    for (size_t s = 0; s < program.segments.size(); ++s)
      for (size_t k = 0; k < program.segments[s].instructions.size(); ++k)
        if (Instruction& i = program.segments[s].instructions[k]; i.kernel() != nullptr)
          told_of(plan, entry, program, s, k, kNone, [&] { check_types(program, i); });
}

// So must they with the attributes that rows fill in.
void check_placed_types(const Plan& plan, const Entry& entry, const Program& program,
                        const std::vector<const DeviceRow*>& rows) {
  const std::vector<Hole>& holes = program.holes;
  const auto of_attribute = [](const Hole& h) { return h.kind == HoleKind::kAttribute; };
  for (auto first = std::find_if(holes.begin(), holes.end(), of_attribute); first != holes.end();) {
    const auto end = std::find_if(first, holes.end(), [&](const Hole& h) {
      return !of_attribute(h) || h.segment != first->segment || h.instruction != first->instruction;
    });
    const auto s = static_cast<size_t>(first->segment), k = static_cast<size_t>(first->instruction);
    Instruction placed = program.segments[s].instructions[k];
    std::set<Ints> seen;
    for (const DeviceRow* row : rows) {
      const auto values = row->placed.begin() + (first - holes.begin());
      if (!seen.emplace(values, values + (end - first)).second) continue;
      for (auto h = first; h != end; ++h) placed.as<work::Kernel>()->attrs[h->attribute] = *(values + (h - first));
      told_of(plan, entry, program, s, k, row->device, [&] { check_types(program, placed); });
    }
    first = std::find_if(end, holes.end(), of_attribute);
  }
}

// What walking the schedule costs is bounded: a few rows can name long segments again and again.
void check_length(const Fields& f, const Program& program, const Plan& plan) {
  double steps = 0, members = 1;
  for (const ScheduleRow& r : program.schedule)
    steps += static_cast<double>(program.segments[r.segment].instructions.size());
  for (const Group& g : plan.groups)
    for (const auto& part : g.parts) members += static_cast<double>(part.size());
  if (steps * members > 4e9) throw f.bad(fmt::format("its schedule of {} instructions is too long", steps));
}

Hole read_hole(Fields& f, const fb::Hole* t) {
  return {f.number<HoleKind>(t->kind(), "a hole's kind"), t->buffer(), t->segment(), t->instruction(),
          f.name(t->attribute(), "a hole's attribute"),   t->index()};
}

RowWaits read_row_waits(Fields& f, const fb::RowWaits* t) {
  RowWaits out;
  if (t->waits() == nullptr) return out;
  f.structs(t->waits(), sizeof(RowWait));
  for (const fb::RowWait* w : *t->waits())
    out.push_back({w->at(), {static_cast<Queue>(f.id(w->on().queue(), kQueues, "a wait's queue")), w->on().index()}});
  return out;
}

Program read_program(Fields& f, const fb::Program* t, const Plan& plan) {
  Program out;
  const size_t buffers = t->buffers() != nullptr ? t->buffers()->size() : 0;
  out.buffers = read_all(f, t->buffers(), read_buffer, buffers);
  out.segments = read_all(f, t->segments(), read_segment, plan, out);
  out.arena_bytes = f.range(t->arena_bytes(), 0, kMostArena, "arena_bytes");
  out.host_bytes = f.range(t->host_bytes(), 0, kMostArena, "host_bytes");
  out.variable_bytes = f.range(t->variable_bytes(), 0, INT64_MAX, "variable_bytes");
  out.peak_live_bytes = f.range(t->peak_live_bytes(), 0, INT64_MAX, "peak_live_bytes");
  out.row_waits = read_all(f, t->row_waits(), read_row_waits);
  const size_t lists = out.row_waits.size();
  if (t->schedule() != nullptr) {
    f.structs(t->schedule(), sizeof(ScheduleRow));
    for (const fb::ScheduleRow* r : *t->schedule()) {
      out.schedule.push_back(
          {f.id(r->segment(), out.segments.size(), "a schedule row's segment"),
           static_cast<int32_t>(f.range(r->micro_batch(), 0, kMaxCount - 1, "a schedule row's micro-batch")),
           static_cast<int32_t>(f.range(r->version(), 0, kMostVersions - 1, "a schedule row's version")), r->whole(),
           r->waits() == kNone ? kNone : f.id(r->waits(), lists, "a schedule row's waits")});
    }
  }
  out.holes = read_all(f, t->holes(), read_hole);
  check_length(f, out, plan);
  if (const HoleFault fault = fault_of_holes(out); !fault.what.empty()) throw f.bad(fault.what);
  return out;
}

SampleCut read_samples(Fields& f, const fb::SampleCut* t, const Entry& entry) {
  SampleCut out;
  if (t->whole() != nullptr) out.whole = interval(f, *t->whole(), entry.batch, "a device's samples");
  out.micro_batches = intervals(f, t->micro_batches(), entry.batch, "a device's micro-batch");
  return out;
}

DeviceRow read_row(Fields& f, const fb::DeviceRow* t, const Plan& plan, const Entry& entry) {
  DeviceRow out;
  out.device = f.id(t->device(), plan.devices.size(), "a device row");
  out.program = f.id(t->program(), entry.programs.size(), "a device row's program");
  out.mesh = f.id(t->mesh(), plan.meshes.size(), "a device row's mesh");
  out.coordinates = f.vector(t->coordinates());
  const std::vector<MeshAxis>& axes = plan.meshes[out.mesh].axes;
  if (out.coordinates.size() != axes.size()) throw f.bad("a device row has coordinates of another mesh");
  for (size_t i = 0; i < out.coordinates.size(); ++i) f.range(out.coordinates[i], 0, axes[i].size - 1, "a coordinate");
  out.samples = read_all(f, t->samples(), read_samples, entry);
  if (out.samples.empty()) throw f.bad("a device row has no samples");
  out.placed = f.vector(t->placed());
  const size_t holes = entry.programs[out.program].holes.size();
  if (out.placed.size() != holes)
    throw f.bad(fmt::format("a device row has {} values for {} holes", out.placed.size(), holes));
  for (const SampleCut& cut : out.samples) {
    for (const ScheduleRow& r : entry.programs[out.program].schedule) {
      if (!cut.micro_batches.empty() || r.micro_batch != 0)
        f.id(r.micro_batch, cut.micro_batches.size(), "a schedule row's micro-batch");
    }
  }
  return out;
}

Transfer read_transfer(Fields& f, const fb::Transfer* t, const Plan& plan) {
  Transfer out;
  out.from = f.id(t->from(), plan.devices.size(), "a transfer's device");
  out.to = f.id(t->to(), plan.devices.size(), "a transfer's device");
  out.source = intervals(f, t->source(), kMaxTensorBytes, "a transfer");
  out.target = intervals(f, t->target(), kMaxTensorBytes, "a transfer");
  return out;
}

Link read_link(Fields& f, const fb::Link* t, const Plan& plan) {
  Link out;
  out.name = f.name(t->name(), "a link's name");
  out.capacity = static_cast<int32_t>(f.range(t->capacity(), 1, kMostVersions, "a link's capacity"));
  out.transfers = read_all(f, t->transfers(), read_transfer, plan);
  return out;
}

Entry read_entry(Fields& f, const fb::Entry* t, const Plan& plan) {
  Entry out;
  out.name = f.name(t->name(), "an entry's name");
  out.batch = f.range(t->batch(), 0, kMaxTensorBytes, "an entry's batch");
  out.inputs = read_all(f, t->inputs(), read_input);
  out.outputs = read_all(f, t->outputs(), read_output, plan);
  out.programs = read_all(f, t->programs(), read_program, plan);
  out.rows = read_all(f, t->rows(), read_row, plan, out);
  const auto rows = rows_of_programs(out);
  check_types(plan, out);
  for (size_t p = 0; p < rows.size(); ++p) check_placed_types(plan, out, out.programs[p], rows[p]);
  out.links = read_all(f, t->links(), read_link, plan);
  if (out.rows.size() != plan.devices.size()) {
    throw f.bad(fmt::format("entry '{}' has {} rows for {} devices", out.name, out.rows.size(), plan.devices.size()));
  }
  for (size_t i = 0; i < out.rows.size(); ++i) {
    if (out.rows[i].device != static_cast<int32_t>(i))
      throw f.bad("an entry's rows are not in the order of the devices");
  }
  return out;
}

// About as many bytes as a plan becomes: a builder that grows copies what is there.
size_t likely_bytes(const Plan& plan) {
  size_t instructions = 0;
  for (const Entry& entry : plan.entries)
    for (const Program& program : entry.programs)
      for (const Segment& segment : program.segments) instructions += segment.instructions.size();
  return std::min<size_t>(256 * 1024 + 1024 * instructions, 256 << 20);
}

}  // namespace

std::vector<uint8_t> serialize(const Plan& plan) {
  Builder b(likely_bytes(plan));
  const auto model = write(b, plan.model), strategy = write(b, plan.strategy);
  const auto devices = write_all(b, plan.devices);
  const auto meshes = write_all(b, plan.meshes);
  const auto groups = write_all(b, plan.groups);
  const auto scopes = write(b, plan.scopes);
  const auto variables = write_all(b, plan.variables);
  const auto entries = write_all(b, plan.entries);
  const auto optimizer = write(b, plan.optimizer);
  const auto lr_schedule = write(b, plan.lr_schedule);
  const auto source = write(b, serialize(plan.source));
  std::vector<Off<flatbuffers::String>> notes;
  for (const std::string& note : plan.notes) notes.push_back(b.CreateString(note.data(), note.size()));
  const auto notes_at = write(b, notes);
  const auto options = write(b, attrs_of(plan.options)), profile = write(b, attrs_of(plan.profile));
  Off<flatbuffers::Vector<int64_t>> stage_begins;
  if (!plan.stage_begins.empty()) stage_begins = b.CreateVector(plan.stage_begins.data(), plan.stage_begins.size());
  const auto measured = plan.profile.measured ? b.CreateString(text_of(json_of(*plan.profile.measured))) : 0;
  fb::FinishPlanBuffer(b, fb::CreatePlan(b, kPlanFormatVersion, model, plan.model_hash, strategy, devices, meshes,
                                         groups, scopes, variables, entries, optimizer, lr_schedule, plan.micro_batches,
                                         number<fb::Precision>(plan.precision), source, notes_at, options,
                                         plan.memory_price, profile, stage_begins, measured));
  return bytes_of(b);
}

Plan deserialize_unverified(const uint8_t* bytes, size_t size) {
  Fields f("plan", size);
  if (size == 0) throw f.bad("it is empty");
  if (!is_plan_file(bytes, size)) {
    throw f.bad(is_graph_file(bytes, size) ? "this is a graph; plan it for devices first"
                                           : "its first bytes are not those of a plan");
  }
  if (size >= kMaxFileBytes) throw f.bad("it is larger than 2 GiB");
  std::vector<uint64_t> storage;
  const uint8_t* data = aligned(bytes, size, storage);
  auto check = verifier(data, size);
  if (!fb::VerifyPlanBuffer(check)) throw f.bad("it is damaged, cut short, or of another version of libwhale");
  const fb::Plan* t = fb::GetPlan(data);
  f.range(t->version(), kPlanFormatVersion, kPlanFormatVersion,
          "its format version (plans are made again from their graph; a newer one needs a newer libwhale)");

  Plan out;
  out.model = f.name(t->model(), "the model's name");
  out.model_hash = t->model_hash();
  out.strategy = f.name(t->strategy(), "the strategy");
  out.devices = read_all(f, t->devices(), read_device);
  for (int last = 0; const DeviceSpec& d : out.devices) {
    if (d.node != last && d.node != last + (&d != out.devices.data())) throw f.bad("nodes are not in order");
    last = d.node;
  }
  out.meshes = read_all(f, t->meshes(), read_mesh, out);
  out.groups = read_all(f, t->groups(), read_group, out);
  out.scopes = f.scopes(t->scopes());
  out.variables = read_all(f, t->variables(), read_variable, out);
  out.entries = read_all(f, t->entries(), read_entry, out);
  out.optimizer = f.optimizer(t->optimizer());
  out.lr_schedule = f.lr_schedule(t->lr_schedule());
  out.micro_batches = f.range(t->micro_batches(), 1, kMaxCount, "micro_batches");
  out.precision = f.number<Precision>(t->precision(), "the precision");
  try {
    out.options = options_of(f.attrs(t->options()));
    out.profile = profile_of(f.attrs(t->profile()));
    if (t->measured() != nullptr && t->measured()->size() > 0) {
      out.profile.measured = measured_of(Json::parse(t->measured()->str(), nullptr, false));
      if (!out.profile.measured) throw f.bad("its times of ops are no profile");
    }
  } catch (const Error& e) {
    throw f.bad(e.message());
  }
  out.memory_price = f.finite(t->memory_price(), "the price of memory");
  if (out.memory_price < 1) throw f.bad("the price of memory is below 1");
  if (t->source() == nullptr) throw f.bad("it has no source graph");
  out.source = read_graph(t->source()->data(), t->source()->size());
  if (t->stage_begins() != nullptr) {
    for (const int64_t op : *t->stage_begins())
      out.stage_begins.push_back(f.range(op, 0, std::ssize(out.source.ops) - 1, "an op that a stage begins with"));
  }
  if (t->notes() != nullptr) {
    for (const auto* note : *t->notes()) out.notes.push_back(f.text(note, "a note"));
  }
  return out;
}

Plan deserialize(const uint8_t* bytes, size_t size) {
  try {
    Plan out = deserialize_unverified(bytes, size);
    verify(out);
    return out;
  } catch (const PlanFault& fault) {
    throw error(Code::kFailedPrecondition, "the plan contradicts itself: {}", fault.message())
        .at_op(fault.at.instruction)
        .at_scope(fault.at.scope)
        .at_device(fault.at.device);
  }
}

}  // namespace whale
