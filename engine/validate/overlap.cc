#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "base/error.h"
#include "cost/interference.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/gpu_forms.h"
#include "validate/left_out.h"

namespace whale {
namespace {

constexpr std::array<std::string_view, kLoads> kColumns{"compute_n", "g2g_mb", "h2d_mb", "d2h_mb"};  // by Load

struct Row {
  std::string gpu, world, topology;
  PerLoad<double> amounts;
  double seconds, spread;
  int64_t inter;
  int parts() const {
    return static_cast<int>(std::ranges::count_if(amounts, [](double amount) { return amount > 0; }));
  }
};

Row read_row(const Csv& csv, size_t at) {
  Row row;
  row.gpu = csv.text(at, "gpu");
  row.world = fmt::format("{} world {}", row.gpu, csv.whole(at, "world"));
  row.inter = csv.whole(at, "inter");
  row.topology = fmt::format("{} intra {} inter {}", row.world, csv.whole(at, "intra"), row.inter);
  row.seconds = csv.number(at, "latency_ms") * 1e-3;
  row.spread = csv.has("std_ms") ? csv.number(at, "std_ms") * 1e-3 : 0;
  for (int w = 0; w < kLoads; ++w) row.amounts[w] = csv.number(at, kColumns[w]);
  if (row.seconds <= 0) throw invalid("{}, row {}: latency_ms is 0, expected a time above it", csv.path, at + 1);
  if (!row.parts())
    throw invalid("{}, row {}: nothing ran, expected an amount above 0 in {}", csv.path, at + 1,
                  fmt::join(kColumns, ", "));
  return row;
}

// start + slope x amount, by least squares through what ran alone, each known to 2 % and its own spread.
struct Line {
  double start = 0, slope = 0;
  double seconds(double amount) const { return start + slope * amount; }
};

class Fit {
 public:
  void add(double x, double y, double spread) {
    const double sigma = std::hypot(0.02 * y, spread);
    const double a = 1 / sigma, b = x / sigma, c = y / sigma;
    aa_ += a * a, ab_ += a * b, bb_ += b * b, ac_ += a * c, bc_ += b * c;
  }
  Line line() const {
    const double determinant = aa_ * bb_ - ab_ * ab_;
    if (determinant > 1e-12 * aa_ * bb_) {
      const Line both{(ac_ * bb_ - bc_ * ab_) / determinant, (bc_ * aa_ - ac_ * ab_) / determinant};
      if (both.start >= 0 && both.slope >= 0) return both;
    }
    return {0, bc_ / bb_};
  }

 private:
  double aa_ = 0, ab_ = 0, bb_ = 0, ac_ = 0, bc_ = 0;
};

// What each kind takes alone. Arithmetic does not depend on where the others are, copies do little: where a topology
// has none alone, those of as many devices count, or of the GPU.
class Alone {
 public:
  void add(const Row& row) {
    for (int w = 0; w < kLoads; ++w) {
      if (row.amounts[w] <= 0) continue;
      for (const std::string& key : keys(row, w)) fits_[{key, w}].add(row.amounts[w], row.seconds, row.spread);
    }
  }
  // Nothing where no row had that part alone.
  std::optional<PerLoad<double>> of(const Row& row) const {
    PerLoad<double> out{};
    for (int w = 0; w < kLoads; ++w) {
      if (row.amounts[w] <= 0) continue;
      for (const std::string& key : keys(row, w)) {
        const auto at = fits_.find({key, w});
        if (at == fits_.end()) continue;
        out[w] = at->second.line().seconds(row.amounts[w]);
        break;
      }
      if (out[w] <= 0) return {};
    }
    return out;
  }

 private:
  // The best first.
  static std::vector<std::string> keys(const Row& row, int w) {
    switch (static_cast<Load>(w)) {
      case Load::kCompute: return {row.gpu};
      case Load::kLink: return {row.topology};
      default: return {row.topology, row.world, row.gpu};
    }
  }
  std::map<std::pair<std::string, int>, Fit> fits_;
};

}  // namespace

bool is_overlap(const std::string& path) {
  return has_columns(path, {"gpu", "world", "intra", "inter", "compute_n", "g2g_mb", "h2d_mb", "d2h_mb", "latency_ms"});
}

Json validate_overlap(const std::string& path, const ValidateOptions&) {
  const Csv csv = read_csv(path);
  std::vector<Row> rows;
  Alone alone;
  for (size_t at = 0; at < csv.rows.size(); ++at) {
    rows.push_back(read_row(csv, at));
    if (rows.back().parts() == 1) alone.add(rows.back());
  }
  Errors errors, single;
  std::map<std::string, std::pair<double, size_t>> short_;  // of the longest part, by GPU
  std::vector<std::string> notes;
  LeftOut left_out;
  for (const Row& row : rows) {
    const auto times = alone.of(row);
    if (!times) {
      left_out.add("of a part that did not run alone in any row");
      continue;
    }
    const GpuInterference model = interference_of(row.gpu);
    if (!model.own && !short_.contains(row.gpu))
      notes.push_back(fmt::format("{}: not measured; interference as of {}", row.gpu, model.fitted_on));
    const bool far = row.inter > 1 || model.host_linked;
    const double predicted = together_seconds(*times, model.constants, far);
    auto& [sum, count] = short_[row.gpu];
    if (row.parts() == 1) {
      single.add({}, predicted, row.seconds);
      continue;
    }
    errors.add({row.gpu, row.topology, fmt::format("{} parts", row.parts())}, predicted, row.seconds);
    sum += 1 - std::ranges::max(*times) / row.seconds;
    ++count;
  }
  if (!errors.rows())
    throw invalid("{} has no row in which two parts run together and both ran alone in other rows", path);
  Json out;
  errors.write(out);
  for (const auto& [gpu, sum] : short_)
    if (sum.second)
      out["groups"][gpu]["longest_part_short_percent"] = 100 * sum.first / static_cast<double>(sum.second);
  out["rows_of_one_part"] = single.rows();
  out["rows_of_one_part_error_percent"] = single.percent();
  out["rows_without_parts_alone"] = left_out.rows();
  left_out.write(out);
  out["constants_a_gpu"] = 8;
  out["notes"] = notes;
  std::string text = "work that runs together: parts alone from this file, eight constants a GPU\n" +
                     left_out.line(errors.rows() + single.rows()) + errors.table();
  for (const std::string& note : notes) text += note + "\n";
  out["text"] = text;
  return out;
}

}  // namespace whale
