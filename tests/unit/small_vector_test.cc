// SmallVector beside std::vector: the same random operations, the same elements after each.
#include "base/small_vector.h"

#include <doctest/doctest.h>

#include <random>
#include <utility>
#include <vector>

using namespace whale;

namespace {

using Small = SmallVector<int64_t, 4>;
using Plain = std::vector<int64_t>;

void check_same(const Small& small, const Plain& plain) {
  REQUIRE(small.size() == plain.size());
  CHECK(small.empty() == plain.empty());
  CHECK(Plain(small.begin(), small.end()) == plain);
  if (!plain.empty()) CHECK(small.back() == plain.back());
}

void change(std::mt19937& random, Small& small, Plain& plain) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const auto value = static_cast<int64_t>(below(3));
  const size_t at = below(plain.size() + 1), end = at + below(plain.size() + 1 - at);
  const auto place = static_cast<ptrdiff_t>(at), last = static_cast<ptrdiff_t>(end);
  switch (below(7)) {
    case 0: small.push_back(value), plain.push_back(value); break;
    case 1: small.insert(small.begin() + place, value), plain.insert(plain.begin() + place, value); break;
    case 2: {
      const Plain more(below(4), value);
      small.insert(small.begin() + place, more.begin(), more.end());
      plain.insert(plain.begin() + place, more.begin(), more.end());
      break;
    }
    case 3:
      small.erase(small.begin() + place, small.begin() + last);
      plain.erase(plain.begin() + place, plain.begin() + last);
      break;
    case 4: small.resize(at, value), plain.resize(at, value); break;
    case 5: small.assign(below(9), value), plain.assign(small.size(), value); break;
    default: small.reserve(at * 2);
  }
}

}  // namespace

TEST_CASE("small_vector: as std::vector under random operations") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Small small;
    Plain plain;
    for (int i = 0; i < 40; ++i) {
      change(random, small, plain);
      check_same(small, plain);
    }
  }
}

TEST_CASE("small_vector: copies are their own, what is moved away is empty") {
  for (size_t n : {0, 1, 4, 5, 9}) {
    Small from(n, 3);
    Small copy = from;
    copy.push_back(1);
    check_same(from, Plain(n, 3));
    Small moved = std::move(copy);
    check_same(copy, {});  // NOLINT(bugprone-use-after-move)
    CHECK(moved.size() == n + 1);
    for (size_t m : {0, 2, 7}) {  // over something of any size
      Small over(m, 5);
      over = from;
      CHECK(over == from);
      over = Small(m, 5);
      over = std::move(moved);
      CHECK(over.size() == n + 1);
      moved = std::move(over);
      check_same(over, {});  // NOLINT(bugprone-use-after-move)
    }
  }
}

TEST_CASE("small_vector: order is that of std::vector") {
  const std::vector<Plain> lists = {{}, {0}, {0, 0}, {0, 1}, {1}, {1, 2, 3, 4, 5}, {1, 2, 3, 4, 6}, {2}};
  for (const Plain& a : lists)
    for (const Plain& b : lists) {
      CHECK((Small(a) < Small(b)) == (a < b));
      CHECK((Small(a) == Small(b)) == (a == b));
    }
}
