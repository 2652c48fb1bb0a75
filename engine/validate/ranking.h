// Whether predictions choose well among rows.
#pragma once

#include <vector>

namespace whale {

// Of ranks, equal values sharing theirs; 1 where there is nothing to rank.
double spearman_of(const std::vector<double>& predicted, const std::vector<double>& measured);
// What was measured of the row with the best prediction, over the best that was measured.
double regret_of(const std::vector<double>& predicted, const std::vector<double>& measured);

}  // namespace whale
