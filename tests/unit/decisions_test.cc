// Which decisions of two computations differ, and by how little (whale verify).
#include <doctest/doctest.h>

#include "../../tools/whale/decisions.h"

using namespace tool;

namespace {
Decided compared(const Decision& decision, const Values& plan, const Values& single, bool rounded = false,
                 const Values* plan_made = nullptr, const Values* single_made = nullptr) {
  Decided out;
  compare_decisions(decision, {&plan, plan_made}, {&single, single_made}, rounded, out);
  return out;
}
}  // namespace

TEST_CASE("decisions: the k largest, ties to the lowest index, margins of the largest score") {
  const Decision gate{"moe_gate", "router", "", 2, -1};
  const Values single{{2, 3}, {4, 1, 3, 2, 2, -8}};
  const Decided same = compared(gate, single, single);
  CHECK(same.made == 4);
  CHECK(same.differ == 0);
  CHECK(same.margin == 0);

  // In the second row 1 overtakes 0 by a hair: both choices of that token change.
  const Decided hair = compared(gate, {{2, 3}, {4, 1, 3, 2, 2.0000001, -8}}, single);
  CHECK(hair.made == 4);
  CHECK(hair.differ == 2);
  CHECK(hair.margin == 0);
  CHECK(hair.worst == "router");

  const Decided wrong = compared(gate, {{2, 3}, {4, 3.5, 3, 2, 2, -8}}, single);
  CHECK(wrong.differ == 1);
  CHECK(wrong.margin == doctest::Approx(2.0 / 8));  // 3 instead of 1, of 8
}

TEST_CASE("decisions: along any axis") {
  const Decision largest{"argmax", "x", "", 1, 0};
  const Decided d = compared(largest, {{2, 3}, {1, 5, 0, 4, 2, 0}}, {{2, 3}, {1, 5, 1, 4, 2, 3}});
  CHECK(d.made == 3);
  CHECK(d.differ == 1);  // column 2: a tie at 0 goes to index 0
  CHECK(d.margin == doctest::Approx(2.0 / 5));
}

TEST_CASE("decisions: a tie in rounded scores differs unless what was made of it is alike") {
  const Decision gate{"moe_gate", "router", "experts", 1, -1};
  const Values scores{{1, 3}, {4, 4, 1}}, first{{1, 1}, {0}}, second{{1, 1}, {1}};
  CHECK(compared(gate, scores, scores, true, &first, &first).differ == 0);
  CHECK(compared(gate, scores, scores, true, &first, &second).differ == 1);
  CHECK(compared(gate, scores, scores, true).differ == 1);
  CHECK(compared(gate, scores, scores, false).differ == 0);
}

TEST_CASE("decisions: found in a graph") {
  const auto found = decisions_of(
      R"({"tensors":[{"name":"a"},{"name":"b"},{"name":"c"}],"ops":[{"op":"matmul","inputs":[0],"outputs":[1],"attributes":{}},
          {"op":"moe_gate","inputs":[1],"outputs":[2],"attributes":{"k":2}},
          {"op":"argmax","inputs":[0],"outputs":[2],"attributes":{"axis":1}}]})");
  REQUIRE(found.size() == 2);
  CHECK(found[0].scores == "b");
  CHECK(found[0].made == "c");
  CHECK(found[0].k == 2);
  CHECK(found[1].op == "argmax");
  CHECK(found[1].axis == 1);
}
