#include <algorithm>
#include <array>

#include "base/error.h"
#include "cost/curve.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/gpu_forms.h"
#include "validate/sheets.h"

namespace whale {
namespace {

constexpr double kFloat32 = 4;

double count(const Csv& csv, size_t row, std::string_view column) {
  const int64_t value = csv.whole(row, column);
  if (value < 1) throw invalid("{}, row {}: column '{}' is {}, expected at least 1", csv.path, row + 1, column, value);
  return static_cast<double>(value);
}

// The table's N is the inner dimension, its K the columns of the result.
double product(const Csv& csv, size_t row, const DeviceCurve& curve) {
  return product_seconds(
      {count(csv, row, "B"), count(csv, row, "M"), count(csv, row, "K"), count(csv, row, "N"), kFloat32}, curve);
}
double softmax(const Csv& csv, size_t row, const DeviceCurve& curve) {
  return softmax_seconds(count(csv, row, "B"), count(csv, row, "H"), kFloat32, curve);
}
double layer_norm(const Csv& csv, size_t row, const DeviceCurve& curve) {
  return layer_norm_seconds(count(csv, row, "B"), count(csv, row, "H"), kFloat32, curve);
}

struct MeasuredOp {
  std::string_view name;
  double (*seconds)(const Csv& csv, size_t row, const DeviceCurve& curve);
};
constexpr std::array kOps{MeasuredOp{"linear", product}, MeasuredOp{"bmm", product}, MeasuredOp{"softmax", softmax},
                          MeasuredOp{"ln", layer_norm}};

}  // namespace

bool is_ops(const std::string& path) { return has_columns(path, {"op", "gpu", "B", "M", "N", "K", "H", "ms"}); }

Json validate_ops(const std::string& path, const ValidateOptions& options) {
  const Csv csv = read_csv(path);
  Curves curves(options.profiles);
  Errors errors;
  for (size_t row = 0; row < csv.rows.size(); ++row) {
    const std::string &op = csv.text(row, "op"), &gpu = csv.text(row, "gpu");
    const auto* at = std::ranges::find_if(kOps, [&](const MeasuredOp& o) { return o.name == op; });
    if (at == kOps.end())
      throw invalid("{}, row {}: op is '{}', expected linear, bmm, softmax or ln", path, row + 1, op);
    const double measured = csv.number(row, "ms") * 1e-3;
    if (measured <= 0) throw invalid("{}, row {}: ms is 0, expected a time above it", path, row + 1);
    errors.add({op, gpu, gpu + ", " + op}, at->seconds(csv, row, curves.of(gpu)), measured);
  }
  Json out;
  errors.write(out);
  out["constants_a_device"] = 5;
  out["notes"] = curves.note_list();
  out["text"] =
      "op times by data sheets and five constants a device, against measurements\n" + errors.table() + curves.notes();
  return out;
}

}  // namespace whale
