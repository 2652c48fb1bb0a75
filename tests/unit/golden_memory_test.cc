// Memory of plans against the closed forms of the papers: Narayanan et al., 2021 (division by split and pipeline ways),
// Korthikanti et al., 2022 (activations), Rajbhandari et al., 2020 (ZeRO), Shazeer and Stern, 2018 (Adafactor).
#include "golden.h"

using namespace whale;
using namespace whale::golden;

namespace {

struct Policy {
  const char* name;
  Recompute recompute;
};
constexpr Policy kEverything{"none", Recompute::kNone}, kSelective{"selective", Recompute::kSelective},
    kFull{"full", Recompute::kFull};

double activations(Gpt s, const How& how, int64_t layers, int device = 0) {
  s.layers = layers;
  return static_cast<double>(memory(plan_of(s, how), device).activations);
}

// What a layer more adds to the activations of a device, in sbh: tables, logits and what is under way cancel.
double of_a_layer(const Gpt& s, const How& how, int64_t layers = 4) {
  const double more = activations(s, how, 2 * layers) - activations(s, how, layers);
  return more / static_cast<double>(layers) / s.sbh(how.micro_batches);
}

std::string precision_of(const How& how) { return how.precision == Precision::kFloat32 ? "f32" : "bf16"; }

}  // namespace

TEST_CASE("golden: parameters, gradients and state are divided by split and pipeline ways") {
  Gpt s;
  s.layers = 8, s.batch = 8;
  struct Case {
    const char* strategy;
    int t, p, replicas;
  };
  for (const auto& [strategy, t, p, replicas] :
       {Case{"split(8)", 8, 1, 1}, Case{"pipeline(4, micro_batches=4)", 1, 4, 1},
        Case{"pipeline(4, micro_batches=4) > split(4)", 4, 4, 1},
        Case{"replica(2) > pipeline(2, micro_batches=4) > split(4)", 4, 2, 2}}) {
    const Plan plan = plan_of(s, {.devices = t * p * replicas, .strategy = strategy, .micro_batches = 4});
    for (int stage = 0; stage < p; ++stage) {
      const MemoryClasses m = memory(plan, stage * t);
      const double tables =
          (stage == 0 ? s.table() + static_cast<double>(s.seq * s.dim) : 0) + (stage == p - 1 ? s.table() : 0);
      const double share = 4 * (8.0 / p * s.layer() + tables) / t;
      // The gradient at work: the largest is 4 h^2.
      const double under_way = 16 * static_cast<double>(s.dim * s.dim) / t;
      const std::string what = fmt::format("`{}`, stage {}", strategy, stage);
      row(what + ": parameters", "GB", share / 1e9, share / 1e9, static_cast<double>(m.parameters) / 1e9);
      row(what + ": state", "GB", 2 * share / 1e9, 2 * share / 1e9, static_cast<double>(m.state) / 1e9);
      row(what + ": gradients", "GB", share / 1e9, (share + under_way) / 1e9, static_cast<double>(m.gradients) / 1e9,
          "and the gradient that is added at the moment, at most 4 h^2 / t");
    }
  }
}

// A split's loss is a sum, for which updates wait: not in a bucket that is full at the end of the backward pass only.
TEST_CASE("golden: gradients of one micro-batch are used up as they are made, in a split too") {
  Gpt s;
  s.layers = 8;
  const int64_t largest = 16 * s.dim * s.dim / 8;
  CHECK(memory(plan_of(s, {.devices = 8, .strategy = "split(8)"}), 0).gradients < 2 * largest);
}

TEST_CASE("golden: a table that the head shares with the embedding is there once") {
  Gpt s;
  s.tied = true, s.batch = 4, s.vocab = 51200;
  const Plan plan = plan_of(s, {.devices = 2, .strategy = "pipeline(2, micro_batches=4)"});
  double together = 0;
  for (int d = 0; d < 2; ++d) together += static_cast<double>(memory(plan, d).parameters);
  row("`pipeline(2)`, tied: parameters of both stages", "GB", 4 * s.parameters() / 1e9, 4 * s.parameters() / 1e9,
      together / 1e9);
}

