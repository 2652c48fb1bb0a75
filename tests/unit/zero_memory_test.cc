// Memory under ZeRO against the closed forms (Rajbhandari et al., 2020, table 1), micro-batches and pipelines included.
#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "golden.h"
#include "plan/figures.h"
#include "small_models.h"

using namespace whale;

namespace {

constexpr int64_t kBucket = 16 << 10;

struct Setup {
  const char* devices;
  const char* strategy;
  int64_t accumulation;
  int64_t replicas;
};

struct Choice {
  int zero = 0;
  Precision precision = Precision::kFloat32;
  Recompute recompute = Recompute::kNone;
  int64_t prefetch = 0;
  std::optional<DType> gradient_dtype = {}, accumulate_dtype = {};
};

MemoryClasses memory(const small::Model& m, const Setup& s, const Choice& choice) {
  CompileOptions options;
  options.strategy = s.strategy;
  options.accumulation = s.accumulation;
  options.zero = choice.zero;
  options.precision = choice.precision;
  options.recompute = choice.recompute;
  options.prefetch = choice.prefetch, options.gradient_dtype = choice.gradient_dtype;
  options.accumulate_dtype = choice.accumulate_dtype;
  options.bucket_bytes = kBucket;
  const Plan plan = compile(m.g, parse_devices(s.devices, {0}), options);
  return memory_of(plan, plan.entries[0], 0).device;
}

// Within 5 % of `whole` / n and a few bytes of padding.
bool near_part(int64_t bytes, int64_t whole, int64_t n) {
  return static_cast<double>(std::abs(bytes * n - whole)) <= 0.05 * static_cast<double>(whole);
}

}  // namespace

TEST_CASE("ZeRO: parameters, gradients and state are divided by the replicas, with micro-batches too") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const int64_t matrix = int64_t{4} * 64 * 256 * 4;  // the largest parameter
  for (const Setup& s :
       {Setup{"null:4", "replica", 4, 4}, Setup{"null:8", "replica(4) > pipeline(2, micro_batches=8)", 0, 4},
        Setup{"null:4", "replica(2) > split(2)", 8, 2}}) {
    CAPTURE(s.strategy);
    const MemoryClasses none = memory(m, s, {.zero = 0}), one = memory(m, s, {.zero = 1}),
                        two = memory(m, s, {.zero = 2}), three = memory(m, s, {.zero = 3});
    // Gradients under way: those of a bucket, what becomes of them, and the one at work.
    const int64_t under_way = 3 * (kBucket + matrix);
    CHECK(none.gradients >= none.parameters);
    CHECK(none.gradients <= none.parameters + under_way);
    CHECK(near_part(one.state, none.state, s.replicas));
    CHECK(one.parameters == none.parameters);
    CHECK(near_part(two.state, none.state, s.replicas));
    CHECK(two.gradients <= none.parameters / s.replicas * 21 / 20 + under_way);
    CHECK(near_part(three.parameters, none.parameters, s.replicas));
    CHECK(near_part(three.state, none.state, s.replicas));
    CHECK(three.gradients <= none.parameters / s.replicas * 21 / 20 + under_way);
    // Whole parameters: those that the ops at work and the next ones read.
    CHECK(three.activations <= two.activations + 8 * matrix);
    CHECK(none.total() > one.total());
    CHECK(one.total() > two.total());
    CHECK(two.total() > three.total());
  }
}

// Used up as they come: no gradient waits for the end of the backward pass, no 16-bit copy of a parameter for the other
// pass.
TEST_CASE("ZeRO: one micro-batch holds the gradients of a few layers, and their copies") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 24, 8, 64, 64);
  const int64_t matrix = int64_t{4} * 64 * 256 * 4;
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CAPTURE(static_cast<int>(precision));
    const auto of = [&](int zero) {
      return memory(m, {"null:4", "replica", 1, 4}, {.zero = zero, .precision = precision});
    };
    const MemoryClasses none = of(0), one = of(1), two = of(2), three = of(3);
    CHECK(none.parameters > 16 * matrix);
    CHECK(one.gradients <= 3 * (kBucket + matrix));
    CHECK(two.gradients <= 3 * (kBucket + matrix));
    CHECK(three.gradients <= 3 * (kBucket + matrix));
    CHECK(one.total() < none.total());
    CHECK(two.total() <= one.total());
    CHECK(three.total() < two.total());
    CHECK(near_part(three.parameters, none.parameters, 4));
    CHECK(three.activations <= two.activations + 8 * matrix);
  }
}

