#include "validate/amp.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/progress.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/left_out.h"
#include "validate/ranking.h"
#include "validate/step.h"

namespace whale {
namespace {

const std::vector<std::string_view> kColumns{"experiment", "cuts", "micro_batch", "tp", "dp", "pp", "measured_s"};

// Fitted by tools/fit/steps.py amp: of T4s, and of V100s.
constexpr Stack kT4{
#include "validate/amp_t4_fitted.inc"
};
constexpr Stack kV100{
#include "validate/amp_v100_fitted.inc"
};

// What the runs' scripts say: 4 nodes of 4; entries of `cuts`: the embedding and a cast, 24 blocks, a cast, a norm, the
// classifier and the loss.
constexpr int64_t kDevices = 16, kNode = 4, kEntries = 30, kFirstBlock = 2, kBlocks = 24;
constexpr GptSizes kSizes{
    .layers = kBlocks, .hidden = 1024, .heads = 16, .sequence = 1024, .vocabulary = 52256, .batch = 32};
const std::map<std::string, std::vector<std::string>> kExperiments{
    {"homogeneous", {"T4"}}, {"het_cluster", {"V100-16GB", "V100-16GB", "V100-16GB", "T4"}}};

Stack stack_of(const std::string& type) { return type == "T4" ? kT4 : kV100; }

struct Row {
  std::string experiment;
  StepRun run;
  double seconds = 0;
};

std::vector<int64_t> numbers_of(const Csv& csv, size_t row) {
  const std::string& cell = csv.text(row, "cuts");
  std::vector<int64_t> out;
  for (const char *at = cell.data(), *end = at + cell.size(); at <= end; ++at) {
    int64_t n = 0;
    const auto [next, error] = std::from_chars(at, end, n);
    if (error != std::errc{} || (next < end && *next != '|') || (!out.empty() && n <= out.back()))
      throw invalid("{}, row {}: column 'cuts' is '{}', expected ascending numbers, joined by |", csv.path, row + 1,
                    cell);
    out.push_back(n);
    at = next;
  }
  return out;
}

// Nothing: a run that failed, or of a model that is not known here, which is counted.
std::optional<Row> row_of(const Csv& csv, size_t row, LeftOut& left_out) {
  Row out{.experiment = csv.text(row, "experiment"), .run = {}, .seconds = 0};
  const auto experiment = kExperiments.find(out.experiment);
  const bool failed = csv.text(row, "measured_s") == "inf", known = experiment != kExperiments.end();
  if (failed || !known) {
    left_out.add(failed ? "of a run that failed" : fmt::format("of experiment {}", out.experiment));
    return std::nullopt;
  }
  out.seconds = csv.number(row, "measured_s");
  const int64_t t = csv.whole(row, "tp"), d = csv.whole(row, "dp"), p = csv.whole(row, "pp"),
                micro = csv.whole(row, "micro_batch");
  if (t < 1 || d < 1 || p < 1 || t > kNode || t * d * p != kDevices)
    throw invalid("{}, row {}: {} x {} x {} devices, expected {} of which {} are in a node", csv.path, row + 1, t, d, p,
                  kDevices, kNode);
  if (micro < 1 || kSizes.batch % (micro * d))
    throw invalid("{}, row {}: micro-batches of {} on {} replicas do not make a batch of {}", csv.path, row + 1, micro,
                  d, kSizes.batch);
  const std::vector<int64_t> cuts = numbers_of(csv, row);
  if (std::ssize(cuts) != p + 1 || cuts.front() != 0 || cuts.back() != kEntries)
    throw invalid("{}, row {}: column 'cuts' is '{}', expected {} numbers from 0 to {}", csv.path, row + 1,
                  csv.text(row, "cuts"), p + 1, kEntries);
  for (size_t k = 0; k + 1 < cuts.size(); ++k) {
    const auto block = [](int64_t entry) { return std::clamp<int64_t>(entry - kFirstBlock, 0, kBlocks); };
    out.run.cuts.layers.push_back(block(cuts[k + 1]) - block(cuts[k]));
  }
  out.run.sizes = kSizes;
  out.run.cuts.replicas = d, out.run.cuts.ways = t, out.run.cuts.micro_batches = kSizes.batch / (micro * d);
  out.run.devices_of_node = kNode;
  out.run.types = experiment->second;
  out.run.repeat_blocks = true;
  return out;
}

std::vector<Row> rows_of(const std::string& path, LeftOut& left_out) {
  const Csv csv = read_csv(path);
  std::vector<Row> out;
  for (size_t r = 0; r < csv.rows.size(); ++r)
    if (std::optional<Row> row = row_of(csv, r, left_out)) out.push_back(std::move(*row));
  if (out.empty()) throw invalid("{}: no row is of a run that ended; known are het_cluster and homogeneous", path);
  return out;
}

}  // namespace

bool is_amp(const std::string& path) { return has_columns(path, kColumns); }

Json validate_amp(const std::string& path, const ValidateOptions&) {
  LeftOut left_out;
  const std::vector<Row> rows = rows_of(path, left_out);
  Progress done(rows.size(), "row");
  Errors errors;
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> of;  // predicted, measured
  Json list = Json::array();
  for (const Row& row : rows) {
    const double predicted = seconds_of(plan_of(row.run), stack_of);
    errors.add({row.experiment}, predicted, row.seconds);
    of[row.experiment].first.push_back(predicted), of[row.experiment].second.push_back(row.seconds);
    list.push_back({{"experiment", row.experiment}, {"measured_s", row.seconds}, {"predicted_s", predicted}});
    done.add();
  }
  Json out;
  errors.write(out);
  left_out.write(out);
  std::string text =
      left_out.line(rows.size()) + errors.table() + fmt::format("\n{:<48} {:>10} {:>10}\n", "", "Spearman", "regret");
  for (const auto& [experiment, both] : of) {
    const double spearman = spearman_of(both.first, both.second), regret = regret_of(both.first, both.second);
    out["groups"][experiment]["spearman"] = spearman, out["groups"][experiment]["regret"] = regret;
    text += fmt::format("{:<48} {:>10.3f} {:>10.3f}\n", experiment, spearman, regret);
  }
  out["steps"] = std::move(list);
  out["text"] = text;
  return out;
}

Json work_of_amp(const std::string& path, const ValidateOptions&) {
  LeftOut left_out;
  const std::vector<Row> rows = rows_of(path, left_out);
  Progress done(rows.size(), "row");
  Json list = Json::array();
  for (const Row& row : rows) {
    list.push_back(
        {{"measured_s", row.seconds}, {"experiment", row.experiment}, {"classes", work_json(plan_of(row.run))}});
    done.add();
  }
  return {{"rows", rows.size()},
          {"rows_left_out", left_out.rows()},
          {"work", std::move(list)},
          {"text", "the work of each row is in the JSON\n"}};
}

}  // namespace whale
