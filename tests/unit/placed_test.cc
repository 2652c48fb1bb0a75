// Programs of devices that differ by their place alone: as many as there are local sizes, with holes that rows fill.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "caught.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "own_programs.h"
#include "plan/part.h"
#include "trained.h"

namespace whale {
namespace {

Plan plan_of(const small::Model& m, const std::string& devices, const std::string& strategy, int zero = 1,
             const std::function<void(CompileOptions&)>& change = {}) {
  CompileOptions options;
  options.strategy = strategy;
  options.zero = zero;
  if (change) change(options);
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}
small::Model model() { return small::gpt(16, OptimizerKind::kAdamW, 2, 8, 16, 32); }

TEST_CASE("devices of the same local sizes have one program") {
  const small::Model m = model();
  for (const int zero : {1, 2, 3}) {
    CAPTURE(zero);
    CHECK(plan_of(m, "null:8", "replica(8)", zero).entries[0].programs.size() == 1);
    CHECK(plan_of(m, "null:8", "replica(4) > split(2)", zero).entries[0].programs.size() == 1);
    const Plan plan = plan_of(m, "null:16", "replica(4) > pipeline(2, micro_batches=2) > split(2)", zero);
    CHECK(plan.entries[0].programs.size() == 2);  // its stages
    CHECK(!plan.entries[0].programs[0].holes.empty());
  }
  const Plan uneven = plan_of(m, "null:4", "replica(4, shares=[3,3,1,1])");
  CHECK(uneven.entries[0].programs.size() == 2);
  CHECK(plan_of(m, "null:4", "replica(4)", 0).entries[0].programs[0].holes.empty());  // nothing follows from the place
  CHECK(plan_of(m, "null:1", "", 0).entries[0].programs[0].holes.empty());
}

TEST_CASE("products in chunks share programs too") {
  const Plan plan =
      plan_of(model(), "null:8", "replica(4) > split(2)", 1, [](CompileOptions& o) { o.matmul_chunks = 2; });
  size_t chunks = 0;
  for (const Instruction& i : plan.entries[0].programs[0].segments[0].instructions) chunks += i.name.ends_with("#1");
  CHECK(chunks > 0);
  CHECK(plan.entries[0].programs.size() == 1);
}

// Of a variable whose state is cut: where the storage shardings say that the device's part of the state lies.
int64_t begin_in_storage(const Plan& plan, const PlanVariable& state, const DeviceRow& row, DType dtype) {
  const Part part = part_of(state.dims, state.storage_sharding, plan.meshes[row.mesh].axes, row.coordinates);
  int64_t begin = -1;
  for_each_run(state.dims, part, [&](int64_t logical, int64_t, int64_t) {
    if (begin < 0) begin = logical * size_of(dtype);
  });
  return begin;
}

TEST_CASE("what a row fills in is where its device's part of a parameter lies") {
  const Plan plan = plan_of(model(), "null:4", "replica(4)");
  const Entry& entry = plan.entries[0];
  REQUIRE(entry.programs.size() == 1);
  for (const DeviceRow& row : entry.rows) {
    const Program p = bound(entry.programs[0], row);
    CHECK(p.holes.empty());
    size_t checked = 0;
    for (const Instruction& i : p.segments.back().instructions) {
      if (i.kind() != InstructionKind::kKernel || !has_flag(i.kernel()->op, kUpdateOp)) continue;
      // A parameter's part and its states' have the same type: any state that is cut says where all of them are.
      std::set<int64_t> parameters, states;
      for (const BufferId id : i.in) {
        if (id == kNone || p.buffers[id].kind != BufferKind::kVariable) continue;
        const Buffer& b = p.buffers[id];
        const PlanVariable& v = plan.variables[b.ref];
        if (v.role == Role::kParameter && b.alias != kNone) parameters.insert(b.at);
        if (v.role == Role::kState && b.alias == kNone && b.bytes < element_count(v.dims) * size_of(v.dtype))
          states.insert(begin_in_storage(plan, v, row, v.dtype));
      }
      if (states.empty()) continue;
      CHECK(parameters == states);
      ++checked;
    }
    CHECK(checked > 0);
  }
}

TEST_CASE("devices with programs of their own train to the same bits") {
  const small::Model m = model();
  for (const char* strategy : {"replica(4)", "replica(2) > split(2)", "replica(2) > pipeline(2, micro_batches=2)"})
    for (const int zero : {1, 3}) {
      CAPTURE(strategy);
      CAPTURE(zero);
      const Plan plan = plan_of(m, "ref:4", strategy, zero);
      Plan own = plan;
      for (Entry& entry : own.entries) give_own_programs(entry);
      if (zero == 1) CHECK(own.entries[0].programs.size() > plan.entries[0].programs.size());
      verify(own);
      CHECK(small::train(own, 3, 32) == small::train(plan, 3, 32));
    }
}

TEST_CASE("rows with holes survive bytes, and are printed by the numbers of the holes") {
  const Plan plan = plan_of(model(), "ref:4", "replica(2) > split(2)");
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan again = deserialize(bytes.data(), bytes.size());
  CHECK(serialize(again) == bytes);
  CHECK(again.entries[0].programs[0].holes == plan.entries[0].programs[0].holes);
  for (size_t r = 0; r < 4; ++r) CHECK(again.entries[0].rows[r].placed == plan.entries[0].rows[r].placed);
  const std::string text = print(plan);
  CHECK(has(text, ", places @0="));
  CHECK(has(text, " +@0"));
  CHECK(has(text, " begin=@"));
}

TEST_CASE("what rows fill in is checked like the program's own") {
  const Plan good = plan_of(model(), "ref:4", "replica(2) > split(2)");
  const auto error_after = [&](const std::function<void(Program&, DeviceRow&)>& change) {
    Plan plan = good;
    change(plan.entries[0].programs[0], plan.entries[0].rows[3]);
    const std::vector<uint8_t> bytes = serialize(plan);
    return message_of([&] { deserialize(bytes.data(), bytes.size()); },
                      {Code::kInvalidArgument, Code::kFailedPrecondition});
  };
  const std::vector<Hole>& holes = good.entries[0].programs[0].holes;
  const auto number = [&](HoleKind kind, const std::string& attribute = "") {
    const auto at = std::ranges::find_if(
        holes, [&](const Hole& h) { return h.kind == kind && (attribute.empty() || h.attribute == attribute); });
    REQUIRE(at != holes.end());
    return static_cast<size_t>(at - holes.begin());
  };
  const size_t part = number(HoleKind::kAt), begin = number(HoleKind::kAttribute, "begin"),
               origin = number(HoleKind::kOrigin);
  CHECK(error_after([](Program&, DeviceRow&) {}) == "");
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed[part] = 1 << 20; }), "is placed at 1048576"));
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed[part] = -4; }), "is placed at -4"));
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed[part] -= 1; }), "not a multiple of 4"));
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed[origin] = 1 << 20; }), "is placed at 1048576"));
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed[begin] += 1; }), ": results are "));
  CHECK(has(error_after([&](Program&, DeviceRow& r) { r.placed.pop_back(); }), "values for"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { set_value(p, p.holes[origin], 4); }), "in the program it is 4"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { std::swap(p.holes[0], p.holes[1]); }), "not behind the last"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[part].buffer = 100000; }), "no buffer 100000"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[part].buffer = -1; }), "no buffer -1"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[begin].instruction = 100000; }), "no instruction"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[begin].segment = -1; }), "no instruction"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[begin].attribute = "sub_axis"; }), "for a place to say"));
  CHECK(has(error_after([&](Program& p, DeviceRow&) { p.holes[origin].index = 7; }), "for a place to say"));
  // Not a kernel's number that its program alone is checked by.
  CHECK(
      has(error_after([&](Program& p, DeviceRow&) { p.holes[begin].attribute = kIndexLimit; }), "for a place to say"));
}

TEST_CASE("parts that lie to each other in another way on one device are refused") {
  Plan plan = plan_of(model(), "ref:4", "replica(4)");
  Entry& entry = plan.entries[0];
  Program& p = entry.programs[0];
  // An update's result lies where the part does that it updates: one of the two alone is moved.
  const auto k = static_cast<size_t>(
      std::ranges::find_if(p.holes, [](const Hole& h) { return h.kind == HoleKind::kAt; }) - p.holes.begin());
  DeviceRow& row = entry.rows[1];
  const Buffer& b = p.buffers[p.holes[k].buffer];
  row.placed[k] += row.placed[k] >= b.bytes ? -b.bytes : b.bytes;
  CHECK(has(message_of([&] { verify(plan); }), "lie to each other in another way"));
}

}  // namespace
}  // namespace whale
