// An op computed in parts, as its declared factors say, and the parts put together. An oracle of its own: nothing of
// what plans are made with is used.
#pragma once

#include <string>
#include <vector>

#include "op_call.h"

namespace whale::test {

// A part of a factor's positions. `groups`: of a factor with rows of groups, those that the part's micro-batch has.
struct FactorPart {
  Interval at, groups;
};

struct FactorCut {
  const Factor* factor = nullptr;
  std::vector<FactorPart> parts;
  bool samples = false;  // positions are samples of the batch, for ops that ask where their part lies
};
std::string to_string(const FactorCut& cut);

// Why the parts along these cuts, put together, are not the op's results: empty where they are. Sums may differ by
// rounding; what is not summed may not differ where the device keeps the order within an element.
std::string difference(const OpDevice& device, const OpCall& call, const std::vector<Value>& whole,
                       const std::vector<FactorCut>& cuts);

// Where two lists of results differ; empty: nowhere. `sums`: per result, the largest of what was added up for it, to
// whose rounding it may differ; 0: not at all.
std::string difference(const OpDevice& device, const std::vector<Value>& found, const std::vector<Value>& expected,
                       const std::vector<double>& sums);
double largest(const Value& value);  // finite element, without its sign

// What a window's share reads of its source: none where it sees padding alone.
Interval read_by(const WindowRead& window, const Interval& share);

double combined(Combine combine, double a, double b);

}  // namespace whale::test