TEST_CASE("ZeRO 3: micro-batches of two sizes take no more memory than those of one") {
  for (const Setup& s :
       {Setup{"null:4", "replica", 4, 4}, Setup{"null:8", "replica(4) > pipeline(2, micro_batches=4)", 0, 4},
        Setup{"null:8", "replica(4) > split(2)", 4, 4}}) {
    CAPTURE(s.strategy);
    const small::Model even = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64),
                       uneven = small::gpt(63, OptimizerKind::kAdamW, 12, 8, 64, 64);
    for (const int zero : {2, 3}) {
      CAPTURE(zero);
      const MemoryClasses one = memory(even, s, {.zero = zero}), two = memory(uneven, s, {.zero = zero});
      CHECK(two.total() <= one.total() * 21 / 20);
      CHECK(two.gradients <= one.gradients * 21 / 20);
    }
  }
}

TEST_CASE("ZeRO 3: what is gathered ahead in the backward pass is no gradient") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const Setup s{"null:4", "replica", 4, 4};
  CHECK(memory(m, s, {.zero = 3, .prefetch = 6}).gradients <= memory(m, s, {.zero = 3}).gradients * 11 / 10);
}

TEST_CASE("ZeRO 3: gradients that are summed in 16 bits live in parts, as the parameters in 16 bits do") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const int64_t matrix = int64_t{4} * 64 * 256 * 4;
  const Setup s{"null:4", "replica", 4, 4};
  Choice choice{.zero = 3, .precision = Precision::kBFloat16, .recompute = Recompute::kFull};
  const MemoryClasses own = memory(m, s, choice);
  choice.gradient_dtype = DType::kBF16;
  const MemoryClasses narrow = memory(m, s, choice);
  CHECK(narrow.parameters == own.parameters);
  CHECK(narrow.gradients <= own.parameters * 21 / 20 + 3 * (kBucket + matrix));
  CHECK(narrow.activations <= own.activations + 4 * matrix);
}

// 2 bytes a parameter in place of 4, of the part that a device keeps; and what a bucket holds on its way.
TEST_CASE("sums over micro-batches in 16 bits take half the memory, under ZeRO too") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const int64_t matrix = int64_t{4} * 64 * 256 * 4, under_way = 3 * (kBucket + matrix);
  for (const Setup& s : {Setup{"null:1", "", 4, 1}, Setup{"null:4", "replica", 4, 4},
                         Setup{"null:8", "replica(4) > pipeline(2, micro_batches=8)", 0, 4}})
    for (const int zero : {0, 2, 3})
      for (const bool both : {false, true}) {
        CAPTURE(s.strategy);
        CAPTURE(zero);
        CAPTURE(both);
        Choice choice{.zero = zero, .accumulate_dtype = DType::kBF16};
        if (both) choice.gradient_dtype = DType::kBF16;
        const int64_t whole = memory(m, s, {.zero = 0}).parameters / 2, n = zero >= 2 ? s.replicas : 1;
        const MemoryClasses held = memory(m, s, choice);
        CHECK(held.gradients >= whole / n * 9 / 10);
        CHECK(held.gradients <= whole / n * 21 / 20 + under_way);
        CHECK(held.total() < memory(m, s, {.zero = zero}).total());
      }
}

// Two matrices that are most of the model, or one that is used twice. Of each, pieces of 32 columns are whole for a
// while, and its parts: those of the pieces, and what they are joined to.
TEST_CASE("ZeRO 2 and 3: a gradient larger than a bucket is made and reduced in pieces") {
  for (const bool tied : {false, true}) {
    golden::Gpt s;
    s.batch = 16, s.layers = 1, s.dim = 256, s.heads = 2, s.seq = 16, s.vocab = 8192, s.tied = tied;
    small::Model m;
    m.g = golden::graph_of(s);
    const int64_t table = s.vocab * s.dim * 4, n = 4;
    for (const char* devices : {"null:4", "null:8"})
      for (const int zero : {2, 3}) {
        CAPTURE(tied);
        CAPTURE(devices);
        CAPTURE(zero);
        const bool stages = devices == std::string_view("null:8");
        const Setup at{devices, stages ? "replica(4) > pipeline(2, micro_batches=4)" : "replica", stages ? 0 : 4, n};
        const int64_t sums = memory(m, at, {.zero = 0}).parameters / n;
        const MemoryClasses held = memory(m, at, {.zero = zero});
        CHECK(held.gradients >= sums * 19 / 20);
        CHECK(held.gradients <= sums * 21 / 20 + (tied ? 3 : 2) * table / n + 4 * (table / 8) + 3 * kBucket);
        CHECK(held.gradients < sums + table);
      }
  }
}

