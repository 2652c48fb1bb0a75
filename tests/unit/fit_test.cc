// Plans for devices that say how much memory they have.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "caught.h"
#include "golden.h"
#include "own_programs.h"
#include "plan/communication.h"
#include "report/fit.h"
#include "trained.h"

namespace whale {
namespace {

int64_t most_needed(const Plan& plan) {
  int64_t most = 0;
  for (const Entry& entry : plan.entries)
    for (size_t p = 0; p < entry.programs.size(); ++p) most = std::max(most, memory_of(plan, entry, p).device.total());
  return most;
}

Plan plan_of(const small::Model& m, const std::string& devices, const std::string& strategy,
             Recompute recompute = Recompute::kNone) {
  CompileOptions options;
  options.strategy = strategy;
  options.recompute = recompute;
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}

size_t gathered_again(const Plan& plan) {
  size_t n = 0;
  for (const Program& p : plan.entries[0].programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions) n += i.op() == OpCode::k_all_gather && i.name.ends_with(".again");
  return n;
}

TEST_CASE("device lists with memory, and back") {
  const auto devices = parse_devices("2xnull-80GB:2, cpu-512MiB@0-1*2 | ref-1500KB:1 | cpu-3GB:2", {0, 1});
  REQUIRE(devices.size() == 11);
  CHECK(devices[0].memory_bytes == 80'000'000'000);
  CHECK(devices[2].memory_bytes == int64_t{512} << 20);
  CHECK(devices[8].memory_bytes == 1'500'000);
  CHECK(devices[9].memory_bytes == 3'000'000'000);
  CHECK(parse_devices("null:1", {0})[0].memory_bytes == 0);
  CHECK(to_string(devices) == "2xnull-80GB:2,cpu-512MiB@0-1*2|ref-1500KB:1|cpu-3GB@0,cpu-3GB@1");
  CHECK(parse_devices(to_string(devices), {0, 1})[10].memory_bytes == 3'000'000'000);
  for (const char* text : {"null-80:1", "null-GB:1", "null-:1", "null-1.5GB:1", "null-0GB:1", "null-9999999TB:1",
                           "null-80gb:1", "null-80GB-1:1", "cpu-2@0"}) {
    CAPTURE(text);
    CHECK(has(message_of([&] { parse_devices(text, {0}); }), "device list: item"));
  }
  CHECK(has(message_of([] { parse_devices("null-1.5GB:1", {0}); }), "a whole number is expected; take a smaller unit"));
}

TEST_CASE("the summary shows the memory of the device that is fullest") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 4, 64, 128, 100);
  CHECK(has(summary(plan_of(m, "null-1GB:2", "replica(2)")), "memory of one device: "));
  for (const auto& [devices, fullest] :
       {std::pair("null-1GB:1,null-64MB:1", "1: "), std::pair("null-64MB:1,null-1GB:1", "0: "),
        std::pair("null:1,null-1GB:1,null-64MB:1", "2: ")}) {
    CAPTURE(devices);
    const std::string text = summary(plan_of(m, devices, "replica"));
    const size_t at = text.find(std::string("memory of the fullest device, ") + fullest);
    REQUIRE(at != std::string::npos);
    CHECK(text.substr(at, text.find('\n', at) - at).ends_with(" of 64.0 MB"));
  }
  // The last stage has the logits beside its blocks.
  const Plan plan = plan_of(small::gpt(32, OptimizerKind::kAdamW, 4, 64, 128, 20000), "null:2", "pipeline(2)");
  CHECK(has(summary(plan),
            "memory of the fullest device, 1: " + bytes_text(static_cast<double>(most_needed(plan))) + "\n"));
}

TEST_CASE("where the fastest plan does not fit, one that holds less is taken") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 4, 512, 1024, 1000);
  const std::string strategy = "pipeline(2, micro_batches=32) > split(8)";
  const Plan free = plan_of(m, "null:16", strategy);
  CHECK(free.memory_price == 1);
  const int64_t needed = most_needed(free);
  CHECK(plan_of(m, fmt::format("null-{}B:16", needed), strategy).memory_price == 1);

  const int64_t limit = needed * 9 / 10;
  const Plan less = plan_of(m, fmt::format("null-{}B:16", limit), strategy);
  CHECK(less.memory_price > 1);
  CHECK(most_needed(less) <= limit);
  CHECK(shortage_of(less).bytes == 0);
  CHECK(gathered_again(less) > 0);
  CHECK(std::any_of(less.notes.begin(), less.notes.end(),
                    [](const std::string& note) { return note.find("does not fit") != note.npos; }));

