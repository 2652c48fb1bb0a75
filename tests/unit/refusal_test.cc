// A refused plan is told so that a person can act on it: device, instruction, scope, micro-batch, and what led there.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "base/json.h"
#include "plan/lives.h"
#include "plan/placed.h"
#include "plan_damage.h"
#include "proof_case.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;
using test::is_op, test::plan_of;

namespace {

using Damage = std::function<void(Plan&, Entry&, Program&)>;

void separate(Entry& entry) {
  std::vector<Program> programs;
  for (DeviceRow& row : entry.rows) {
    programs.push_back(bound(entry.programs[row.program], row));
    row.program = static_cast<int32_t>(programs.size()) - 1;
    row.placed.clear();
  }
  entry.programs = std::move(programs);
}

// Each device has a program of its own; the damage is to that of `device`.
EntryProof refused(const char* what, const Plan& plan, int32_t device, const Damage& damage) {
  Plan damaged = plan;
  for (Entry& e : damaged.entries) separate(e);
  Entry& entry = damaged.entries[0];
  CHECK(prove(damaged).verdict == ProofVerdict::kProven);
  damage(damaged, entry, entry.programs[entry.rows[device].program]);
  const Proof proof = prove(damaged);
  CAPTURE(what);
  CHECK_MESSAGE(proof.verdict == ProofVerdict::kRefuted, text(proof));
  const auto found = std::ranges::find(proof.entries, ProofVerdict::kRefuted, &EntryProof::verdict);
  REQUIRE(found != proof.entries.end());
  CAPTURE(text(proof));
  CHECK(found->entry == entry.name);
  CHECK(found->batch == entry.batch);
  // As programs read it.
  const Json json = Json::parse(to_json(proof));
  const Json& of = json.at("entries").at(static_cast<size_t>(found - proof.entries.begin()));
  CHECK(of.at("path").size() == found->path.size());
  REQUIRE(of.contains("at"));
  CHECK(of.at("at").at("device") == found->at.device);
  if (found->at.number >= 0) {
    CHECK(of.at("at").at("number") == found->at.number);
    CHECK(of.at("at").at("verb") == found->at.verb);
    CHECK(of.at("at").at("micro_batch") == found->at.micro_batch);
  }
  return *found;
}

Plan replicas() {
  return plan_of(small::mlp(8).g, "null:3", "replica(3)",
                 [](CompileOptions& o) { o.fusion = false, o.accumulation = 2, o.zero = 1; });
}
Plan pipeline() { return plan_of(small::mlp(8).g, "null:2", "pipeline(2, micro_batches=4)"); }

struct Found {
  Segment* segment = nullptr;
  size_t at = 0;
  Instruction& operator*() const { return segment->instructions[at]; }
};
Found find(Program& p, const std::function<bool(const Instruction&)>& is_it) {
  for (Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (is_it(s.instructions[k])) return {&s, k};
  FAIL("no such instruction");
  return {};
}
Found find(Program& p, InstructionKind kind) {
  return find(p, [&](const Instruction& i) { return i.kind() == kind; });
}

// The instruction that was damaged is the one that is told.
void at(const EntryProof& proof, int32_t device, const char* verb) {
  CHECK(proof.at.device == device);
  CHECK(proof.at.number >= 0);
  CHECK(proof.at.verb == verb);
  CHECK_MESSAGE(!proof.path.empty(), proof.what);
}

}  // namespace

TEST_CASE("refused: Adasum weighs each member's gradient by its samples") {
  constexpr std::pair<const char*, const char*> kThose[] = {{"null:2", "replica(2, shares=[3,1])"},
                                                            {"null:4", "replica(2) > replica(2)"}};
  for (const auto& of : kThose) {
    CAPTURE(of.second);
    const Plan plan =
        plan_of(small::mlp(8).g, of.first, of.second, [](CompileOptions& o) { o.adasum = true, o.accumulation = 2; });
    const auto weigh = [&](Ints weights) {
      Plan damaged = plan;
      for (Program& p : damaged.entries[0].programs)
        for (Segment& s : p.segments)
          for (Instruction& i : s.instructions)
            if (auto* c = i.as<work::Collective>(); c != nullptr && c->op == OpCode::k_adasum) c->weights = weights;
      return prove(damaged);
    };
    CHECK(prove(plan).verdict == ProofVerdict::kProven);
    for (const Ints& weights : {Ints{0, 8}, Ints{5, 3}, Ints{2, 6}, Ints{12, 4}}) {
      const Proof proof = weigh(weights);
      CHECK(proof.verdict == ProofVerdict::kRefuted);
      CHECK_MESSAGE(has(text(proof), "samples, expected"), text(proof));
    }
  }
}

TEST_CASE("refused by the verifier: the parts of an output do not fit it") {
  Plan plan = plan_of(small::mlp(8).g, "null:2", "split(2)");
  PlanOutput& output = plan.entries.at(0).outputs.at(0);
  output.parts.axes.assign(plan.meshes[0].axes.size(), {});
  output.parts.axes[0].placement = Placement::kShard;
  for (const SubAxis& sub_axis : {SubAxis{0, 1, 3}, SubAxis{7, 1, 1}, SubAxis{0, 5, 1}}) {
    output.parts.axes[0].sub_axis = sub_axis;
    const Proof proof = prove(plan);
    CHECK(proof.verdict == ProofVerdict::kRefuted);
    CHECK_MESSAGE(has(text(proof), "the sharding of output"), text(proof));
  }
}

TEST_CASE("refused by the verifier: the instruction and what led there") {
  const Plan plan = replicas();
  SUBCASE("two values share bytes") {
    const EntryProof proof = refused("bytes", plan, 1, [](Plan&, Entry&, Program& p) {
      // Both operands of a kernel lie in one place.
      const Instruction& use = *find(p, [](const Instruction& i) { return is_op(i, "relu_grad"); });
      const BufferId a = storage_of(p, use.in[0]), b = storage_of(p, use.in[1]);
      REQUIRE(a != b);
      for (Buffer& x : p.buffers)
        if (&x == &p.buffers[a] || x.alias == a) x.offset = p.buffers[b].offset;
    });
    CHECK(proof.at.device == 1);
    CHECK(proof.at.number >= 0);
    CHECK(has(proof.what, "share bytes"));
    REQUIRE(proof.path.size() >= 2);
    CHECK(has(proof.path[0], "is first used by instruction"));
    CHECK(proof.at.micro_batch == 0);
  }
  SUBCASE("a wait is missing") {
    const EntryProof proof = refused("wait", plan, 2, [](Plan&, Entry&, Program& p) {
      for (ScheduleRow& row : p.schedule) row.waits = kNone;
    });
    CHECK(proof.at.device == 2);
    CHECK(proof.at.number >= 0);
    CHECK(has(proof.what, "and does not wait for instruction"));
    CHECK(has(proof.what, "of the row before"));
    const auto says = [&](const char* part) {
      return std::ranges::any_of(proof.path, [&](const std::string& line) { return has(line, part); });
    };
    CHECK(says("micro-batch 1, writes"));                    // the other end
    CHECK(says("it is of the gradient of w"));               // in the words of the model
    CHECK(says("that was made of 'loss', of instruction"));  // what is added to a sum, and not its zero
  }
  SUBCASE("what is read is made later") {
    const EntryProof proof = refused("order", plan, 0, [](Plan&, Entry&, Program& p) {
      const Found use = find(p, [](const Instruction& i) { return is_op(i, "relu"); });
      Instruction &a = *use, &b = use.segment->instructions[use.at - 1];
      REQUIRE(b.out[0] == a.in[0]);
      std::swap(a.work, b.work), std::swap(a.name, b.name), std::swap(a.in, b.in), std::swap(a.out, b.out);
    });
    CHECK(proof.at.device == 0);
    CHECK((proof.at.verb == "relu" || proof.at.verb == "add"));
    CHECK(!proof.path.empty());
  }
  SUBCASE("a segment runs twice on a micro-batch") {
    const EntryProof proof = refused("twice", plan, 1, [](Plan&, Entry&, Program& p) {
      const auto next = std::ranges::find(p.schedule, 1, &ScheduleRow::micro_batch);
      REQUIRE(next != p.schedule.end());
      next->micro_batch = 0;
    });
    CHECK(proof.at.device == 1);
    CHECK(proof.at.micro_batch == 0);
    CHECK(proof.at.number >= 0);
  }
  SUBCASE("devices run different collectives") {
    const Plan parts = plan_of(small::gpt(6).g, "null:3", "replica(3)", [](CompileOptions& o) { o.zero = 3; });
    const EntryProof proof = refused("collectives", parts, 2, [](Plan&, Entry&, Program& p) {
      std::vector<Instruction*> list;
      for (Segment& s : p.segments)
        for (Instruction& i : s.instructions)
          if (i.kind() == InstructionKind::kCollective) list.push_back(&i);
      REQUIRE(list.size() >= 2);
      std::swap(list[0]->name, list[1]->name);
    });
    CHECK(proof.at.device == 2);
    CHECK(proof.at.number >= 0);
    CHECK(!proof.path.empty());
  }
  SUBCASE("a commit is missing") {
    const EntryProof proof = refused("commit", plan, 1, [](Plan&, Entry&, Program& p) {
      (*find(p, InstructionKind::kCommit)).work = work::Kernel{.op = OpCode::k_fill};
    });
    CHECK(proof.at.device == 1);
    CHECK(proof.at.number >= 0);
  }
  SUBCASE("a buffer of another size") {
    const EntryProof proof = refused("size", plan, 1, [](Plan&, Entry&, Program& p) {
      const Found use = find(p, [](const Instruction& i) { return is_op(i, "relu"); });
      p.buffers[(*use).out[0]].bytes += 4;
    });
    at(proof, 1, "relu");
  }
}

TEST_CASE("refused by the verifier: messages, by device and instruction") {
  const Plan plan = pipeline();
  SUBCASE("a box that lies outside") {
    const EntryProof proof = refused("box", plan, 1, [](Plan&, Entry& e, Program&) {
      for (auto* box : {&e.links[0].transfers[0].source, &e.links[0].transfers[0].target})
        (*box)[0].begin += 100, (*box)[0].end += 100;
    });
    CHECK((proof.at.verb == "send" || proof.at.verb == "receive"));
    CHECK(has(proof.what, "does not lie inside"));
    CHECK(!proof.path.empty());
  }
  SUBCASE("nobody takes it") {
    const EntryProof proof = refused("taken", plan, 1, [](Plan&, Entry&, Program& p) {
      const Found receive = find(p, InstructionKind::kReceive);
      const Buffer& b = p.buffers[(*receive).out[0]];
      (*receive).work =
          test::made(OpCode::k_fill, "x", {}, {}, {{"shape", b.dims}, {"value", 0.}, {"dtype", std::string("f32")}})
              .work;
    });
    CHECK(proof.at.device == 0);
    CHECK(proof.at.verb == "send");
    CHECK(!proof.path.empty());
  }
  SUBCASE("in the other order") {
    const EntryProof proof = refused("order", plan, 0, [](Plan&, Entry&, Program& p) {
      // A gradient is awaited before the first activation is sent.
      const auto runs = [&](size_t r, InstructionKind kind) {
        return std::ranges::any_of(p.segments[p.schedule[r].segment].instructions,
                                   [&](const Instruction& i) { return i.kind() == kind; });
      };
      size_t send = 0, receive = 0;
      while (!runs(send, InstructionKind::kSend)) ++send;
      while (!runs(receive, InstructionKind::kReceive)) ++receive;
      for (ScheduleRow& row : p.schedule) row.waits = kNone;
      std::swap(p.schedule[send], p.schedule[receive]);
    });
    CHECK(proof.at.device >= 0);
    CHECK(proof.at.number >= 0);
    CHECK(!proof.path.empty());
  }
}

TEST_CASE("refused: what is handed out, what a device ends with, and what was not read yet") {
  const Plan plan = replicas();
  SUBCASE("no device fetches the loss") {
    const Plan eval = plan_of(small::mlp(8).g, "null:2", "replica(2)", [](CompileOptions& o) { o.fetch = {"logits"}; });
    const EntryProof proof = refused("fetch", eval, 1, [](Plan&, Entry& e, Program& p) {
      // It hands over the part of the other one.
      const Found fetch = find(p, [&](const Instruction& i) {
        const auto* f = i.as<work::Fetch>();
        return f != nullptr && e.outputs[f->output].name == "logits";
      });
      fetch.segment->instructions.erase(fetch.segment->instructions.begin() + static_cast<std::ptrdiff_t>(fetch.at));
      for (Instruction& i : fetch.segment->instructions)
        for (Wait& w : i.waits) w.index -= static_cast<size_t>(w.index) > fetch.at;
    });
    CHECK_MESSAGE(proof.at.device == 1, proof.what);
    CHECK(has(proof.what, "logits"));
  }
  SUBCASE("a variable keeps what it was") {
    const Plan two = plan_of(small::mlp(8).g, "null:2", "replica(2)", [](CompileOptions& o) { o.fusion = false; });
    const EntryProof proof = refused("ends", two, 1, [](Plan&, Entry&, Program& p) {
      // The update goes to a place of its own, which nobody looks at.
      Instruction& update = *find(p, [](const Instruction& i) { return is_op(i, "sgd"); });
      Buffer other = p.buffers[update.out[0]];
      other.kind = BufferKind::kArena, other.alias = kNone, other.ref = kNone, other.at = 0, other.name = "nowhere";
      other.offset = (p.arena_bytes + 63) / 64 * 64;
      p.arena_bytes = other.offset + (other.bytes + 63) / 64 * 64;
      p.buffers.push_back(other);
      update.out[0] = static_cast<BufferId>(p.buffers.size()) - 1;
    });
    CHECK(proof.at.device == 1);
    CHECK((proof.at.number < 0 || proof.at.verb == "sgd"));
    CHECK(!proof.path.empty());
  }
  SUBCASE("an op that the program does not have") {
    const EntryProof proof = refused("op", plan, 1, [](Plan&, Entry&, Program& p) {
      (*find(p, [](const Instruction& i) { return is_op(i, "relu"); })).as<work::Kernel>()->op = OpCode::k_sigmoid;
    });
    at(proof, 1, "sigmoid");
    CHECK(has(proof.path[0], "it reads"));
  }
}

TEST_CASE("refused: an input that has its samples along another dimension") {
  small::Model m;
  const TensorId x = m.input("x", {4, 4}, DType::kF32, 0);
  m.g.outputs = {{"y", m.op(OpCode::k_relu, {x})}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)");
  REQUIRE(!plan.entries.empty());
  CHECK(prove(plan).verdict == ProofVerdict::kProven);
  REQUIRE(plan.entries[0].inputs[0].batch_dim == 0);
  plan.entries[0].inputs[0].batch_dim = 1;
  const Proof proof = prove(plan);
  CHECK(proof.verdict == ProofVerdict::kRefuted);
  CHECK_MESSAGE(has(text(proof), "samples along dimension 1, in the one-device program along 0"), text(proof));
}

TEST_CASE("refused: an output that has its samples along another dimension") {
  const Plan plan = plan_of(small::mlp(8).g, "null:2", "replica(2)", [](CompileOptions& o) { o.fetch = {"logits"}; });
  for (const int dim : {1, 2, 0}) {
    Plan damaged = plan;
    for (PlanOutput& o : damaged.entries[0].outputs)
      if (o.name == "logits") o.batch_dim = dim;
    const Proof proof = prove(damaged);
    CHECK_MESSAGE(proof.verdict == (dim == 0 ? ProofVerdict::kProven : ProofVerdict::kRefuted), text(proof));
    CHECK((dim == 0 || (has(text(proof), "output 'logits'") && proof.entries[0].at.device == 0)));
  }
}

TEST_CASE("refused: samples, and micro-batches of other steps, by what was expected") {
  const EntryProof proof = refused("samples", replicas(), 1, [](Plan&, Entry& e, Program&) {
    for (SampleCut& cut : e.rows[1].samples)
      if (cut.micro_batches.size() > 1 && cut.micro_batches[0] != cut.micro_batches[1])
        std::swap(cut.micro_batches[0], cut.micro_batches[1]);
  });
  CHECK(proof.at.device == 1);
  CHECK_MESSAGE(has(proof.what, "micro-batch 0: "), proof.what);
  CHECK_MESSAGE(has(proof.what, ", expected ["), proof.what);
  Plan plan = replicas();
  ++plan.micro_batches;
  CHECK(has(text(prove(plan)),
            "the plan has 3 micro-batches, by which steps of other sizes are planned, its own step has 2"));
}

TEST_CASE("proof: options that other batch sizes are planned by are exemptions") {
  const auto stated = [](const std::function<void(PlanOptions&)>& change) {
    Plan plan = plan_of(small::mlp(8).g, "null:2", "replica(2)");
    change(plan.options);
    const Proof proof = prove(plan);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, text(proof));
    return text(proof);
  };
  CHECK(!has(stated([](PlanOptions&) {}), "steps of other batch sizes"));
  CHECK(has(stated([](PlanOptions& o) { o.adasum = true; }), "steps of other batch sizes are planned with Adasum"));
  CHECK(has(stated([](PlanOptions& o) { o.gradient_dtype = DType::kBF16; }),
            "steps of other batch sizes are planned to add gradients up in bf16"));
  CHECK(has(stated([](PlanOptions& o) { o.accumulate_dtype = DType::kF16; }), "add gradients up in f16"));
}

