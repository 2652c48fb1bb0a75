// How much of a loss cancels: what is left of terms that cancel is rounded as they are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tool {

// The arithmetic of scalars that ends in the loss, from the scalars that other ops make.
class LossTerms {
 public:
  LossTerms() = default;
  explicit LossTerms(const std::string& graph);  // in JSON

  const std::vector<std::string>& names() const { return names_; }  // of those scalars
  // The loss with every difference taken for the sum of its terms' magnitudes: how large what cancels is, in the
  // loss's own unit, a mean's divisor included. values: of names().
  double magnitude(const std::vector<double>& values) const;

 private:
  struct Step {
    enum class Kind : uint8_t { kLeaf, kConstant, kSum, kDifference, kProduct, kQuotient, kNegative } kind;
    size_t a = 0, b = 0;  // earlier steps; of a leaf: which of names()
    double value = 0;     // of a constant
  };
  std::vector<std::string> names_;
  std::vector<Step> steps_;  // the last one is the loss
};

}  // namespace tool
