#include "validate/megatron.h"

#include <map>
#include <vector>

#include "base/error.h"
#include "base/progress.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/step.h"

namespace whale {
namespace {

constexpr const char *kGpus = "# GPUs", *kBatch = "global batch", *kMicro = "micro batch", *kHidden = "hidden size",
                     *kHeads = "attention heads", *kLayers = "# layers", *kSequence = "sequence length",
                     *kTensor = "tensor parallelism", *kData = "data parallelism", *kPipeline = "pipeline parallelism",
                     *kTime = "iteration time (ms)";
const std::vector<std::string_view> kColumns{kGpus,     kBatch,  kMicro, kHidden,   kHeads, kLayers,
                                             kSequence, kTensor, kData,  kPipeline, kTime};

// Fitted by tools/fit/steps.py megatron.
constexpr Stack kStack{
#include "validate/megatron_fitted.inc"
};

constexpr int64_t kNode = 8;
// Padded to a multiple of 128 for each device of a split; as it is where nothing is split on one node.
constexpr int64_t kVocabulary = 50257, kPadding = 128;

struct Row {
  StepRun run;
  double seconds = 0;
  std::string group;
};

Row row_of(const Csv& csv, size_t row) {
  const auto count = [&](const char* column) {
    const int64_t n = csv.whole(row, column);
    if (n < 1 || n > 1'000'000)
      throw invalid("{}, row {}: column '{}' is {}, expected 1 to 1000000", csv.path, row + 1, column, n);
    return n;
  };
  const auto divides = [&](int64_t a, int64_t b, const char* what) {
    if (b % a) throw invalid("{}, row {}: {} is no divisor of {}: {}", csv.path, row + 1, a, b, what);
    return b / a;
  };
  const int64_t gpus = count(kGpus), t = count(kTensor), d = count(kData), p = count(kPipeline);
  if (t * d * p != gpus) throw invalid("{}, row {}: {} x {} x {} devices are not {}", csv.path, row + 1, t, d, p, gpus);
  if (gpus > 65536) throw invalid("{}, row {}: {} devices, expected at most 65536", csv.path, row + 1, gpus);
  Row out;
  GptSizes& s = out.run.sizes;
  s = {.layers = count(kLayers),
       .hidden = count(kHidden),
       .heads = count(kHeads),
       .sequence = count(kSequence),
       .batch = count(kBatch)};
  divides(s.heads, s.hidden, "heads of the hidden size");
  divides(t, s.heads, "tensor parallelism of the heads");
  const bool one_node = gpus <= kNode;
  const int64_t unit = kPadding * t;
  s.vocabulary = one_node && t == 1 ? kVocabulary : (kVocabulary + unit - 1) / unit * unit;
  GptCuts& c = out.run.cuts;
  c.layers.assign(static_cast<size_t>(p), divides(p, s.layers, "stages of the layers"));
  c.replicas = d, c.ways = t;
  c.micro_batches = divides(d * count(kMicro), s.batch, "replicas of micro-batches of the batch");
  out.run.devices_of_node = kNode;
  out.run.types = {"A100-80GB"};
  out.run.repeat_blocks = !one_node;
  out.seconds = csv.number(row, kTime) / 1e3;
  if (!(out.seconds > 0)) throw invalid("{}, row {}: column '{}' is 0, expected a time", csv.path, row + 1, kTime);
  out.group = one_node ? "one node" : fmt::format("{} devices", gpus);
  return out;
}

std::vector<Row> rows_of(const std::string& path) {
  const Csv csv = read_csv(path);
  std::vector<Row> out;
  for (size_t r = 0; r < csv.rows.size(); ++r) out.push_back(row_of(csv, r));
  return out;
}

}  // namespace

bool is_megatron(const std::string& path) { return has_columns(path, kColumns); }

Json validate_megatron(const std::string& path, const ValidateOptions&) {
  const std::vector<Row> rows = rows_of(path);
  Progress done(rows.size(), "row");
  Errors errors;
  std::vector<std::pair<StepRun, double>> known;
  Json list = Json::array();
  for (const Row& row : rows) {
    auto at = std::ranges::find(known, row.run, &std::pair<StepRun, double>::first);
    if (at == known.end())
      at =
          known.insert(known.end(), {row.run, seconds_of(plan_of(row.run), [](const std::string&) { return kStack; })});
    const GptCuts& c = row.run.cuts;
    errors.add({row.group, fmt::format("split {}", c.ways), fmt::format("pipeline {}", c.layers.size())}, at->second,
               row.seconds);
    list.push_back({{"measured_s", row.seconds}, {"predicted_s", at->second}});
    done.add();
  }
  Json out;
  errors.write(out);
  out["steps"] = std::move(list);
  out["text"] = errors.table();
  return out;
}

Json work_of_megatron(const std::string& path, const ValidateOptions&) {
  const std::vector<Row> rows = rows_of(path);
  Progress done(rows.size(), "row");
  Json list = Json::array();
  for (const Row& row : rows) {
    list.push_back({{"measured_s", row.seconds}, {"classes", work_json(plan_of(row.run))}});
    done.add();
  }
  return {{"rows", rows.size()}, {"work", std::move(list)}, {"text", "the work of each row is in the JSON\n"}};
}

}  // namespace whale
