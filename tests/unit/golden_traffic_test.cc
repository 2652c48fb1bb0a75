// What plans move in a step against the closed forms, M micro-batches: in elements of the parameters (a sum counts
// twice: scattered and gathered), of activations for splits and pipelines.
#include <map>

#include "golden.h"

using namespace whale;
using namespace whale::golden;

namespace {

// Elements by the kind of axis that they cross, of one device in a step; "stage" between stages.
std::map<std::string, double> moved(const Plan& plan, int device) {
  const Entry& train = plan.entries[0];
  const Program& p = train.programs[train.rows[device].program];
  std::map<std::string, double> out;
  const auto elements = [&](const BufferIds& list) {
    double n = 0;
    for (const BufferId b : list)
      if (b != kNone) n += static_cast<double>(element_count(p.buffers[b].dims));
    return n;
  };
  for (const ScheduleRow& row : p.schedule)
    for (const Instruction& i : p.segments[row.segment].instructions) {
      if (i.kind() == InstructionKind::kSend)
        for (const Transfer& t : train.links[i.link()].transfers) {
          if (t.from != device || t.to == device) continue;
          double n = 1;
          for (const Interval& interval : t.source) n *= static_cast<double>(interval.size());
          out["stage"] += n;
        }
      if (i.kind() != InstructionKind::kCollective) continue;
      double& n = out[plan.groups[i.group()].axis];
      n += i.op() == OpCode::k_all_reduce       ? 2 * elements(i.in)
           : i.op() == OpCode::k_reduce_scatter ? elements(i.in)
                                                : elements(i.out);
    }
  return out;
}

}  // namespace

TEST_CASE("golden: traffic of replicas is 2 of the parameters, with ZeRO 2 M + 1, with ZeRO 3 3 M") {
  constexpr int n = 4;
  for (const int64_t m : {1, 4})
    for (int zero = 0; zero <= 3; ++zero) {
      Gpt s;
      s.batch = n * m, s.dim = 1024, s.heads = 16;
      const double plan =
          moved(plan_of(s, {.devices = n, .micro_batches = m, .zero = zero}), 0)["replica"] / s.parameters();
      const double form = static_cast<double>(zero == 3 ? 3 * m : zero == 2 ? m + 1 : 2);
      row(fmt::format("ZeRO {}, M = {}", zero, m), "parameters", form, form, plan);
    }
}

// On devices that are fast beside their links a split of long batches cuts rows and gathers weights, of which each
// device stores a part: then every device of a split has a term of every gradient. They sum them to their parts first.
TEST_CASE("golden: replicas of a split move a part of the gradients, whatever the split cuts") {
  constexpr int64_t m = 8, ways = 8;
  Gpt s;
  s.layers = 2, s.batch = 256, s.seq = 1024, s.dim = 4096, s.heads = 32, s.vocab = 8192;
  for (const int zero : {0, 1, 2, 3}) {
    CompileOptions options;
    options.strategy = "replica(4) > split(8)", options.accumulation = m, options.zero = zero;
    options.precision = Precision::kBFloat16, options.recompute = Recompute::kFull;
    const Plan plan = compile(graph_of(s), parse_devices("4 nodes of 8xA100-80GB", {0}), options);
    const double form = static_cast<double>(zero == 3 ? 3 * m : zero == 2 ? m + 1 : 2) / ways;
    row(fmt::format("replica(4) > split(8), rows cut, ZeRO {}, M = {}", zero, m), "parameters", form, form,
        moved(plan, 0)["replica"] / s.parameters());
    if (zero >= 2) CHECK(memory(plan, 0).gradients < 1.4 * 4 * s.parameters() / (ways * 4) + 64e6);
  }
}

// Where a split leaves weights whole on each device, each still sums a part of their gradients over slow links.
TEST_CASE("golden: replicas of a split move a part of the gradients of weights that lie whole, too") {
  Gpt s;
  s.batch = 32, s.seq = 512, s.dim = 1024, s.heads = 16, s.vocab = 8192;
  const Plan plan = plan_of(s, {.strategy = "replica(2) > split(8)", .cluster = "2 nodes of 8xH100-80GB, 25Gb/s"});
  CHECK(memory(plan, 0).parameters > 2 * 4 * s.parameters() / 8);  // some of them do
  row("replica(2) > split(8), weights whole, M = 1", "parameters", 2.0 / 8, 2.0 / 8,
      moved(plan, 0)["replica"] / s.parameters());
}

