// Measured training steps: what is planned for a row, its work against closed forms, its time, and broken files.
#include <doctest/doctest.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "caught.h"
#include "plan/figures.h"
#include "validate/ranking.h"
#include "validate/step.h"
#include "validate/validate.h"

namespace whale {
namespace {

constexpr const char* kMegatron =
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,data "
    "parallelism,pipeline parallelism,iteration time (ms)\n";
constexpr const char* kAmp = "experiment,cuts,micro_batch,tp,dp,pp,amp_predicted,measured_s\n";

class File {
 public:
  explicit File(const std::string& content)
      : path_(std::filesystem::temp_directory_path() / ("whale-steps-" + random_id() + ".csv")) {
    std::ofstream(path_) << content;
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string message_of_file(const std::string& content, const std::string& form = "") {
  const File file(content);
  return message_of([&] { validate(file.path(), {.form = form, .profiles = {}}); }, {Code::kInvalidArgument});
}

StepRun small(int64_t ways, int64_t stages, bool repeat) {
  StepRun run;
  run.sizes = {.layers = 4, .hidden = 64, .heads = 4, .sequence = 32, .vocabulary = 128, .batch = 8};
  run.cuts.layers.assign(static_cast<size_t>(stages), 4 / stages);
  run.cuts.ways = ways, run.cuts.micro_batches = 4;
  run.types = {"A100-80GB"};
  run.repeat_blocks = repeat;
  return run;
}

// Of all devices of the first program of each stage, by the part of the step.
std::array<StackWork, 4> work_of_parts(const Plan& plan) {
  const Entry& entry = plan.entries[0];
  const WorkOf work = work_of(plan, entry);
  std::array<StackWork, 4> out;
  for (const DeviceRow& row : entry.rows)
    for (const Segment& s : entry.programs[row.program].segments)
      for (const StackRun& run : runs_of(plan, s))
        for (size_t k = run.begin; k < run.end; ++k)
          out[static_cast<size_t>(run.part)] += work(s.instructions[k], row.device);
  return out;
}

}  // namespace

TEST_CASE("steps: the work of a GPT is what the closed forms say, however it is cut") {
  for (const int64_t ways : {1, 2})
    for (const int64_t stages : {1, 2})
      for (const bool repeat : {false, true}) {
        CAPTURE(ways);
        CAPTURE(stages);
        CAPTURE(repeat);
        const StepRun run = small(ways, stages, repeat);
        const auto work = work_of_parts(plan_of(run));
        const auto& s = run.sizes;
        // Narayanan et al., 2021: of a micro-batch, 24 b s h^2 + 4 b s^2 h a layer, 2 b s h V for the classifier.
        const auto tokens = static_cast<double>(s.batch / run.cuts.micro_batches * s.sequence);
        const auto h = static_cast<double>(s.hidden), layers = static_cast<double>(s.layers);
        const double blocks = layers * tokens * (24 * h * h + 4 * static_cast<double>(s.sequence) * h);
        const double classifier = 2 * tokens * h * static_cast<double>(s.vocabulary);
        CHECK(work[1].flops == doctest::Approx(blocks + classifier));
        CHECK(work[2].flops == doctest::Approx(2 * (blocks + classifier) + (repeat ? blocks : 0)));
        CHECK(work[0].flops == 0);
        CHECK((work[1].messages > 0) == (stages > 1));
        CHECK((work[1].inside_bytes > 0) == (ways > 1 || stages > 1));
        CHECK(work[1].network_bytes == 0);
      }
}

TEST_CASE("steps: a pipeline of devices that do nothing but compute takes what the closed form of 1F1B says") {
  Stack stack;  // all but products costs nothing
  stack.product_edge = stack.issue_seconds = stack.meeting_seconds = stack.collective_seconds = stack.message_seconds =
      0;
  stack.memory_bytes = stack.inside_bytes = stack.network_bytes = 1e30;
  const auto of = [&](const StepRun& run) {
    return seconds_of(plan_of(run), [&](const std::string&) { return stack; });
  };
  StepRun one = small(1, 1, false), two = small(1, 2, false);
  one.sizes.vocabulary = two.sizes.vocabulary = 8;  // a classifier of next to nothing: stages are alike
  const double alone = of(one), both = of(two);
  const double micro = alone / 4;  // of a micro-batch on one device
  CHECK(both == doctest::Approx((4 + 1) * micro / 2).epsilon(0.01));
}

TEST_CASE("steps: where the host is slow, a step takes what it issues") {
  Stack fast, slow;
  slow.issue_seconds = 1, slow.meeting_seconds = 0;
  const Plan plan = plan_of(small(1, 1, false));
  const auto work = work_of_parts(plan);
  const double issued = 4 * (work[1].issued + work[2].issued);
  CHECK(seconds_of(plan, [&](const std::string&) { return slow; }) == doctest::Approx(issued).epsilon(0.01));
  CHECK(seconds_of(plan, [&](const std::string&) { return fast; }) < issued / 100);
}

TEST_CASE("steps: no figure of a stack that gets worse makes a step faster") {
  for (const int64_t ways : {1, 2}) {
    const Plan plan = plan_of(small(ways, 2, true));
    const double before = seconds_of(plan, [](const std::string&) { return Stack{}; });
    for (size_t k = 0; k < kFiguresOfStack; ++k) {
      Stack worse;
      size_t at = 0;
      each_figure_of_stack(worse, [&](const char* name, double& figure) {
        if (at++ != k) return;
        CAPTURE(name);
        figure *= std::string_view(name).ends_with("bytes") || std::string_view(name).ends_with("flops") ? 0.5 : 2;
      });
      CHECK(seconds_of(plan, [&](const std::string&) { return worse; }) >= before * (1 - 1e-9));
    }
  }
}

// Rows of vTrain's validation set (MICRO'24) and of AMP's trials (NeurIPS'22).
TEST_CASE("steps: rows that were measured") {
  const File single(std::string(kMegatron) +
                    "8,16,8,2048,16,24,1024,8,1,1,325.49918\n8,64,2,1024,16,24,1024,1,8,1,359.529283\n"
                    "8,16,1,2048,16,20,1024,4,1,2,560.593246\n2,16,8,2048,16,24,1024,2,1,1,548.800003\n");
  const Json one = validate(single.path(), {});
  CHECK(one["form"] == "megatron");
  CHECK(one["rows"] == 4);
  CHECK(one["mean_absolute_error_percent"].get<double>() < 10);
  const File trials(std::string(kAmp) +
                    "homogeneous,0|30,1,1,16,1,1.2443,1.32\nhomogeneous,0|15|30,1,1,8,2,1.2665,1.28\n"
                    "homogeneous,0|8|14|20|30,4,4,1,4,4.622,2.24\nhet_model,0|56,1,1,16,1,1.7,1.9\n"
                    "homogeneous,0|30,2,1,16,1,1.2443,inf\n");
  const Json amp = validate(trials.path(), {});
  CHECK(amp["form"] == "amp");
  CHECK(amp["rows"] == 3);
  CHECK(amp["groups"]["homogeneous"]["mean_absolute_error_percent"].get<double>() < 10);
  CHECK(amp["groups"]["homogeneous"]["regret"].get<double>() == doctest::Approx(1));
}

TEST_CASE("steps: a step of layers whose times are known takes what they say") {
  const auto folder = std::filesystem::temp_directory_path() / ("whale-sailor-" + random_id());
  std::filesystem::create_directory(folder);
  {
    std::ofstream layers(folder / "layer_times.csv");
    layers << "model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s\n";
    for (int l = 0; l < 26; ++l)
      for (const char* of : {"GH-96,1,1,", "RTX-3090,1,1,", "RTX-3090,1,2,"})
        layers << "OPT-350," << of << l << ",0.01,0.02,0.003\n";
  }
  const std::string columns = "model,pp,dp,tp,micro_batch,global_batch,step_s,layers_per_stage,devices_stage_replica\n";
  const auto of = [&](const std::string& row) {
    const File file(columns + row);
    return validate(file.path(), {.form = {}, .profiles = folder.string()});
  };
  const Json one = of("OPT-350,1,1,1,1,2,1.6,26,GH-96x1\n");
  CHECK(one["form"] == "sailor");
  CHECK(one["steps"][0]["predicted_s"].get<double>() == doctest::Approx(2 * 26 * 0.03 + 26 * 0.003).epsilon(1e-6));
  CHECK(!one.contains("memory"));
  // A message of 8.4 MB at 0.115 GB/s holds the later stage twice for each micro-batch: it waits for it, and sends
  // another back. Cut into two of 4 MiB, which NCCL takes at once, it holds nobody; but two micro-batches under way go
  // around in two stages and two messages.
  const auto pipeline = [&](int ways) {
    return of(fmt::format("OPT-350,2,1,{0},1,8,5,13|13,RTX-3090x{0}|RTX-3090x{0}\n", ways))["steps"][0]["predicted_s"]
        .get<double>();
  };
  const double stage = 13 * 0.03, message = 4.0 * 2048 * 1024 / 0.115e9, update = 13 * 0.003;
  CHECK(pipeline(1) > 8 * (stage + 2 * message) + stage + update);
  CHECK(pipeline(1) < 8 * (stage + 2 * message) + stage + update + 4 * message);
  CHECK(pipeline(2) > 8 * (stage + message) + stage + update - message);
  CHECK(pipeline(2) < 8 * (stage + message) + stage + update + message);
  const auto refused = [&](const std::string& row) { return message_of([&] { of(row); }, {Code::kInvalidArgument}); };
  CHECK(has(refused("GPT-5,1,1,1,1,2,1.6,26,GH-96x1\n"), "expected OPT-350 or GPT-Neo-2.7"));
  CHECK(has(refused("OPT-350,1,1,1,1,2,1.6,25,GH-96x1\n"), "expected 26 layers together"));
  CHECK(has(refused("OPT-350,1,1,1,2,2,1.6,26,GH-96x1\n"), "there are no times of layer 0"));
  CHECK(has(refused("OPT-350,1,2,1,1,2,1.6,26,GH-96x1\n"), "expected 2 replicas a stage"));
  CHECK(has(refused("OPT-350,1,1,1,1,2,1.6,26,TPUx1\n"), "expected GH-96"));
  CHECK(has(refused("OPT-350,2,1,1,1,2,1.6,26,GH-96x1\n"), "expected 2 numbers"));
  std::filesystem::remove_all(folder);
}

// Sailor's own count of what a layer keeps (llm_info.json, SOSP'25), in elements a sample: inputs and outputs of its
// products, and a softmax.
TEST_CASE("steps: the memory of a run is what a closed form says") {
  const auto folder = std::filesystem::temp_directory_path() / ("whale-sailor-" + random_id());
  std::filesystem::create_directory(folder);
  {
    std::ofstream layers(folder / "layer_times.csv");
    layers << "model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s\n";
    for (int l = 0; l < 26; ++l)
      for (const int micro : {1, 4}) layers << "OPT-350,GH-96," << micro << ",4," << l << ",0.01,0.02,0.003\n";
  }
  const File file(
      "model,pp,dp,tp,micro_batch,global_batch,step_s,max_mem_bytes,layers_per_stage,devices_stage_replica\n"
      "OPT-350,1,1,4,1,4,1,19e9,26,GH-96x4\nOPT-350,1,1,4,4,16,1,19e9,26,GH-96x4\n");
  const Json out = validate(file.path(), {.form = {}, .profiles = folder.string()});
  CHECK(out["memory"]["rows"] == 2);
  const double small = out["steps"][0]["predicted_bytes"].get<double>(),
               large = out["steps"][1]["predicted_bytes"].get<double>();
  const double kept = 4 * (24 * 27.4e6 + 54.5e6), logits = 4.0 * 2048 * 50272 / 4;
  CHECK(large - small == doctest::Approx(3 * (1.05 * kept + 2 * logits)).epsilon(0.1));
  CHECK(small == doctest::Approx(4.1e9 + 24 * 103.7e6 + 1.05 * kept + 2 * logits).epsilon(0.1));
  std::filesystem::remove_all(folder);
}

TEST_CASE("steps: attention that keeps its scores keeps them") {
  StepRun run = small(1, 1, false);
  run.sizes.sequence = 512;
  const auto activations = [](const StepRun& r) {
    const Plan plan = plan_of(r);
    return static_cast<double>(memory_of(plan, plan.entries[0], 0).device.activations);
  };
  const double fused = activations(run);
  run.sizes.keeps_scores = true;
  const double scores = 4.0 * 2 * 4 * 512 * 512;  // heads, samples of a micro-batch
  const double more = activations(run) - fused;
  CHECK(more > 0.9 * scores * 2);  // 16 bits: two bytes an element, of four layers
  CHECK(more < 1.6 * scores * 4);
}

TEST_CASE("steps: replicas have equal shares, on unlike devices too") {
  StepRun run = small(1, 1, false);
  run.cuts.replicas = 2, run.cuts.micro_batches = 2, run.devices_of_node = 1;
  run.types = {"V100-16GB", "T4"};
  const Plan plan = plan_of(run);
  REQUIRE(plan.entries[0].rows.size() == 2);
  for (const DeviceRow& row : plan.entries[0].rows) CHECK(samples_of(plan.entries[0], row) == 4);
}

TEST_CASE("steps: ranks") {
  CHECK(spearman_of({1, 2, 3}, {10, 20, 30}) == doctest::Approx(1));
  CHECK(spearman_of({3, 2, 1}, {10, 20, 30}) == doctest::Approx(-1));
  CHECK(spearman_of({1, 2, 3, 4, 5}, {2, 1, 4, 3, 5}) == doctest::Approx(0.8));
  CHECK(regret_of({2, 1, 3}, {4, 5, 6}) == doctest::Approx(1.25));
}

TEST_CASE("steps: broken files") {
  const std::string columns = kMegatron;
  CHECK(has(message_of_file(columns + "8,16,8,2048,16,24,1024,8,1,2,325\n"), "8 x 1 x 2 devices are not 8"));
  CHECK(has(message_of_file(columns + "8,16,8,2048,16,24,1024,8,1,1,nan\n"), "'iteration time (ms)' is 'nan'"));
  CHECK(has(message_of_file(columns + "8,16,8,2048,16,24,1024,8,1,1,0\n"), "expected a time"));
  CHECK(has(message_of_file(columns + "8,15,8,2048,16,24,1024,8,1,1,3\n"), "is no divisor of 15"));
  CHECK(has(message_of_file(columns + "0,16,8,2048,16,24,1024,8,1,1,3\n"), "'# GPUs' is 0"));
  CHECK(has(message_of_file(columns), "has no rows"));
  const std::string trials = kAmp;
  CHECK(has(message_of_file(trials + "homogeneous,0|30,8,1,1,4,1,1\n"), "expected 16 of which 4 are in a node"));
  CHECK(has(message_of_file(trials + "homogeneous,0|x|30,1,1,8,2,1,1\n"), "expected ascending numbers"));
  CHECK(has(message_of_file(trials + "homogeneous,0|31,1,1,16,1,1,1\n"), "expected 2 numbers from 0 to 30"));
  CHECK(has(message_of_file(trials + "homogeneous,0|30,5,1,16,1,1,1\n"), "do not make a batch of 32"));
  CHECK(has(message_of_file(trials + "het_model,0|56,1,1,16,1,1,1\n"), "no row is of a run that ended"));
}

}  // namespace whale