// Both stages read the table; each adds up its part of what its samples say of it.
TEST_CASE("ZeRO: gradients of a table that stages share live in parts on each of them") {
  golden::Gpt s;
  s.batch = 16, s.layers = 2, s.dim = 32, s.heads = 2, s.seq = 16, s.vocab = 4096, s.tied = true;
  small::Model m;
  m.g = golden::graph_of(s);
  const int64_t table = s.vocab * s.dim * 4;
  CompileOptions options;
  options.strategy = "replica(4) > pipeline(2, micro_batches=4)", options.bucket_bytes = kBucket;
  for (const int zero : {1, 2, 3}) {
    options.zero = zero;
    const Plan plan = compile(m.g, parse_devices("null:8", {0}), options);
    for (size_t program = 0; program < plan.entries[0].programs.size(); ++program) {
      CAPTURE(zero);
      CAPTURE(program);
      const int64_t bytes = memory_of(plan, plan.entries[0], program).device.gradients;
      if (zero < 2)
        CHECK(bytes >= table * 7 / 4);  // the sum, and the term at work
      else
        CHECK(bytes <= table * 13 / 8);  // a part of the sum, and the term at work
    }
  }
}

// Its uses are 32 matrices. Held are the sum, a term, and the activations, which are less than two; under ZeRO 3 also
// the gathered matrix.
TEST_CASE("a matrix that is used many times has one gradient at work, not one for each use") {
  const small::Model m = small::shared(32, 16, 512);
  const int64_t matrix = int64_t{4} * 512 * 512;
  const auto held = [&](const Setup& s, int zero) {
    const MemoryClasses of = memory(m, s, {.zero = zero});
    CHECK(of.gradients + of.activations <= 4 * matrix);
    return of.total();
  };
  held({"null:1", "local", 1, 1}, 0);
  const Setup replicas{"null:4", "replica", 4, 4};
  const int64_t whole = held(replicas, 0), state = held(replicas, 1), sums = held(replicas, 2);
  CHECK(state <= whole);
  CHECK(sums <= state);
  held(replicas, 3);
}

// The updates come after the norm of all gradients, one after the other: what each makes on the way is gone before the
// next one's.
TEST_CASE("clipping by the norm holds the gradients once, whatever the optimizer") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kAdafactor,
                                   OptimizerKind::kAdagrad, OptimizerKind::kLamb})
    for (const int64_t accumulation : {1, 4}) {
      CAPTURE(static_cast<int>(kind));
      small::Model m = small::gpt(4, kind, 24, 8, 64, 64);
      const int64_t matrix = int64_t{4} * 64 * 256 * 4;
      m.g.training.clip_norm = 1;
      const MemoryClasses clipped = memory(m, {"null:1", "local", accumulation, 1}, {});
      CHECK(clipped.gradients + clipped.activations <= clipped.parameters + 16 * matrix);
      CHECK(clipped.gradients >= clipped.parameters * 9 / 10);  // and says so
    }
}

TEST_CASE("ZeRO 3: no more gathers than are asked for are ahead of the one that is read") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  for (const int64_t accumulation : {1, 4}) {
    const auto of = [&](int64_t prefetch) {
      return memory(m, {"null:4", "replica", accumulation, 4},
                    {.zero = 3, .recompute = Recompute::kFull, .prefetch = prefetch});
    };
    CAPTURE(accumulation);
    CHECK(of(1).total() < of(8).total());
    CHECK(of(8).total() < of(32).total());
    CHECK(of(1000).total() >= of(32).total());
  }
}

namespace {

// Every op takes 1 us, a gather between the four devices `gather` us.
Plan clocked(double gather, Recompute recompute = Recompute::kNone, int64_t bucket_bytes = 0) {
  CompileOptions options;
  options.strategy = "replica";
  options.zero = 3;
  options.recompute = recompute;
  options.bucket_bytes = bucket_bytes;
  options.profile.device = {1e18, 1e18, 1e-6};
  options.profile.link = {1e18, gather * 1e-6 / 3};
  return compile(small::gpt(64, OptimizerKind::kAdamW, 12, 8, 256, 64).g, parse_devices("null:4", {0}), options);
}

// For each gather that the forward pass reads, the ops that are computed before its reader is and after it has started.
std::vector<int> lead(const Plan& plan) {
  std::vector<int> out;
  for (const Segment& s : plan.entries[0].programs[0].segments)
    for (auto gather = s.instructions.begin(); gather != s.instructions.end(); ++gather) {
      if (gather->kind() != InstructionKind::kCollective || gather->op() != OpCode::k_all_gather) continue;
      const auto reader = std::find_if(gather + 1, s.instructions.end(), [&](const Instruction& i) {
        return std::ranges::any_of(i.in, [&](BufferId b) { return std::ranges::count(gather->out, b) > 0; });
      });
      if (reader == s.instructions.end() || reader->phase != Phase::kForward) continue;
      out.push_back(static_cast<int>(
          std::count_if(gather, reader, [](const Instruction& i) { return i.kind() == InstructionKind::kKernel; })));
    }
  return out;
}

}  // namespace

