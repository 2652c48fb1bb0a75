#include <doctest/doctest.h>
#include <flatbuffers/flatbuffers.h>

#include <algorithm>

#include "../fuzz/sample.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "compile/source_check.h"
#include "schema/graph_file.h"
#include "session/session.h"
#include "unit/caught.h"
#include "unit/small_models.h"

namespace whale {
namespace {

Plan sample_plan() { return compile(sample_graph(), parse_devices("ref:2"), {}); }

// What the reader says about a plan that was changed: "" when it accepts it.
template <class Change>
std::string error_after(Change change) {
  Plan plan = sample_plan();
  change(plan);
  const std::vector<uint8_t> bytes = serialize(plan);
  return message_of([&] { deserialize(bytes.data(), bytes.size()); },
                    {Code::kInvalidArgument, Code::kFailedPrecondition, Code::kInternal});
}

Instruction& first(Program& p, InstructionKind kind) {
  for (Segment& s : p.segments) {
    for (Instruction& i : s.instructions) {
      if (i.kind() == kind) return i;
    }
  }
  FAIL("the sample plan has no such instruction");
  return p.segments[0].instructions[0];
}

}  // namespace

TEST_CASE("a plan survives bytes") {
  const Plan plan = sample_plan();
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan again = deserialize(bytes.data(), bytes.size());
  CHECK(print(again) == print(plan));
  CHECK(summary(again) == summary(plan));
  CHECK(to_json(again) == to_json(plan));
  CHECK(serialize(again) == bytes);
  CHECK(serialize(again.source) == serialize(plan.source));
  CHECK(again.devices == plan.devices);
  CHECK(again.notes == plan.notes);
  std::vector<uint8_t> moved(3);
  moved.insert(moved.end(), bytes.begin(), bytes.end());
  CHECK(serialize(deserialize(moved.data() + 3, bytes.size())) == bytes);
}

TEST_CASE("every number of a plan is checked") {
  CHECK(error_after([](Plan&) {}) == "");
  const auto entry = [](auto change) { return error_after([&](Plan& p) { change(p.entries[0]); }); };
  const auto program = [](auto change) { return error_after([&](Plan& p) { change(p.entries[0].programs[0]); }); };
  CHECK(has(error_after([](Plan& p) { p.devices[0].kind = static_cast<DeviceKind>(9); }), "device's kind"));
  CHECK(has(error_after([](Plan& p) { p.micro_batches = 0; }), "micro_batches"));
  CHECK(has(error_after([](Plan& p) { p.meshes[0].axes[0].size = 0; }), "mesh axis"));
  CHECK(has(error_after([](Plan& p) { p.groups.push_back({"replica", {{0, 7}}}); }), "group's device"));
  CHECK(has(error_after([](Plan& p) { p.variables[0].dtype = static_cast<DType>(0); }), "dtype"));
  CHECK(error_after([](Plan& p) { p.source.ops[0].inputs[0] = 4000; }) != "");
  CHECK(has(entry([](Entry& e) { e.rows.pop_back(); }), "rows"));
  CHECK(has(entry([](Entry& e) { e.rows[1].program = 55; }), "program"));
  CHECK(has(entry([](Entry& e) { e.rows[1].samples[0].whole = {0, 1000}; }), "samples"));
  CHECK(has(entry([](Entry& e) { e.rows[0].coordinates = {5}; }), "coordinate"));
  CHECK(has(entry([](Entry& e) { e.rows[0].mesh = 3; }), "mesh"));
  CHECK(has(entry([](Entry& e) { e.rows[0].samples.clear(); }), "samples"));
  CHECK(has(entry([](Entry& e) { e.outputs[0].mesh = 3; }), "output's mesh"));
  CHECK(has(entry([](Entry& e) { e.links.push_back({"x", 0, {}}); }), "capacity"));
  CHECK(has(entry([](Entry& e) { e.links.push_back({"x", 1, {{0, 9, {}, {}}}}); }), "transfer's device"));
  CHECK(has(error_after([](Plan& p) { p.variables[0].mesh = 3; }), "variable's mesh"));
  CHECK(has(entry([](Entry& e) { e.inputs[0].batch_dim = 2; }), "batch_dim"));
  CHECK(has(program([](Program& p) { p.arena_bytes = 1; }), "arena"));
  CHECK(has(program([](Program& p) { p.buffers[0].bytes = 0; }), "bytes"));
  CHECK(has(program([](Program& p) { p.buffers[0].alias = 100000; }), "alias"));
  CHECK(has(program([](Program& p) { p.buffers[0].versions = 0; }), "versions"));
  CHECK(has(program([](Program& p) { p.schedule[0].segment = 44; }), "segment"));
  CHECK(has(program([](Program& p) { p.schedule[0].micro_batch = 44; }), "micro-batch"));
  CHECK(has(program([](Program& p) { first(p, InstructionKind::kKernel).in[0] = 100000; }), "buffer"));
  CHECK(has(program([](Program& p) {
              first(p, InstructionKind::kKernel).as<work::Kernel>()->op = static_cast<OpCode>(9999);
            }),
            "op number"));
  CHECK(has(program([](Program& p) {
              first(p, InstructionKind::kKernel).waits.push_back({Queue::kCompute, 9999});
            }),
            "wait"));
  CHECK(has(program([](Program& p) { first(p, InstructionKind::kCollective).as<work::Collective>()->group = 99; }),
            "group"));
  CHECK(has(program([](Program& p) { first(p, InstructionKind::kFeed).as<work::Feed>()->input = 99; }), "input"));
  CHECK(has(program([](Program& p) { first(p, InstructionKind::kFetch).in.clear(); }), "fetch"));
}

TEST_CASE("attributes of a plan's kernels are of their types") {
  const auto kernel_with = [](Plan& plan, const char* attribute) -> Attrs& {
    for (Segment& s : plan.entries[0].programs[0].segments)
      for (Instruction& i : s.instructions)
        if (auto* k = i.as<work::Kernel>(); k != nullptr && k->attrs.contains(attribute)) return k->attrs;
    FAIL("the sample plan has no such kernel");
    return plan.entries[0].programs[0].segments[0].instructions[0].as<work::Kernel>()->attrs;
  };
  CHECK(has(error_after([&](Plan& p) { kernel_with(p, "value")["value"] = int64_t{0}; }),
            "attribute 'value' is 0, an integer, which is not of its type: a number"));
}

TEST_CASE("attributes that a plan's kernels lack are those of the op, or an error") {
  Plan plan = sample_plan();
  const auto each = [&](auto body) {
    for (Entry& e : plan.entries)
      for (Program& p : e.programs)
        for (Segment& s : p.segments)
          for (Instruction& i : s.instructions)
            if (auto* k = i.as<work::Kernel>()) body(i, *k);
  };
  const std::string whole = print(plan);
  size_t erased = 0;
  each([&](Instruction&, work::Kernel& k) { erased += k.attrs.erase("epsilon"); });
  REQUIRE(erased > 0);
  const std::vector<uint8_t> shorter = serialize(plan);
  CHECK(print(deserialize(shorter.data(), shorter.size())) == whole);
  std::string name;
  each([&](Instruction& i, work::Kernel& k) {
    if (k.attrs.erase("rate") > 0 && name.empty()) name = i.name;
  });
  REQUIRE(name != "");
  const std::vector<uint8_t> bytes = serialize(plan);
  const std::string message = message_of([&] { deserialize(bytes.data(), bytes.size()); }, {Code::kFailedPrecondition});
  CHECK(has(message, " '" + name + "'"));
  CHECK(has(message, "attribute 'rate' is missing"));
}

TEST_CASE("a session says that the file of its plan may be what is wrong") {
  for (const bool from_file : {true, false}) {
    Plan plan = sample_plan();
    for (Buffer& buffer : plan.entries[0].programs[0].buffers)
      if (buffer.kind == BufferKind::kArena) buffer.offset = -64;
    SessionOptions options;
    options.plan_from_file = from_file;
    const auto shared = std::make_shared<const Plan>(std::move(plan));
    const std::string message =
        message_of([&] { Session(shared, std::make_shared<Backends>(), options); }, {Code::kInternal});
    CHECK(has(message, "lies at [-64"));
    CHECK(has(message, "read from a file, which may be damaged") == from_file);
  }
}

TEST_CASE("parts of storages, step scalars and buckets of a plan are checked") {
  CompileOptions options;
  options.zero = 1;
  const Plan good = compile(sample_graph(), parse_devices("ref:2"), options);
  const auto error_of = [&](auto change) {
    Plan plan = good;
    for (Program& p : plan.entries[0].programs) change(p);
    const std::vector<uint8_t> bytes = serialize(plan);
    return message_of([&] { verify(deserialize(bytes.data(), bytes.size())); });
  };
  const auto collective = [](Program& p, OpCode code) -> Instruction& {
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (i.op() == code) return i;
    FAIL("the plan has no such collective");
    return p.segments[0].instructions[0];
  };
  const auto buffer = [](Program& p, auto is) -> Buffer& {
    const auto at = std::find_if(p.buffers.begin(), p.buffers.end(), is);
    REQUIRE(at != p.buffers.end());
    return *at;
  };
  CHECK(error_of([](Program&) {}) == "");
  for (const OpCode code : {OpCode::k_all_reduce, OpCode::k_all_gather})
    CHECK(has(error_of([&](Program& p) { collective(p, code).in[0] = kNone; }), "without an operand"));
  CHECK(error_of([&](Program& p) {
          collective(p, OpCode::k_all_gather).as<work::Collective>()->cuts[0].cuts = {{0, 1}};
        }) != "");
  const auto step = [](const Buffer& b) { return b.kind == BufferKind::kStep; };
  CHECK(has(error_of([&](Program& p) {
              Buffer& b = buffer(p, step);
              b.dims = {2};
              b.bytes = 2 * size_of(b.dtype);
            }),
            "a scalar"));
  CHECK(has(error_of([&](Program& p) {
              Buffer& variable = buffer(p, [](const Buffer& b) { return b.kind == BufferKind::kVariable; });
              variable.alias = static_cast<BufferId>(&buffer(p, step) - p.buffers.data());
            }),
            "storage"));
  CHECK(has(error_of([&](Program& p) {
              Buffer& b = buffer(p, [](const Buffer& x) { return x.alias != kNone && x.bytes >= 4; });
              b.at = 1;
            }),
            "fit its storage"));
}

TEST_CASE("what a plan says of its model is what its model says") {
  small::Model m = small::gpt(4);
  m.g.training.clip_norm = 1;
  const auto devices = parse_devices("ref:2");
  const auto error_of = [&](const Plan& good, auto change) {
    Plan plan = good;
    change(plan);
    const std::vector<uint8_t> bytes = serialize(plan);
    return message_of([&] { verify_source(deserialize(bytes.data(), bytes.size())); }, {Code::kDataLoss});
  };
  for (const char* strategy : {"replica", "split", "pipeline(2, micro_batches=2)"}) {
    CAPTURE(strategy);
    const Plan good = compile(m.g, devices, {.strategy = strategy, .fetch = {"grad:wte"}});
    CHECK(error_of(good, [](Plan&) {}) == "");
    const auto entry = [&](size_t number, auto change) {
      return error_of(good, [&](Plan& p) { change(p.entries[number]); });
    };
    for (const size_t e : {0, 1}) {
      CHECK(has(entry(e, [](Entry& x) { x.inputs[0].indices[0].limit += 1; }), "input 'tokens'"));
      CHECK(has(entry(e, [](Entry& x) { x.inputs[0].indices.clear(); }), "may be anything"));
      CHECK(has(entry(e, [](Entry& x) { x.inputs[1].indices[0].ignored.reset(); }), "or -100"));
      CHECK(has(entry(e, [](Entry& x) { x.inputs[1].indices[0].ignored = 5; }), "input 'targets'"));
      CHECK(has(entry(e, [](Entry& x) { x.inputs[0].name = "words"; }), "'tokens'"));
      CHECK(has(entry(e, [](Entry& x) { x.outputs.back().name = "other"; }), "no output 'other'"));
    }
    CHECK(has(error_of(good,
                       [](Plan& p) {
                         for (PlanVariable& v : p.variables)
                           if (v.name == "h0.ln1.g") v.dims = {v.dims[0], 1};
                       }),
              "variable 'h0.ln1.g'"));
    CHECK(has(error_of(good, [](Plan& p) { p.variables[0].init.b *= 2; }), "initializer"));
    CHECK(has(error_of(good, [](Plan& p) { p.variables.back().state_name = "other"; }), "variable"));
    CHECK(has(error_of(good, [](Plan& p) { p.optimizer.learning_rate *= 2; }), "optimizer"));
    CHECK(has(error_of(good, [](Plan& p) { p.lr_schedule.warmup_steps = 7; }), "schedule"));
    CHECK(has(error_of(good, [](Plan& p) { p.precision = Precision::kBFloat16; }), "precision"));
  }
}

TEST_CASE("initial values of a plan are those of its model, all of them") {
  small::Model m = small::mlp();
  const auto values = [](size_t bytes) { return std::make_shared<const std::vector<uint8_t>>(bytes, uint8_t{0}); };
  Initializer& init = m.g.variables[0].init;
  init = {.kind = InitKind::kData};
  const auto bytes = static_cast<size_t>(element_count(m.g.tensor(m.g.variables[0].tensor).dims) * 4);
  init.data = values(bytes);
  const Plan good = compile(m.g, parse_devices("ref:2"), {.strategy = "replica"});
  const auto error_of = [&](auto change) {
    Plan plan = good;
    change(plan.variables[0].init);
    const std::vector<uint8_t> file = serialize(plan);
    return message_of([&] { verify_source(deserialize(file.data(), file.size())); }, {Code::kDataLoss});
  };
  CHECK(error_of([](Initializer&) {}) == "");
  CHECK(has(error_of([&](Initializer& i) { i.data = values(bytes - 4); }), "initializer"));
  CHECK(has(error_of([&](Initializer& i) { i.data = values(0); }), "initializer"));
  CHECK(has(error_of([&](Initializer& i) { i.data = std::make_shared<const std::vector<uint8_t>>(bytes, uint8_t{1}); }),
            "initializer"));
  CHECK(has(error_of([&](Initializer& i) { i.data_type = DType::kI32; }), "initializer"));
}

TEST_CASE("a plan whose op does not check the index that the graph computes is refused") {
  small::Model m;
  const TensorId ids = m.op(OpCode::k_add, {m.input("a", {8}, DType::kI32), m.input("b", {8}, DType::kI32)});
  m.minimize(m.op(OpCode::k_reduce_mean, {m.op(OpCode::k_embedding, {m.variable("t", {12, 4}), ids}, {}, "look")}),
             OptimizerKind::kSgd);
  const Plan good = compile(m.g, parse_devices("ref:2"), {.strategy = "replica"});
  for (const int64_t limit : {0, 11, 13, 12}) {
    Plan plan = good;
    for (Program& p : plan.entries[0].programs)
      for (Segment& s : p.segments)
        for (Instruction& i : s.instructions)
          if (auto* k = i.as<work::Kernel>(); k && i.name == "look" && attr_int(k->attrs, kIndexLimit) > 0)
            k->attrs[kIndexLimit] = limit;
    CHECK(has(message_of([&] { verify_source(plan); }, {Code::kDataLoss}), limit == 12 ? "" : "op 'look'"));
  }
}

TEST_CASE("plans of all kinds say what their models say") {
  const small::Model models[] = {small::mlp(8), small::gpt(8), small::resnet(8)};
  const CompileOptions options[] = {
      {.strategy = "replica"},
      {.strategy = "split"},
      {.strategy = "replica(2) > split(2)"},
      {.strategy = "pipeline(2, micro_batches=2) > replica(2)"},
      {{.fusion = false, .zero = 2}, "replica", {}, 2, Precision::kFloat16},
      {{.zero = 3, .recompute = Recompute::kFull}, "replica", {}, 0, Precision::kBFloat16},
  };
  for (const small::Model& m : models)
    for (const CompileOptions& o : options) {
      CAPTURE(m.g.name);
      CAPTURE(o.strategy);
      Plan plan;
      try {
        plan = compile(m.g, parse_devices("ref:4"), o);
      } catch (const Error&) {
        continue;  // not every model can be cut in every way
      }
      plan.entries.push_back(compile_entry(plan, "eval", 4));
      CHECK(message_of([&] { verify_source(plan); }) == "");
    }
}

TEST_CASE("a graph is not a plan, half a plan is none") {
  const std::vector<uint8_t> graph = serialize(sample_graph());
  CHECK_THROWS_WITH_AS((void)deserialize(graph.data(), graph.size()), doctest::Contains("plan it for devices first"),
                       Error);
  const std::vector<uint8_t> plan = serialize(sample_plan());
  CHECK_THROWS_WITH_AS((void)read_graph(plan.data(), plan.size()), doctest::Contains("this is a plan"), Error);
  // The last bytes may be padding.
  for (size_t n = 0; n + 64 < plan.size(); n += 211) CHECK_THROWS_AS((void)deserialize(plan.data(), n), Error);
  CHECK_THROWS_AS((void)deserialize(nullptr, 0), Error);
}

// The ranges of an index, moved to the end of the file: `beside` bytes from where their numbers are aligned.
std::vector<uint8_t> moved_ranges(uint32_t count, size_t beside) {
  using Tables = flatbuffers::Vector<flatbuffers::Offset<flatbuffers::Table>>;
  constexpr flatbuffers::voffset_t kEntries = 22, kInputs = 8, kIndices = 12;  // of Plan, Entry and PlanInput
  constexpr size_t kRange = 24, kCount = sizeof(uint32_t);
  std::vector<uint8_t> bytes = serialize(sample_plan());
  const auto* entry =
      flatbuffers::GetRoot<flatbuffers::Table>(bytes.data())->GetPointer<const Tables*>(kEntries)->Get(0);
  const auto* input = entry->GetPointer<const Tables*>(kInputs)->Get(0);
  const auto field = static_cast<size_t>(input->GetAddressOf(kIndices) - bytes.data());
  const size_t from = field + flatbuffers::ReadScalar<uint32_t>(&bytes[field]);
  const size_t to = (bytes.size() + 8) / 8 * 8 + 8 - kCount + beside;
  bytes.resize(to + kCount + kRange);
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(from), kCount + kRange,
              bytes.begin() + static_cast<std::ptrdiff_t>(to));
  flatbuffers::WriteScalar(&bytes[to], count);
  flatbuffers::WriteScalar(&bytes[field], static_cast<uint32_t>(to - field));
  return bytes;
}

TEST_CASE("structs of a plan that are not aligned are refused") {
  const auto said = [](uint32_t count, size_t beside) {
    const std::vector<uint8_t> bytes = moved_ranges(count, beside);
    return message_of([&] { deserialize(bytes.data(), bytes.size()); }, {Code::kInvalidArgument});
  };
  CHECK(said(1, 0) == "");
  CHECK(has(said(1, 4), "its data is not aligned"));
  CHECK(said(0, 4) == "");  // as writers leave one that is empty
}

TEST_CASE("a plan that contradicts itself is told from a file that is none") {
  Plan plan = compile(small::mlp(8).g, parse_devices("null:2"), {.strategy = "replica", .fetch = {}});
  for (Buffer& b : plan.entries[0].programs[0].buffers)
    if (b.offset > 0) b.offset = 0;
  const std::vector<uint8_t> bytes = serialize(plan);
  CHECK(has(message_of([&] { deserialize(bytes.data(), bytes.size()); }, {Code::kFailedPrecondition}),
            "the plan contradicts itself: plan 'mlp', entry 'train', program 0 (device 0 and 1 more): "));
}

}  // namespace whale
