// Which bytes an all-to-all moves: a tensor that is cut along one sub-axis becomes cut along another.
#pragma once

#include <vector>

#include "comm/strided.h"
#include "comm/transport.h"

namespace whale {

// A tensor seen as [rows, first, middle, second, unit bytes] around the two sub-axes; all members see it alike.
class AllToAllShape {
 public:
  AllToAllShape(const CollectiveSpec& spec, size_t members, size_t rank);
  int64_t elements(DType dtype) const;  // of the whole tensor
  // What member `from` has for member `to`: in its operand, and where it goes in the result; as many runs of the same
  // sizes.
  std::vector<Strided> source(char* x, size_t from, size_t to) const;
  std::vector<Strided> target(char* y, size_t from, size_t to) const;

 private:
  struct Side {
    int64_t first, second;  // extents
    int64_t first_begin, second_begin;
  };
  std::vector<Strided> runs(char* data, const Side& side, const Interval& from, const Interval& to) const;
  void look_around(const Operand& x, const SubAxis& from, int64_t size, const SubAxis& to);

  std::vector<Interval> cuts_, to_cuts_;  // of the operand, of the result
  int64_t extent_ = 0, to_extent_ = 0;
  int64_t rows_ = 1, middle_ = 1, unit_ = 1;
  bool from_first_ = true;  // the sub-axis cut before lies outside of the other
};

}  // namespace whale