// Table 2 of the paper without the masks of dropout (2 sbh of a layer's 34 in 16 bit) and without scores (5 a s^2 b):
// masks are made again, and attention is fused.
TEST_CASE("golden: activations of a layer by recompute, split and precision") {
  struct Case {
    Policy policy;
    int t;
    double paper, form;  // sbh in 16 bit
    const char* why;
  };
  const char* again = "norms and gelu are made again too, not only the scores";
  for (const Case& c :
       {Case{kEverything, 1, 32, 32, ""},
        Case{kEverything, 8, 32.0 / 8, 4 + 28.0 / 8,
             "what a product's operands were gathered to is kept: 4 sbh not divided by t"},
        Case{kSelective, 1, 32, 20, again}, Case{kSelective, 8, 32.0 / 8, 24.0 / 8, "gelu is made again too"},
        Case{kFull, 1, 2, 2, ""},
        Case{kFull, 8, 2.0 / 8, 8.0 / 8, "results of collectives, and both norms' parts that are gathered again"}})
    for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
      const How how{.devices = c.t,
                    .strategy = fmt::format("split({})", c.t),
                    .recompute = c.policy.recompute,
                    .precision = precision};
      const double wide = precision == Precision::kFloat32 ? 2 : 1;
      row(fmt::format("activations of a layer, {}, t = {}, {}", c.policy.name, c.t, precision_of(how)), "sbh",
          wide * c.paper, wide * c.form, of_a_layer({}, how), c.why);
    }
}

// Where devices compute much while they move a byte, what recompute is asked for is done all the same.
TEST_CASE("golden: activations of a layer on fast devices, by recompute") {
  for (const char* cluster : {"1xA100-80GB", "1xH100-80GB"})
    for (const auto& [policy, paper, form, why] :
         {std::tuple{kEverything, 32.0, 80.0, "and 16-bit copies of the weights, 48 sbh of this width"},
          std::tuple{kSelective, 32.0, 20.0, "norms and gelu are made again too"}, std::tuple{kFull, 2.0, 2.0, ""}}) {
      const How how{.recompute = policy.recompute, .precision = Precision::kBFloat16, .cluster = cluster};
      row(fmt::format("activations of a layer, {}, {}, bf16", policy.name, cluster), "sbh", paper, form,
          of_a_layer({.dim = 4096, .heads = 32}, how), why);
    }
}

// Of a step of many samples the weights' parts are not put together for all of it: memory is worth more there than the
// messages that this saves.
TEST_CASE("golden: activations of a layer that is cut do not grow with the micro-batches") {
  for (const int64_t m : {16, 64, 256}) {
    const How how{.devices = 32,
                  .strategy = fmt::format("pipeline(4, micro_batches={}) > split(8)", m),
                  .micro_batches = m,
                  .recompute = kSelective.recompute,
                  .precision = Precision::kBFloat16};
    const Gpt shape{.batch = m};
    // Of the first stage, with four micro-batches in flight, and the 16-bit copy of the layer's weights.
    const double form = 4 * 24.0 / 8 + 2 * shape.layer() / 8 / shape.sbh(m);
    row(fmt::format("activations of a layer, selective, t = 8, bf16, p = 4, m = {}", m), "sbh", form, form,
        4 * of_a_layer(shape, how), "");  // one layer in four is the first stage's
  }
}

// Nor where devices compute much while they move a byte: products of few rows are slow there, and a gather that the
// gradient of a weight asks for anyway is no reason for them.
TEST_CASE("golden: activations of a layer that is cut do not grow with the micro-batches on fast devices") {
  for (const char* cluster : {"8xA100-80GB", "8xH100-80GB"}) {
    const How how{.strategy = "split(8)",
                  .micro_batches = 64,
                  .recompute = kSelective.recompute,
                  .precision = Precision::kBFloat16,
                  .cluster = cluster};
    const Gpt shape{.batch = 64};
    const double form = 24.0 / 8 + 2 * shape.layer() / 8 / shape.sbh(64);
    row(fmt::format("activations of a layer, selective, t = 8, bf16, m = 64, {}", cluster), "sbh", form, form,
        of_a_layer(shape, how));
  }
}

// Micro-batches in flight of a stage, in those of the whole stage: 1F1B min(m, p - i), GPipe m, interleaved
// min(m v, 2 (p - 1 - i) + (v - 1) p + 1) / v, ZB-H1 as 1F1B where what waits for a weight's gradient takes as much.
TEST_CASE("golden: micro-batches in flight by schedule") {
  constexpr int p = 4, m = 8, v = 2;
  Gpt s;
  s.batch = m;
  const char* apart = "each virtual stage has its own buffers: the sum of each one's most, not the most of their sum";
  const char* versions =
      "what one pass leaves to another has a place for each micro-batch between its first and last pass";
  struct Case {
    const char* schedule;
    std::vector<double> paper, form;
    const char* why;
  };
  const double layer = 64;  // sbh of a layer in f32
  for (const Case& c : {Case{"1f1b", {4, 3, 2, 1}, {4, 3, 2, 1}, ""}, Case{"gpipe", {8, 8, 8, 8}, {8, 8, 8, 8}, ""},
                        Case{"1f1b, warmup=[7,5,2,1]", {7, 5, 2, 1}, {7, 5, 2, 1}, ""},
                        Case{"interleaved, virtual_stages=2", {5.5, 4.5, 3.5, 2.5}, {6, 6, 5, 3}, apart},
                        Case{"zb_h1", {4, 4, 4, 4}, {4, 6.25, 6.25, 6.25}, versions}}) {
    const How how{.devices = p,
                  .strategy = fmt::format("pipeline({}, micro_batches={}, schedule={})", p, m, c.schedule),
                  .micro_batches = m};
    s.layers = p * v;
    const Plan few = plan_of(s, how);
    s.layers = 2 * p * v;
    const Plan many = plan_of(s, how);
    for (int i = 0; i < p; ++i) {
      const auto more = static_cast<double>(memory(many, i).activations - memory(few, i).activations);
      row(fmt::format("in flight, {}, p = 4, m = 8, stage {}", c.schedule, i), "micro-batches", c.paper[i], c.form[i],
          more / s.sbh(m) / layer / v, c.why);
    }
  }
}

