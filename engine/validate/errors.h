// How far predictions are from what was measured: the mean of |predicted - measured| / measured, of all and by group.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"

namespace whale {

class Errors {
 public:
  // Counts for all, and for each of the groups (a name once a call); the first of all calls stand before the second of
  // all calls, and so on. Throws where a figure is not above 0.
  void add(const std::vector<std::string>& groups, double predicted, double measured);

  size_t rows() const { return all_.rows; }
  double percent() const { return all_.percent(); }

  // `rows`, `mean_absolute_error_percent` and `groups`.
  void write(Json& out) const;
  // Lines of a table for a terminal of 80 columns: of all, then the groups.
  std::string table() const;

 private:
  struct Group {
    std::string name;
    size_t level = 0;
    size_t rows = 0;
    double sum = 0, over = 0;  // of |errors|; of errors with their sign
    double percent() const { return rows ? 100 * sum / static_cast<double>(rows) : 0; }
    void add(double error) { ++rows, sum += error < 0 ? -error : error, over += error; }
  };
  Group all_{"all"};
  std::vector<Group> groups_;
};

}  // namespace whale
