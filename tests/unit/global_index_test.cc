// Positions in the logical tensor under any cuts, against the part that the cuts leave, element by element.
#include "device/global_index.h"

#include <doctest/doctest.h>

#include "plan/part.h"

namespace whale {
namespace {

struct Cut {
  SubAxis sub_axis;
  int64_t extent, begin, end;
};

// The logical number of every local element, from the runs of the part.
std::vector<int64_t> places(const Dims& dims, const Part& part) {
  std::vector<int64_t> out;
  for_each_run(dims, part, [&](int64_t logical, int64_t local, int64_t elements) {
    CHECK(local == static_cast<int64_t>(out.size()));
    for (int64_t i = 0; i < elements; ++i) out.push_back(logical + i);
  });
  return out;
}

// `batch`, when present, is cut to [begin, end) by the micro-batch, the others by the box.
void check(const Dims& dims, const std::vector<Cut>& cuts, const Cut* batch = nullptr) {
  Box box;
  box.global = dims;
  box.origin.assign(dims.size(), 0);
  std::vector<SubAxisCut> all;
  for (const Cut& c : cuts) {
    all.push_back({c.sub_axis, c.extent, {c.begin, c.end}});
    const bool shared = batch != nullptr && batch->sub_axis.dim == c.sub_axis.dim;
    if (c.sub_axis.outer == 1 && !shared)
      box.origin[c.sub_axis.dim] += c.begin * c.sub_axis.inner;
    else
      box.cuts.push_back({c.sub_axis, c.extent, c.begin, c.end - c.begin});
  }
  if (batch != nullptr) {
    all.push_back({batch->sub_axis, batch->extent, {batch->begin, batch->end}});
    box.batch = batch->sub_axis;
  }
  const Part part = part_of(dims, all);
  const std::vector<int64_t> want = places(dims, part);
  const GlobalIndex index(box, part.extents());
  const int64_t begin = batch != nullptr ? batch->begin : 0;
  REQUIRE(element_count(part.extents()) == static_cast<int64_t>(want.size()));
  for (size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(index(static_cast<int64_t>(i), begin) == want[i]);
  }
}

}  // namespace

TEST_CASE("global index: interleaved cuts, alone and beside the batch") {
  const Cut heads{{1, 3, 2}, 4, 1, 3}, rows{{0, 1, 1}, 6, 2, 5}, batch{{0, 1, 2}, 3, 1, 3};
  check({6, 24}, {heads});
  check({6, 24}, {heads, rows});
  check({6, 24}, {heads}, &batch);
  check({6, 24}, {rows});
  check({24}, {{{0, 3, 2}, 4, 0, 1}});
  check({5, 24, 2}, {{{1, 2, 1}, 12, 3, 11}});
}

TEST_CASE("global index: several sub-axes of one dimension") {
  // 2 x 3 x 4 x 5 in one dimension.
  const Cut outer{{1, 1, 60}, 2, 1, 2}, second{{1, 2, 20}, 3, 1, 3}, third{{1, 6, 5}, 4, 0, 3},
      inner{{1, 24, 1}, 5, 2, 4};
  check({3, 120}, {second, inner});
  check({3, 120}, {inner, second});
  check({3, 120}, {outer, second, third, inner});
  check({3, 120}, {outer, third});
  // One of them is the batch.
  for (const Cut& batch : {outer, second, third, inner})
    for (const Cut& other : {outer, second, third, inner})
      if (!(other.sub_axis == batch.sub_axis)) check({3, 120}, {other}, &batch);
  check({3, 120}, {outer, third, inner}, &second);
}

TEST_CASE("global index: an empty cut and a whole one") {
  const Cut none{{0, 2, 3}, 4, 2, 2}, whole{{0, 2, 3}, 4, 0, 4};
  check({24, 2}, {none});
  check({24, 2}, {whole});
}

}  // namespace whale
