// What the plan verifier sees before anything runs: groups, orders, samples and micro-batches that are not those of the
// meshes, and values that are read when they are no longer what their name says.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "own_programs.h"
#include "plan_case.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

Plan plan_of(const small::Model& m, const std::string& devices, const std::string& strategy, int64_t accumulation = 1) {
  CompileOptions options;
  options.strategy = strategy;
  options.accumulation = accumulation;
  return compile(m.g, parse_devices(devices), options);
}
std::string after(Plan plan, const std::function<void(Plan&, Entry&, Program&)>& damage) {
  damage(plan, plan.entries[0], plan.entries[0].programs[0]);
  return message_of([&] { verify(plan); });
}
bool is_collective(const Instruction& i) { return i.kind() == InstructionKind::kCollective; }

}  // namespace

TEST_CASE("groups are the lines of the mesh in their order") {
  const Plan plan = plan_of(small::gpt(4), "null:4", "replica(2) > split(2)");
  CHECK(after(plan, [](Plan&, Entry&, Program&) {}) == "");
  CHECK(has(after(plan, [](Plan& p, Entry&, Program&) { std::swap(p.groups[0].parts[0][0], p.groups[0].parts[1][0]); }),
            "not the devices along"));
  CHECK(has(after(plan, [](Plan& p, Entry&, Program&) { std::swap(p.groups[1].parts[0][0], p.groups[1].parts[0][1]); }),
            "in their order"));
  CHECK(has(after(plan, [](Plan& p, Entry&, Program&) { std::swap(p.groups[0], p.groups[1]); }), "is along axis"));
  CHECK(has(after(plan, [](Plan& p, Entry&, Program&) { p.groups.pop_back(); }), "groups for"));
}

TEST_CASE("members of a group have the operands of a bucket in one order") {
  const Plan plan = plan_of(small::gpt(4), "null:2", "replica(2)");
  CHECK(has(after(plan,
                  [](Plan&, Entry& e, Program&) {
                    e.programs.push_back(e.programs[0]);
                    e.rows[1].program = 1;
                    Program& p = e.programs[1];
                    for (Segment& s : p.segments)
                      for (Instruction& i : s.instructions)
                        for (size_t k = 0; is_collective(i) && k + 1 < i.in.size(); ++k) {
                          const Buffer &a = p.buffers[i.in[k]], &b = p.buffers[i.in[k + 1]];
                          if (a.dims != b.dims) continue;
                          std::swap(i.in[k], i.in[k + 1]), std::swap(i.out[k], i.out[k + 1]);
                          return;
                        }
                    FAIL("no bucket has two operands of one shape");
                  }),
            "different collectives"));
}

TEST_CASE("samples are dealt out by the shares of the mesh") {
  const Plan plan = plan_of(small::mlp(7), "null:3", "replica(3, shares=[3,2,1])", 2);
  CHECK(after(plan, [](Plan&, Entry&, Program&) {}) == "");
  const auto cut = [](Entry& e, size_t device) -> SampleCut& {
    for (SampleCut& c : e.rows[device].samples)
      if (c.whole.size() != e.batch) return c;
    FAIL("nothing is cut");
    return e.rows[device].samples[0];
  };
  CHECK(has(after(plan, [&](Plan&, Entry& e, Program&) { --cut(e, 1).micro_batches[0].begin; }), "not its share"));
  CHECK(has(after(plan, [&](Plan&, Entry& e, Program&) { cut(e, 0).whole = cut(e, 1).whole; }), "not its share"));
  CHECK(has(after(plan,
                  [&](Plan&, Entry& e, Program&) {
                    SampleCut& c = cut(e, 2);
                    std::swap(c.micro_batches[0], c.micro_batches[1]);
                  }),
            "not its share"));
  CHECK(after(plan, [](Plan& p, Entry&, Program&) { p.meshes[0].axes[0].shares = {1, 2, 3}; }) != "");
}

