// Who of several ranks writes what of a variable: every element is written by exactly one rank that holds it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/shape.h"
#include "plan/part.h"

namespace whale {

// A part of a tensor with the ranks that hold all of it, ascending.
struct HeldBy {
  Part part;
  std::vector<int32_t> ranks;
};

class Shards {
 public:
  // `cut_from`: a part of fewer bytes is not cut further where several ranks hold it.
  explicit Shards(int ranks, uint64_t cut_from = uint64_t{1} << 20)
      : written_(static_cast<size_t>(ranks)), cut_from_(cut_from) {}
  // By rank, what it writes of the next variable, in parts that are not empty and do not overlap. `held` covers it, and
  // may overlap. Ranks that hold the same share it: the large part in slices, the small one goes to who has least. A
  // variable without elements is rank 0's, as a whole.
  std::vector<std::vector<Part>> next(const Dims& dims, int64_t element_bytes, const std::vector<HeldBy>& held);
  const std::vector<uint64_t>& bytes() const { return written_; }  // by rank, so far

 private:
  std::vector<uint64_t> written_;
  uint64_t cut_from_;
};

// "0:4+8:12,0:5": the intervals of each dimension; of a scalar "". The other way round it throws invalid for what is no
// part of a tensor of these dimensions in such words.
std::string to_text(const Part& part);
Part part_of_text(const std::string& text, const Dims& dims);
bool overlap(const Part& a, const Part& b);

}  // namespace whale