  // Other batches are planned alike, also from a file.
  const std::vector<uint8_t> file = serialize(less);
  const Plan again = deserialize(file.data(), file.size());
  CHECK(again.memory_price == less.memory_price);
  CHECK(again.devices == less.devices);
  Plan other = again;
  other.entries[0] = compile_entry(again, "train", 16);
  CHECK(most_needed(other) <= limit);

  // One small device among large ones decides.
  std::string one = "null-8GB:15,null-";
  one += fmt::format("{}B:1", limit);
  CHECK(shortage_of(plan_of(m, one, strategy)).bytes == 0);
}

TEST_CASE("a smaller batch that does not fit says that the plan's own does") {
  const small::Model m = small::gpt(8, OptimizerKind::kSgd, 2, 16, 16, 16);
  const std::string strategy = "pipeline(2, micro_batches=2)";
  const auto most = [&](int64_t batch) {
    Plan plan = plan_of(m, "null:2", strategy);
    if (batch != 8) plan.entries[0] = compile_entry(plan, "train", batch);
    return most_needed(plan);
  };
  REQUIRE(most(7) > most(8));  // 4 and 3 samples are padded
  const Plan plan = plan_of(m, fmt::format("null-{}B:2", most(8)), strategy);
  const std::string text = message_of([&] { compile_entry(plan, "train", 7); });
  CHECK(has(text, "fits, but a batch of 7 samples in its place does not fit: device "));
  CHECK(has(text, "Batches of the plan's own size fit."));
}

TEST_CASE("micro-batches of one sample are not advised to be more") {
  const small::Model m = small::gpt(8, OptimizerKind::kSgd, 2, 64, 64, 16);
  struct Case {
    int devices;
    const char* strategy;
    bool more;
  };
  for (const auto& [devices, strategy, more] :
       {Case{2, "pipeline(2, micro_batches=4)", true}, Case{2, "pipeline(2, micro_batches=8)", false},
        Case{4, "replica(2) > pipeline(2, micro_batches=4)", false}}) {
    CAPTURE(strategy);
    const int64_t needed = most_needed(plan_of(m, fmt::format("null:{}", devices), strategy));
    const std::string text =
        message_of([&, d = devices, s = strategy] { plan_of(m, fmt::format("null-{}B:{}", needed * 8 / 10, d), s); });
    CAPTURE(text);
    REQUIRE(has(text, "does not fit: device "));
    REQUIRE(has(text, "What makes it fit"));
    CHECK(has(text, "micro_batches=8)' ") == more);
    CHECK(!has(text, "micro_batches=16"));
  }
}

TEST_CASE("micro-batches of two sizes take the memory of those of one, on each device") {
  for (const char* strategy : {"pipeline(4, micro_batches=8)", "pipeline(4, micro_batches=8, schedule=gpipe)",
                               "pipeline(2, micro_batches=8, schedule=interleaved, virtual_stages=2) > split(2)",
                               "pipeline(2, micro_batches=8, schedule=zb_v) > split(2)"}) {
    CAPTURE(strategy);
    const auto needed = [&](int64_t batch) {
      const Plan plan = plan_of(small::gpt(batch, OptimizerKind::kAdamW, 8, 64, 64, 64), "null:4", strategy);
      std::vector<int64_t> out;
      for (const DeviceRow& row : plan.entries[0].rows)
        out.push_back(memory_of(plan, plan.entries[0], static_cast<size_t>(row.program)).device.total());
      return out;
    };
    for (const auto& [two, one] : {std::pair(31, 32), std::pair(33, 40)}) {
      const std::vector<int64_t> mine = needed(two), most = needed(one);
      for (size_t d = 0; d < mine.size(); ++d) {
        CAPTURE(two);
        CAPTURE(d);
        CHECK(mine[d] <= most[d] * 21 / 20);
      }
    }
  }
}

TEST_CASE("where nothing fits, it is said by how much, on which device, and what would help") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2, 64, 64, 64);
  const auto failure = [&](const std::string& devices, const PlanOptions& chosen = {}) {
    CompileOptions options{chosen};
    options.strategy = "replica(2)";
    try {
      compile(m.g, parse_devices(devices), options);
    } catch (const Error& e) {
      CHECK(e.code() == Code::kResourceExhausted);
      return e.message();
    }
    return std::string("fits");
  };
  const std::string devices = "null-1GB:1,null-900KB:1", text = failure(devices);
  CAPTURE(text);
  for (const char* part : {"device 1 (null-900KB)", "more than it has", "parameters", "state", "activations", "lacks",
                           "1 null-900KB", "0 null-1GB", "in the backward pass of ", "h*.up.w f32 [64, 256] (m,v)"})
    CHECK(has(text, part));
  CHECK(failure("null-1GB:2") == "fits");
}