TEST_CASE("every micro-batch is worked on once") {
  for (const char* strategy : {"replica(2)", "pipeline(2, micro_batches=3)"}) {
    CAPTURE(strategy);
    const Plan plan = plan_of(small::gpt(6), "null:2", strategy, 3);
    const auto rows = [](Program& p, auto change) {
      for (size_t r = 0; r < p.schedule.size(); ++r)
        if (!p.schedule[r].whole && p.schedule[r].micro_batch == 1) return change(r);
    };
    CHECK(after(plan, [](Plan&, Entry&, Program&) {}) == "");
    CHECK(after(plan, [&](Plan&, Entry& e, Program&) {
            for (Program& p : e.programs)
              rows(p, [&](size_t r) {
                const ScheduleRow row = p.schedule[r];
                p.schedule.insert(p.schedule.begin() + 1, row);
              });
          }) != "");
    CHECK(after(plan, [&](Plan&, Entry& e, Program&) {
            for (Program& p : e.programs)
              std::erase_if(p.schedule, [](const ScheduleRow& r) { return !r.whole && r.micro_batch == 1; });
          }) != "");
    CHECK(after(plan, [&](Plan&, Entry&, Program& p) { rows(p, [&](size_t r) { p.schedule[r].micro_batch = 2; }); }) !=
          "");
  }
}

TEST_CASE("what is read is what its name says") {
  const Plan plan = plan_of(small::mlp(), "null:2", "replica(2)");
  // The gradient of the first layer needs the second one's weight before it is updated.
  CHECK(has(after(plan,
                  [](Plan&, Entry&, Program& p) {
                    std::vector<Instruction>& list = p.segments[0].instructions;
                    const auto uses = [&](const Instruction& i, BufferId b) {
                      return std::find(i.in.begin(), i.in.end(), b) != i.in.end();
                    };
                    for (size_t k = 0; k < list.size(); ++k) {
                      if (list[k].op() != OpCode::k_sgd) continue;
                      for (size_t j = k; j-- > 0;)
                        if (list[j].op() == OpCode::k_matmul && uses(list[k], list[j].in[1]) &&
                            list[j].phase == Phase::kBackward) {
                          Instruction late = list[j];
                          late.name = "late", late.out = {list[j].out[0]};
                          list.insert(list.begin() + static_cast<std::ptrdiff_t>(k) + 1, late);
                          return;
                        }
                    }
                    FAIL("no weight is read by the backward pass");
                  }),
            "in place"));
}

TEST_CASE("a value in place is not read before its second sum made it") {
  const test::PlanCase c = test::parse_case(
      "graph replica(2,shares=[4,2]){ pipeline(1,micro_batches=3){ split(3){ sequence#44759 scale#85112 concat#28177 } "
      "} "
      "pipeline(1,micro_batches=3){ replica(3){ mixer#82152 heads#50138 plain_mean#72893 } } } | batch 11 | devices 6 "
      "| "
      "optimizer sgd#20286");
  const Graph g = test::graph_of(c);
  Plan plan = compile(g, parse_devices("ref:6"), test::options_of(c, g));
  give_own_programs(plan.entries[0]);
  size_t exchanged = 0;
  for (Segment& s : plan.entries[0].programs[0].segments) {
    // Sums of one storage along two axes, one behind the other; the second now stands before the first one's last
    // reader.
    std::vector<size_t> sums;
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (s.instructions[k].op() == OpCode::k_all_reduce) sums.push_back(k);
    if (s.name != "epilogue" || sums.size() < 3) continue;
    std::swap(s.instructions[sums[1]], s.instructions[sums[2]]);
    std::swap(s.instructions[sums[1]].waits, s.instructions[sums[2]].waits);
    ++exchanged;
  }
  CHECK(exchanged == 1);
  CHECK(has(message_of([&] { verify(plan); }), "makes it"));
}
