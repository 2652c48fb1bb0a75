// Rows of a file that a form says nothing of.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/json.h"

namespace whale {

class LeftOut {
 public:
  void add(const std::string& why);  // "of model gpt5": one row more
  size_t rows() const;
  // `rows_left_out`, and `left_out`: rows by reason.
  void write(Json& out) const;
  // "3 of 5 rows; 2 left out: 1 of model gpt5, 1 of strategy tp4" and a line's end; nothing where none is. `used`: rows
  // that are not.
  std::string line(size_t used) const;

 private:
  std::vector<std::pair<std::string, size_t>> reasons_;
};

}  // namespace whale
