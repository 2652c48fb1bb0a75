// rewrite/: lists by key, and bringing ops into an order in which they can run, beside plain loops that do the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "ops/op.h"
#include "rewrite/rewrite.h"

using namespace whale;

namespace {

// Adds of earlier results, each by the op of its number; then in another order.
Graph shuffled(std::mt19937& random, size_t n, bool in_order) {
  Graph g;
  const auto scalar = [&](const std::string& name) {
    g.tensors.push_back({.name = name, .dims = {}});
    return static_cast<TensorId>(g.tensors.size()) - 1;
  };
  g.tensors.push_back({.name = "x", .dims = {}, .kind = TensorKind::kInput});
  g.inputs = {0};
  for (size_t i = 0; i < n; ++i) {
    Op op;
    op.code = OpCode::k_add;
    op.name = "op" + std::to_string(i);
    for (int k = 0; k < 2; ++k) op.inputs.push_back(static_cast<TensorId>(random() % g.tensors.size()));
    op.outputs = {scalar(op.name)};
    if (i > 0 && random() % 2) op.origin = static_cast<OpId>(random() % i);
    g.ops.push_back(std::move(op));
  }
  if (!in_order) std::shuffle(g.ops.begin(), g.ops.end(), random);
  return g;
}

// Always the first that can run.
std::vector<std::string> order_of(const Graph& g, const std::vector<char>& removed) {
  std::vector<char> made(g.tensors.size(), 1), done(g.ops.size());
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (!removed[i])
      for (const TensorId id : g.ops[i].outputs) made[id] = 0;
  std::vector<std::string> names;
  for (size_t i = 0; i < g.ops.size();) {
    const auto& inputs = g.ops[i].inputs;
    const bool runs = !removed[i] && !done[i] &&
                      std::all_of(inputs.begin(), inputs.end(), [&](TensorId id) { return made[id] != 0; });
    if (!runs) {
      ++i;
      continue;
    }
    names.push_back(g.ops[i].name);
    done[i] = 1;
    for (const TensorId id : g.ops[i].outputs) made[id] = 1;
    i = 0;
  }
  return names;
}

}  // namespace

TEST_CASE("compact takes the first op that can run, always") {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    Graph g = shuffled(random, 1 + random() % 24, round % 3 == 0);
    std::vector<char> removed(g.ops.size());
    for (char& r : removed) r = round % 2 && random() % 4 == 0;
    const std::vector<std::string> expected = order_of(g, removed);
    const std::vector<Op> before = g.ops;
    compact(g, removed);
    REQUIRE(g.ops.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(g.ops[i].name == expected[i]);
      CHECK(g.tensor(g.ops[i].outputs[0]).producer == static_cast<OpId>(i));
      const auto was = std::find_if(before.begin(), before.end(), [&](const Op& op) { return op.name == expected[i]; });
      const OpId origin = g.ops[i].origin;
      if (was->origin == kNone || removed[was->origin])
        CHECK(origin == kNone);
      else
        CHECK(g.op(origin).name == before[was->origin].name);
    }
    for (size_t i = 0; i < before.size(); ++i)
      if (removed[i]) CHECK(g.tensor(before[i].outputs[0]).producer == kNone);
  }
}

TEST_CASE("readers and followers are those that a search finds") {
  std::mt19937 random(5);
  Graph g = shuffled(random, 40, true);
  compact(g, {});
  const Lists readers = readers_of(g), followers = followers_of(g);
  for (size_t t = 0; t < g.tensors.size(); ++t) {
    std::vector<int32_t> expected;
    for (size_t i = 0; i < g.ops.size(); ++i)
      expected.insert(
          expected.end(),
          static_cast<size_t>(std::count(g.ops[i].inputs.begin(), g.ops[i].inputs.end(), static_cast<TensorId>(t))),
          static_cast<OpId>(i));
    CHECK(std::vector<int32_t>(readers[t].begin(), readers[t].end()) == expected);
    const OpId made = g.tensors[t].producer;
    if (made == kNone) continue;
    const auto follow = followers[made];
    CHECK(std::vector<int32_t>(follow.begin(), follow.end()) == expected);
  }
}
