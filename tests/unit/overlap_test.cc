// Computation and communication together changes no bit, and is chosen where the cost says so.
#include "cost/overlap.h"

#include <doctest/doctest.h>

#include "simulate/simulate.h"
#include "trained.h"

namespace whale {
namespace {

int64_t count(const Plan& plan, OpCode code, const std::string& part = "") {
  int64_t n = 0;
  for (const Segment& s : plan.entries[0].programs[0].segments)
    for (const Instruction& i : s.instructions) n += i.op() == code && i.name.find(part) != i.name.npos;
  return n;
}

// Collectives that have a chunk of that number.
int64_t in_chunks(const Plan& plan, const char* chunk = "#1") {
  int64_t n = 0;
  for (const OpCode code : {OpCode::k_all_reduce, OpCode::k_reduce_scatter, OpCode::k_all_gather})
    n += count(plan, code, chunk);
  return n;
}

bool has_note(const Plan& plan, const std::string& text) {
  return std::any_of(plan.notes.begin(), plan.notes.end(),
                     [&](const std::string& note) { return note.find(text) != note.npos; });
}

small::Model with_momentum(small::Model m) {
  m.g.training.optimizer.momentum = 0.9;
  return m;
}

// ---- updates in slices --------------------------------------------------------------------------------------------
struct Form {
  const char* name;
  UpdateForm update;
  int64_t bucket_bytes;
  int zero = 0;
};

// Or all updates of the stage wait behind the last collective, with the slices of everything that they write.
TEST_CASE("updates: the loss goes to the stage that hands it out before the collectives of gradients") {
  CompileOptions options;
  options.strategy = "replica(2) > pipeline(2, micro_batches=4)";
  options.bucket_bytes = 1;
  for (const UpdateForm update : {UpdateForm::kWhole, UpdateForm::kSliced}) {
    options.update = update;
    const Plan plan = compile(small::gpt(16, OptimizerKind::kAdamW, 4).g, parse_devices("null:4"), options);
    const Entry& entry = plan.entries[0];
    for (const DeviceRow& row : entry.rows) {
      const auto& last = entry.programs[row.program].segments.back().instructions;
      const auto at = [&](auto is) { return std::ranges::find_if(last, is) - last.begin(); };
      const auto sent = at([](const Instruction& i) { return i.kind() == InstructionKind::kSend; });
      if (sent == std::ssize(last)) continue;
      const auto collectives = std::count_if(last.begin(), last.begin() + sent, [](const Instruction& i) {
        return i.kind() == InstructionKind::kCollective;
      });
      CHECK(collectives <= 2);  // of the loss itself, and of what was there before it
      CHECK(at([](const Instruction& i) { return i.phase == Phase::kUpdate; }) < std::ssize(last) / 2);
    }
  }
}

TEST_CASE("updates: all-reduce, slices, slices in buckets and cut state give the same bits") {
  const small::Model models[] = {small::gpt(12, OptimizerKind::kSgd),
                                 with_momentum(small::gpt(12, OptimizerKind::kSgd)),
                                 small::gpt(12, OptimizerKind::kAdamW)};
  const Form forms[] = {{"sliced", UpdateForm::kSliced, 1},
                        {"sliced in buckets", UpdateForm::kSliced, 0},
                        {"state cut", UpdateForm::kByCost, 1, 1},
                        {"state cut, buckets", UpdateForm::kSliced, 0, 1}};
  struct Place {
    std::string devices, strategy;
    std::vector<double> state_shares;
    int64_t accumulation = 1;
  };
  for (const char* kind : {"ref", "cpu"}) {
    if (std::string(kind) == "cpu" && small::backends_folder().empty()) continue;
    const Place places[] = {{":2", "replica(2)", {}},           {":2", "replica(2)", {3, 1}},
                            {":3", "replica(3)", {}},           {":3", "replica(3)", {1, 0, 2}, 2},
                            {":4", "replica(4)", {2, 1, 1, 3}}, {":4", "replica(2) > split(2)", {1, 2}}};
    for (const Place& place : places)
      for (const small::Model& m : models) {
        CompileOptions options;
        options.strategy = place.strategy;
        options.accumulation = place.accumulation;
        options.update = UpdateForm::kWhole;
        const small::Trained whole = small::train(m, kind + place.devices, options, 2, 31);
        for (const Form& form : forms) {
          CAPTURE(kind + place.devices);
          CAPTURE(place.strategy);
          CAPTURE(form.name);
          options.update = form.update;
          options.bucket_bytes = form.bucket_bytes;
          options.zero = form.zero;
          options.state_shares = place.state_shares;
          CHECK(small::train(m, kind + place.devices, options, 2, 31) == whole);
        }
        options = {};
      }
  }
}

TEST_CASE("updates in slices: one collective per bucket, updated and gathered in place") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW);
  CompileOptions options;
  options.strategy = "replica(2)";
  options.update = UpdateForm::kSliced;
  const Plan plan = compile(m.g, parse_devices("ref:2", {0, 1}), options);
  CHECK(count(plan, OpCode::k_reduce_scatter) == 1);
  CHECK(count(plan, OpCode::k_all_gather) == 3);  // parameters and both moments
  CHECK(count(plan, OpCode::k_local_slice) == 0);
  CHECK(has_note(plan, "asked for"));
  for (int zero = 1; zero <= 3; ++zero) {
    options.update = UpdateForm::kByCost;
    options.zero = zero;
    const Plan cut = compile(m.g, parse_devices("ref:2", {0, 1}), options);
    CAPTURE(zero);
    CHECK(count(cut, OpCode::k_reduce_scatter) == 1);
    CHECK(count(cut, OpCode::k_all_gather) <= 2);
    CHECK(count(cut, OpCode::k_local_slice) == 0);
    const Plan again = deserialize(serialize(cut).data(), serialize(cut).size());
    CHECK(print(again) == print(cut));
  }
}