TEST_CASE("traffic of ZeRO's levels is that of the closed forms with every optimizer, clipped or not") {
  constexpr int n = 4;
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kLamb,
                                   OptimizerKind::kAdagrad, OptimizerKind::kAdafactor})
    for (const double clip_norm : {0.0, 1.0})
      for (const int64_t m : {1, 4})
        for (int zero = 0; zero <= 3; ++zero) {
          CAPTURE(static_cast<int>(kind));
          CAPTURE(clip_norm);
          CAPTURE(m);
          CAPTURE(zero);
          Gpt s;
          s.batch = n * m, s.dim = 512, s.heads = 8, s.layers = 2, s.seq = 128;
          s.optimizer = kind, s.clip_norm = clip_norm;
          const double plan =
              moved(plan_of(s, {.devices = n, .micro_batches = m, .zero = zero}), 0)["replica"] / s.parameters();
          const double form = static_cast<double>(zero == 3 ? 3 * m : zero == 2 ? m + 1 : 2);
          CHECK(plan == doctest::Approx(form).epsilon(0.05));
        }
}

TEST_CASE("golden: traffic of updates in slices, where state is whole, is that of the state too") {
  const How how{.devices = 4, .update = UpdateForm::kSliced};
  const double plan = moved(plan_of({.batch = 4, .dim = 1024, .heads = 16}, how), 0)["replica"];
  row("ZeRO 0, M = 1, updates in slices", "parameters", 2, 4, plan / Gpt{.dim = 1024}.parameters(),
      "whole copies of both moments are gathered; null and cuda devices choose it by cost");
}

// Megatron's split of a block: four sums of its activations, two in each pass.
TEST_CASE("golden: traffic of a split block") {
  struct Case {
    Recompute recompute;
    double paper, form;
    const char* name;
    const char* why;
  };
  for (const Case& c : {Case{Recompute::kNone, 8, 8, "none", ""},
                        Case{Recompute::kSelective, 8, 10, "selective", "both gathered operands once more"},
                        Case{Recompute::kFull, 12, 10, "full", "sums are kept, gathered operands made again"}}) {
    const auto of = [&](int64_t layers) {
      Gpt s;
      s.layers = layers;
      return moved(plan_of(s, {.devices = 8, .strategy = "split(8)", .recompute = c.recompute}), 0)["split"];
    };
    row(fmt::format("split(8), a block, {}", c.name), "sbh", c.paper, c.form, (of(8) - of(4)) / 4 / Gpt{}.sbh(), c.why);
  }
}

// What several products read has as many gradients that are terms of sums: these are added, and their sum goes once.
TEST_CASE("golden: traffic of a split block whose queries, keys and values are products of their own") {
  const auto of = [&](int64_t layers) {
    Gpt s;
    s.layers = layers, s.apart = true;
    return moved(plan_of(s, {.strategy = "split(8)", .cluster = "8xA100-80GB"}), 0)["split"];
  };
  row("split(8), a block, queries, keys and values apart, A100", "sbh", 8, 8, (of(8) - of(4)) / 4 / Gpt{}.sbh());
}

TEST_CASE("golden: traffic of a pipeline is an activation and its gradient for each micro-batch and boundary") {
  constexpr int64_t m = 8;
  Gpt s;
  s.batch = m, s.layers = 8;
  for (const int t : {1, 4}) {
    const std::string strategy = fmt::format("pipeline(4, micro_batches=8){}", t > 1 ? " > split(4)" : "");
    const Plan plan = plan_of(s, {.devices = 4 * t, .strategy = strategy, .micro_batches = m});
    double all = 0;
    for (int d = 0; d < 4 * t; ++d) all += moved(plan, d)["stage"];
    // Each device of a split hands its part of the sequence on.
    row(fmt::format("`{}`", strategy), "sbh", 2.0 * 3 * m, 2.0 * 3 * m, all / s.sbh(m));
  }
}