TEST_CASE("refused: what the model says of a variable, by what was found and expected") {
  small::Model m = small::mlp(8, OptimizerKind::kAdam);
  for (Variable& v : m.g.variables)
    if (v.init.kind == InitKind::kNormal) {
      const auto bytes = static_cast<size_t>(element_count(m.g.tensor(v.tensor).dims) * 4);
      v.init = {.kind = InitKind::kData, .data = std::make_shared<const std::vector<uint8_t>>(bytes)};
      break;
    }
  const Plan plan = plan_of(m.g, "null:2", "replica");
  const auto told = [&](const std::function<void(Plan&)>& damage) {
    Plan damaged = plan;
    damage(damaged);
    const Proof proof = prove(damaged);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kRefuted, text(proof));
    return proof.entries[0].what;
  };
  const auto first = [](Plan& p, InitKind kind) -> PlanVariable& {
    return *std::ranges::find_if(p.variables, [&](const PlanVariable& v) { return v.init.kind == kind; });
  };
  std::string what = told([&](Plan& p) { first(p, InitKind::kZeros).init.a = 3; });
  CHECK_MESSAGE(has(what, "its initial value is zeros with the numbers 3 and 1, "), what);
  CHECK_MESSAGE(has(what, "expected zeros with the numbers 0 and 1, "), what);
  what = told([&](Plan& p) {
    Initializer& init = first(p, InitKind::kData).init;
    std::vector<uint8_t> bytes = *init.data;
    bytes.at(5) = 7;
    init.data = std::make_shared<const std::vector<uint8_t>>(bytes);
  });
  CHECK_MESSAGE(has(what, "byte 5 of its initial value, data(f32), is 7, expected 0, as in the model"), what);
  what = told([&](Plan& p) {
    std::ranges::find_if(p.variables, [](const PlanVariable& v) { return !v.owner.empty(); })->owner.clear();
  });
  CHECK_MESSAGE(has(what, "the parameter whose state it is is none, expected "), what);
  what = told([&](Plan& p) { first(p, InitKind::kZeros).init.data = std::make_shared<std::vector<uint8_t>>(); });
  CHECK_MESSAGE(has(what, "key '' and 0 bytes of f32, expected zeros with "), what);
}