TEST_CASE("updates in slices: what the cost says") {
  // 64 MB of gradient over 4 devices at 10 GB/s and 20 GB/s: an all_reduce moves 2 * 3/4 of it, a gather 3/4.
  const double bytes = 64e6;
  const DeviceRates rates{1e15, 20e9, 0};
  const LinkRates link{10e9, 1};  // buckets share the latency
  const UpdateWork sgd{{0, 3 * bytes}, bytes, bytes, 0, 4};
  CHECK(whole_update_seconds(sgd, rates, link) == doctest::Approx(2 * 4.8e-3 + 9.6e-3));
  CHECK(sliced_update_seconds(sgd, rates, link) == doctest::Approx(2 * 4.8e-3 + 2.4e-3));
  UpdateWork many = sgd;
  many.result_bytes = 8 * bytes;
  CHECK(sliced_update_seconds(many, rates, link) > whole_update_seconds(many, rates, link));

  CompileOptions options;
  options.strategy = "replica(4)";
  const auto plan_of = [&](int64_t hidden) {
    return compile(small::mlp(8, OptimizerKind::kSgd, 512, hidden).g, parse_devices("null:4", {0}), options);
  };
  CHECK(has_note(plan_of(4096), "run on a slice"));
  CHECK(count(plan_of(4096), OpCode::k_reduce_scatter) >= 1);
  CHECK(!has_note(plan_of(16), "run on a slice"));
  CHECK(count(plan_of(16), OpCode::k_reduce_scatter) == 0);
  CHECK(count(compile(small::mlp(8, OptimizerKind::kSgd, 512, 4096).g, parse_devices("cpu:4", {0}), options),
              OpCode::k_reduce_scatter) == 0);  // cores copy with the time that they save
  options.update = UpdateForm::kWhole;
  CHECK(count(plan_of(4096), OpCode::k_reduce_scatter) == 0);
}

// ---- products in chunks -------------------------------------------------------------------------------------------
// The kernels of a CPU device may round by the number of rows: oneDNN's do where it has no AVX-512.
TEST_CASE("products in chunks give the same result, bit by bit where a kernel does not look at the number of rows") {
  const small::Model gpt = small::gpt(6, OptimizerKind::kAdamW, 2, 8, 16, 32, 4);
  const small::Model wide = small::gpt(2, OptimizerKind::kSgd, 1, 96, 128, 64, 4);
  struct Place {
    const small::Model& m;
    const char *devices, *strategy;
    int64_t accumulation;
  };
  for (const std::string kind : {"ref", "cpu"}) {
    if (kind == "cpu" && small::backends_folder().empty()) continue;
    for (const Place& p : std::vector<Place>{{gpt, ":4", "replica(2) > split(2, factor=k)", 1},
                                             {gpt, ":3", "split(3, factor=k, shares=[1, 1, 2])", 1},
                                             {gpt, ":4", "replica(2) > split(2, factor=k)", 2},
                                             {gpt, ":4", "pipeline(2, micro_batches=3) > split(2, factor=k)", 1},
                                             {wide, ":4", "replica(2) > split(2, factor=k)", 1}}) {
      CompileOptions options;
      options.strategy = p.strategy;
      options.accumulation = p.accumulation;
      options.matmul_chunks = 1;
      const small::Trained plain = small::train(p.m, kind + p.devices, options, 2, 31);
      for (const int64_t chunks : {2, 3, 5}) {
        CAPTURE(kind + p.devices);
        CAPTURE(p.strategy);
        CAPTURE(chunks);
        options.matmul_chunks = chunks;
        const Plan plan = compile(p.m.g, parse_devices(kind + p.devices, {0, 1, 2, 3}), options);
        CHECK(in_chunks(plan) >= 2);
        const small::Trained chunked = small::train(plan, 2, 31);
        if (kind == "ref") CHECK(chunked == plain);
        CHECK(distance(chunked, plain) < 3e-6);
      }
    }
  }
}