TEST_CASE("what is said to be needed is the least of all prices of memory, also where variables alone are too large") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 8, 64, 64, 64);
  const auto missing = [&](int64_t bytes, const std::string& strategy) {
    const std::string devices = fmt::format("null-{}B:4", bytes);
    CompileOptions options;
    options.strategy = strategy;
    const int64_t by_estimate = missing_bytes(estimate(m.g, parse_devices(devices), options), parse_devices(devices));
    const std::string text = message_of([&] { compile(m.g, parse_devices(devices), options); });
    CAPTURE(text);
    CHECK(has(text, bytes_text(static_cast<double>(by_estimate)) + " more than it has"));
  };
  for (const char* strategy : {"pipeline(4, micro_batches=2)", "split(4)", "replica(2) > pipeline(2, micro_batches=2)"})
    for (const int64_t bytes : {100'000, 400'000}) missing(bytes, strategy);
}

// Its estimate is the step's, and what an evaluation holds is nothing to that.
TEST_CASE("an evaluation that does not fit beside a step that does is planned at a price of its own") {
  golden::Gpt s;
  s.batch = 64, s.layers = 4, s.dim = 6144, s.heads = 64, s.seq = 2048, s.vocab = 51200;
  const Graph graph = golden::graph_of(s);
  std::vector<DeviceSpec> devices = parse_devices("1 node of 8xH100-80GB");
  for (DeviceSpec& d : devices) d.memory_bytes = 0;
  CompileOptions options{.strategy = "split(8)", .accumulation = 16, .precision = Precision::kBFloat16};
  options.recompute = Recompute::kSelective, options.memory_price = 64, options.verify_passes = false;
  const Plan roomy = compile(graph, devices, options);
  const auto arena = [](const Plan& plan, size_t e) { return plan.entries[e].programs[0].arena_bytes; };
  REQUIRE(arena(roomy, 1) > arena(roomy, 0));
  const int64_t variables = roomy.entries[0].programs[0].variable_bytes;
  for (DeviceSpec& d : devices) d.memory_bytes = variables + (arena(roomy, 0) + arena(roomy, 1)) / 2;
  const Plan plan = compile(graph, devices, options);
  CHECK(plan.memory_price == 64);
  CHECK(arena(plan, 0) == arena(roomy, 0));
  CHECK(arena(plan, 1) < arena(roomy, 1));
  CHECK(std::ranges::any_of(plan.notes, [](const std::string& note) { return has(note, "evaluation"); }));
  CHECK(compile_entry(plan, "eval", 64).programs[0].arena_bytes == arena(plan, 1));  // as a session plans it
}

TEST_CASE("what a split gathered is gathered again for the backward pass, bit by bit the same") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 4, 64, 128, 32);
  const std::string strategy = "pipeline(2, micro_batches=4) > split(2)";
  const Plan none = plan_of(m, "ref:4", strategy), selective = plan_of(m, "ref:4", strategy, Recompute::kSelective);
  CHECK(gathered_again(none) == 0);
  CHECK(gathered_again(selective) > 0);
  CHECK(most_needed(selective) < most_needed(none));
  CHECK(small::train(none, 2, 32) == small::train(selective, 2, 32));
}