// Of one device of n: state / n at 1, sums of gradients / n at 2, parameters / n at 3.
TEST_CASE("golden: ZeRO divides state, gradients and parameters, with accumulation too") {
  constexpr int n = 4;
  for (const int64_t micro_batches : {1, 4}) {
    Gpt s;
    s.batch = n * micro_batches, s.layers = 24, s.dim = 1024, s.heads = 16;
    const double psi = 4 * s.parameters() / 1e6, matrix = 16 * static_cast<double>(s.dim * s.dim) / 1e6;
    // Whole: the gradient that is made, and those of a bucket; beside them what becomes of the one before.
    const double under_way = matrix + 4.2 + matrix / n;
    double before = 0;
    for (int zero = 0; zero <= 3; ++zero) {
      const MemoryClasses m = memory(plan_of(s, {.devices = n, .micro_batches = micro_batches, .zero = zero}), 0);
      const auto line = [&](const char* of, double paper, double form, int64_t plan, const char* why = "") {
        row(fmt::format("ZeRO {}, n = 4, M = {}: {}", zero, micro_batches, of), "MB", paper, form,
            static_cast<double>(plan) / 1e6, why);
      };
      const double parameters = zero == 3 ? psi / n : psi, state = zero ? 2 * psi / n : 2 * psi,
                   gradients = zero >= 2 ? psi / n : psi;
      line("parameters", parameters, parameters, m.parameters);
      line("state", state, state, m.state);
      if (micro_batches > 1 && zero < 2)
        line("gradients", gradients, gradients, m.gradients);
      else if (micro_batches > 1)
        line("gradients", gradients, gradients + under_way, m.gradients,
             "and whole ones of a bucket, the last and the next");
      CHECK(m.gradients <= (micro_batches > 1 ? gradients : 0) * 1e6 + 2 * under_way * 1e6);
      const auto activations = static_cast<double>(m.activations);
      if (zero == 0) before = activations;
      // Gathered copies: of the block at work and the next one.
      CHECK(activations <= before + 2 * 4 * s.layer());
    }
  }
}

// Means of rows and of columns: r + c for a matrix [r, c].
TEST_CASE("golden: Adafactor's factors are divided as their parameter's state") {
  Gpt s;
  s.batch = 4, s.dim = 1024, s.heads = 16, s.optimizer = OptimizerKind::kAdafactor;
  const auto h = static_cast<double>(s.dim), v = static_cast<double>(s.vocab), seq = static_cast<double>(s.seq);
  const double matrices = static_cast<double>(s.layers) * (4 + 2 + 5 + 5) * h + 2 * (v + h) + seq + h,
               vectors = static_cast<double>(s.layers) * 13 * h + 2 * h, whole = 4 * (matrices + vectors) / 1e3;
  for (int zero = 0; zero <= 3; ++zero) {
    const double form = zero ? whole / 4 : whole;
    row(fmt::format("Adafactor, ZeRO {}, n = 4: state", zero), "kB", form, form,
        static_cast<double>(memory(plan_of(s, {.devices = 4, .zero = zero}), 0).state) / 1e3);
  }
}

// Falling at each level, every class by itself never above that of the level before but for gathered copies.
TEST_CASE("golden: ZeRO 0, 1, 2, 3 on gpt d256 with 4 devices and 4 micro-batches hold less and less") {
  Gpt s;
  s.batch = 16, s.layers = 4, s.dim = 256, s.heads = 4, s.seq = 128, s.vocab = 256;
  int64_t last = INT64_MAX;
  for (int zero = 0; zero <= 3; ++zero) {
    CAPTURE(zero);
    const int64_t together = memory(plan_of(s, {.devices = 4, .micro_batches = 4, .zero = zero}), 0).total();
    CHECK(together < last);
    last = together;
  }
}