TEST_CASE("products in chunks overlap with their collectives and need no more memory") {
  const small::Model m = small::gpt(8, OptimizerKind::kSgd, 2, 32, 64, 64, 2);
  CompileOptions options;
  options.strategy = "replica(2) > split(2, factor=k)";
  const auto plan_of = [&](int64_t chunks) {
    options.matmul_chunks = chunks;
    return compile(m.g, parse_devices("null:4", {0}), options);
  };
  const Plan plain = plan_of(1), chunked = plan_of(4);
  CHECK(in_chunks(chunked, "#3") >= 2);
  CHECK(chunked.entries[0].programs[0].arena_bytes <= plain.entries[0].programs[0].arena_bytes * 11 / 10);
  // A second for every element that is moved, and for every FLOP.
  const auto seconds = [](const Instruction& i, int32_t) {
    return i.kind() == InstructionKind::kCollective ? i.bytes : i.flops / 16;
  };
  CHECK(makespan(simulate(chunked, chunked.entries[0], seconds)) <
        0.99 * makespan(simulate(plain, plain.entries[0], seconds)));
  const Plan again = deserialize(serialize(chunked).data(), serialize(chunked).size());
  CHECK(print(again) == print(chunked));
}

TEST_CASE("products in chunks: what the cost says") {
  // 1 s of product beside 1 s of collective: n chunks take 1 + 1/n and the latency of each.
  const DeviceRates rates{1e12, 1e15, 0};
  const ProductWork work{{1e12, 0}, 1.0, 0.0, 1 << 20};
  const Chunks best = choose_chunks(work, rates, true);
  CHECK(best.whole_seconds == doctest::Approx(2));
  CHECK(best.count == 16);
  CHECK(best.seconds == doctest::Approx(1 + 1.0 / 16));
  ProductWork late = work;
  late.latency_seconds = 0.3;  // n chunks: 1/n + n (1/n + 0.3)
  CHECK(choose_chunks(late, rates, true).count == 2);
  CHECK(choose_chunks(late, rates, true).seconds == doctest::Approx(0.5 + 2 * 0.8));
  CHECK(choose_chunks(work, rates, false).count == 1);  // nothing runs beside
  ProductWork few = work;
  few.rows = 3;
  CHECK(choose_chunks(few, rates, true).count == 3);
  CHECK(choose_chunks(few, rates, true, 2).count == 1);

  // A large product: chosen where devices have engines for communication, not where they are cores.
  const small::Model large = small::gpt(8, OptimizerKind::kSgd, 1, 256, 1024, 64, 8);
  CompileOptions options;
  options.strategy = "split(8, factor=k)";
  const Plan accelerator = compile(large.g, parse_devices("null:8", {0}), options);
  CHECK(has_note(accelerator, "beside their collectives"));
  CHECK(in_chunks(accelerator) >= 2);
  CHECK(!has_note(compile(large.g, parse_devices("cpu:8", {0, 1}), options), "beside their collectives"));
  const small::Model little = small::gpt(8, OptimizerKind::kSgd, 1, 8, 16, 32, 8);
  CHECK(!has_note(compile(little.g, parse_devices("null:8", {0}), options), "beside their collectives"));
}

TEST_CASE("products in chunks and updates in slices are no part of exact mode") {
  const small::Model m = small::gpt(4, OptimizerKind::kSgd);
  CompileOptions options;
  options.exact = true;
  options.accumulation = 2;
  options.strategy = "replica(2)";
  const auto devices = parse_devices("null:2", {0});
  CHECK(count(compile(m.g, devices, options), OpCode::k_reduce_scatter) == 0);
  options.update = UpdateForm::kSliced;
  CHECK_THROWS_WITH_AS(compile(m.g, devices, options), doctest::Contains("exact mode"), Error);
  options.update = UpdateForm::kByCost;
  options.matmul_chunks = 2;
  CHECK_THROWS_WITH_AS(compile(m.g, devices, options), doctest::Contains("matmul_chunks"), Error);
}

}  // namespace
}  // namespace whale