// A stage would hold what it gathers in the forward pass for every micro-batch on its way back.
TEST_CASE("where memory is short, nothing is gathered in the forward pass for the backward pass alone") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 128, 64, 64, 8);
  const auto of_backward = [](const Plan& plan) {
    size_t n = 0;
    for (const Program& p : plan.entries[0].programs)
      for (const Segment& s : p.segments) {
        if (!s.name.starts_with("forward.")) continue;
        const auto reads = [](const Instruction& i, BufferId id) { return std::ranges::count(i.in, id) > 0; };
        for (const Instruction& i : s.instructions)
          if (i.op() == OpCode::k_all_gather || i.op() == OpCode::k_all_to_all)
            n += std::ranges::none_of(p.buffers, [&](const Buffer& b) { return b.alias == i.out[0]; }) &&
                 std::ranges::none_of(s.instructions, [&](const Instruction& r) { return reads(r, i.out[0]); });
      }
    return n;
  };
  const auto plan_at = [&](double price, Recompute recompute) {
    CompileOptions options;
    options.strategy = "pipeline(2, micro_batches=4) > split(4)";
    options.recompute = recompute;
    options.memory_price = price;
    return compile(m.g, parse_devices("ref:8", {0, 1, 2, 3}), options);
  };
  const Plan none = plan_at(4, Recompute::kNone), full = plan_at(4, Recompute::kFull);
  CHECK(of_backward(none) == 0);
  CHECK(of_backward(full) == 0);
  const small::Trained trained = small::train(none, 2, 64);
  CHECK(trained == small::train(full, 2, 64));
  CHECK(small::distance(trained, small::train(plan_at(1, Recompute::kNone), 2, 64)) < 1e-4);  // has other cuts
}

// Between the backward pass and the weights' gradients, which wait: of every micro-batch parts alone are kept.
TEST_CASE("zero-bubble schedules keep nothing gathered for what they put off, bit by bit the same") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 4, 64, 128, 32);
  const auto strategy = [](const char* schedule) {
    return fmt::format("pipeline(2, micro_batches=4, schedule={}) > split(2)", schedule);
  };
  const auto once = small::train(plan_of(m, "ref:4", strategy("1f1b")), 2, 32);
  for (const char* schedule : {"zb_h1", "zb_v"}) {
    CAPTURE(schedule);
    std::vector<int64_t> needed;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      const Plan plan = plan_of(m, "ref:4", strategy(schedule), recompute);
      size_t kept = 0;
      for (const Program& p : plan.entries[0].programs)
        for (const Buffer& b : p.buffers) kept += b.versions > 1 && b.name.find(".gathered.again") != b.name.npos;
      CHECK(kept == 0);
      CHECK(small::train(plan, 2, 32) == once);
      needed.push_back(most_needed(plan));
    }
    CHECK(needed[1] <= needed[0]);
    CHECK(needed[2] <= needed[0]);
  }
}

// Devices of a split that draw nothing and look nothing up differ in no number either.
TEST_CASE("programs are one for devices that differ in their place alone") {
  small::Model m = small::gpt(32, OptimizerKind::kAdamW, 8, 512, 1024, 1000, 16);
  const auto check = [&](size_t places) {
    const Plan plan = plan_of(m, "null:16", "pipeline(4, micro_batches=32) > split(4)");
    std::set<int32_t> programs;
    std::set<std::pair<int32_t, Ints>> placed;
    for (size_t d = 4; d < 12; ++d) {  // of the stages between the first and the last
      const DeviceRow& row = plan.entries[0].rows[d];
      programs.insert(row.program), placed.emplace(row.program, row.placed);
    }
    CHECK(programs.size() == 2);
    CHECK(placed.size() == places);
  };
  check(8);
  for (Op& op : m.g.ops)
    if (op.attrs.contains("rate")) op.attrs["rate"] = 0.0;
  check(2);
}

TEST_CASE("a wait without end is found by one device of each class") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2, 8, 16, 32);
  Plan plan = plan_of(m, "null:8", "replica(4) > pipeline(2, micro_batches=2)");
  verify_communication(plan, plan.entries[0]);
  Program& first = plan.entries[0].programs[plan.entries[0].rows[0].program];
  const auto at = [&](const char* segment) {
    return std::find_if(first.schedule.begin(), first.schedule.end(),
                        [&](const ScheduleRow& row) { return first.segments[row.segment].name.starts_with(segment); });
  };
  REQUIRE(at("forward") < at("backward"));
  std::rotate(at("forward"), at("backward"), at("backward") + 1);  // waits for the gradient of what it has not sent
  CHECK(
      has(message_of([&] { verify_communication(plan, plan.entries[0]); }), "device 0 never leaves segment 'backward"));
}

