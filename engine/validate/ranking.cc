#include "validate/ranking.h"

#include <algorithm>
#include <cmath>

namespace whale {
namespace {

std::vector<double> ranks_of(const std::vector<double>& values) {
  std::vector<double> out;
  for (const double v : values) {
    const auto below = std::ranges::count_if(values, [&](double w) { return w < v; });
    const auto equal = std::ranges::count(values, v);
    out.push_back(static_cast<double>(below) + (static_cast<double>(equal) - 1) / 2);
  }
  return out;
}

}  // namespace

double spearman_of(const std::vector<double>& predicted, const std::vector<double>& measured) {
  const std::vector<double> a = ranks_of(predicted), b = ranks_of(measured);
  const double mean = (static_cast<double>(a.size()) - 1) / 2;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i)
    ab += (a[i] - mean) * (b[i] - mean), aa += (a[i] - mean) * (a[i] - mean), bb += (b[i] - mean) * (b[i] - mean);
  return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 1;
}

double regret_of(const std::vector<double>& predicted, const std::vector<double>& measured) {
  if (measured.empty()) return 1;
  const auto first = std::ranges::min_element(predicted) - predicted.begin();
  return measured[first] / *std::ranges::min_element(measured);
}

}  // namespace whale