TEST_CASE("ZeRO 3: a gather starts as early as it takes, and no earlier") {
  const std::vector<int> fast = lead(clocked(0)), slow = lead(clocked(3)), slower = lead(clocked(6));
  REQUIRE(fast.size() > 6);
  REQUIRE(slow.size() == fast.size());
  REQUIRE(slower.size() == fast.size());
  CHECK(slower[0] == 0);                          // nothing to compute before it
  for (size_t k = 1; k + 1 < fast.size(); ++k) {  // the last is read where most is held
    CHECK(fast[k] <= 1);
    CHECK(slow[k] == 3);
    CHECK(slower[k] == 6);
  }
}

TEST_CASE("ZeRO 3: gathers that are read by one op start one behind the other") {
  const std::vector<int> leads = lead(clocked(0.75, Recompute::kNone, 1));
  CHECK(std::ranges::count(leads, 2) >= 24);  // weight and bias of two norms a layer
  CHECK(std::ranges::max(leads) <= 3);
}

TEST_CASE("ZeRO 3: gathers start early where that takes no more memory") {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
    const auto held = [&](double gather) {
      const Plan plan = clocked(gather, recompute);
      return memory_of(plan, plan.entries[0], 0).device.total();
    };
    CHECK(held(3) * 100 <= held(0) * 102);
    CHECK(held(30) * 100 <= held(0) * 105);
  }
}

TEST_CASE("sums over micro-batches: a gradient is added as soon as it is there") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const MemoryClasses one = memory(m, {"null:1", "", 1, 1}, {.zero = 0}),
                      many = memory(m, {"null:1", "", 8, 1}, {.zero = 0});
  CHECK(many.gradients >= one.parameters);
  CHECK(many.gradients * 4 < one.parameters * 5);
  CHECK(many.total() < one.total() + one.parameters);
}

// Megatron's pairs in both passes (Shoeybi et al., 2019, section 3): cut by sequences fewer bytes would move, and each
// device would hold whole weights and whole sums of their gradients over all micro-batches.
TEST_CASE("split: sums of gradients over micro-batches are cut as their parameters") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 4, 2048, 4096, 1000);
  const MemoryClasses held = memory(m, {"null:16", "pipeline(2, micro_batches=32) > split(8)", 0, 1}, {.zero = 0});
  CHECK(held.gradients <= held.parameters * 5 / 4);
}

// Adafactor keeps means of rows and of columns (Shazeer and Stern, 2018): those that a cut of the parameter cuts.
TEST_CASE("split: factors of the second moment are cut as their parameters") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdafactor, 2, 512, 1024, 1000, 16);
  CompileOptions options;
  options.strategy = "pipeline(2, micro_batches=32) > split(4)";
  const Plan plan = compile(m.g, parse_devices("null:8", {0}), options);
  int rows = 0, columns = 0;
  for (const PlanVariable& v : plan.variables) {
    if (v.state_name != "row" && v.state_name != "col") continue;
    const auto owner = std::find_if(plan.variables.begin(), plan.variables.end(),
                                    [&](const PlanVariable& p) { return p.name == v.owner; });
    REQUIRE(owner != plan.variables.end());
    const AxisSharding &of = owner->storage_sharding.axes.back(), &mine = v.storage_sharding.axes.back();
    if (of.placement != Placement::kShard) continue;
    CAPTURE(v.name);
    const bool first = of.sub_axis.dim == 0;
    CHECK((mine.placement == Placement::kShard) == (first == (v.state_name == "row")));
    if (mine.placement == Placement::kShard) CHECK(mine.sub_axis == SubAxis{0, of.sub_axis.outer, of.sub_axis.inner});
    (first ? rows : columns) += mine.placement == Placement::kShard;
  }
  CHECK(rows > 0);
  CHECK(columns > 0);
}