TEST_CASE("devices that serve several of a class one after the other are of one class themselves") {
  Plan plan;
  Entry& entry = plan.entries.emplace_back();
  entry.links.resize(1);
  Channels channels(1);
  for (int32_t from = 0; from < 3; ++from)
    for (int32_t to = 3; to < 6; ++to) channels[0].emplace(from, to);
  const auto classes = [&](const std::vector<int32_t>& programs) {
    entry.rows.clear();
    for (const int32_t p : programs) {
      DeviceRow& row = entry.rows.emplace_back();
      row.device = static_cast<int32_t>(entry.rows.size()) - 1, row.program = p;
    }
    return classes_alike({plan, entry}, {.parts = {}, .channels = channels}, programs);
  };
  CHECK(classes({0, 0, 0, 1, 1, 1}) == std::vector<int32_t>{0, 0, 0, 1, 1, 1});
  CHECK(classes({0, 0, 0, 1, 1, 2}) == std::vector<int32_t>{0, 0, 0, 1, 1, 2});
  CHECK(classes({0, 0, 0, 1, 2, 1}) == std::vector<int32_t>{0, 1, 2, 3, 4, 5});  // a class's turn comes twice
}

TEST_CASE("programs are alike in memory by all that says who has which bytes when, and by nothing else") {
  Program first;
  first.buffers.resize(1);
  first.segments.resize(1);
  first.segments[0].instructions.resize(2);
  first.segments[0].instructions[1].waits = {{Queue::kCompute, 0}};
  first.schedule.resize(1);
  const auto alike = [&](auto change) {
    Program second = first;
    change(second, second.buffers[0], second.segments[0].instructions[1], second.schedule[0]);
    return !before_in_memory(&first, &second) && !before_in_memory(&second, &first);
  };
  CHECK(alike([](Program&, Buffer&, Instruction&, ScheduleRow&) {}));
  CHECK(alike([](Program&, Buffer& b, Instruction& i, ScheduleRow&) {
    b.name = i.name = "other", i.work = work::Kernel{.op = {}, .attrs = {{"begin", int64_t{1}}}};
  }));
  using Change = void (*)(Program&, Buffer&, Instruction&, ScheduleRow&);
  const Change changes[] = {
      [](Program& p, Buffer&, Instruction&, ScheduleRow&) { p.buffers.emplace_back(); },
      [](Program& p, Buffer&, Instruction&, ScheduleRow&) { p.segments.emplace_back(); },
      [](Program& p, Buffer&, Instruction&, ScheduleRow&) { p.schedule.emplace_back(); },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.kind = BufferKind::kInput; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.offset = 64; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.bytes = 4; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.versions = 2; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.alias = 0; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.memory = Memory::kHost; },
      [](Program&, Buffer& b, Instruction&, ScheduleRow&) { b.at = 4; },
      [](Program&, Buffer&, Instruction& i, ScheduleRow&) { i.queue = Queue::kCopyIn; },
      [](Program&, Buffer&, Instruction& i, ScheduleRow&) { i.in = {0}; },
      [](Program&, Buffer&, Instruction& i, ScheduleRow&) { i.out = {0}; },
      [](Program&, Buffer&, Instruction& i, ScheduleRow&) { i.waits.clear(); },
      [](Program&, Buffer&, Instruction& i, ScheduleRow&) { i.waits[0].index = 1; },
      [](Program&, Buffer&, Instruction&, ScheduleRow& r) { r.segment = 1; },
      [](Program&, Buffer&, Instruction&, ScheduleRow& r) { r.micro_batch = 1; },
      [](Program&, Buffer&, Instruction&, ScheduleRow& r) { r.version = 1; },
      [](Program&, Buffer&, Instruction&, ScheduleRow& r) { r.whole = true; },
  };
  for (size_t k = 0; k < std::size(changes); ++k) {
    CAPTURE(k);
    CHECK(!alike(changes[k]));
  }
}

TEST_CASE("a fault of memory is found in each of many programs") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2, 8, 16, 32);
  Plan plan = plan_of(m, "null:4", "replica(2) > split(2)");
  give_own_programs(plan.entries[0]);
  REQUIRE(plan.entries[0].programs.size() > 1);
  for (size_t p = 0; p < plan.entries[0].programs.size(); ++p) {
    Plan broken = plan;
    for (Buffer& b : broken.entries[0].programs[p].buffers)
      if (b.offset > 0) b.offset = 0;
    CAPTURE(p);
    CHECK(has(message_of([&] { verify(broken); }), fmt::format("program {} (device ", p)));
  }
}

}  // namespace
}  // namespace whale
