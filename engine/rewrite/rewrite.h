// Helpers of passes that replace ops.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "ir/graph.h"

namespace whale {

// Removes the ops marked in `removed` (may be empty: none) and brings the rest into an order in which they can run,
// changing as little as possible; renumbers producers and origins.
void compact(Graph& graph, const std::vector<char>& removed);

// Brings the ops into the order, in which every number stands at most once; the others are dropped. Producers and
// origins stay as they are.
void take_in_order(Graph& graph, const std::vector<OpId>& order);

// For an op that is run again on the same index.
void without_index_check(Op& op);

// The parameter (or other variable) that a tensor is, or that casts alone were made of; kNone: neither.
TensorId variable_behind(const Graph& graph, TensorId id);

// A list of numbers for each of many keys, one behind the other in memory.
class Lists {
 public:
  using Entry = std::pair<int32_t, int32_t>;  // key, number
  Lists() = default;
  // Each list in the order of the entries.
  Lists(size_t keys, const std::vector<Entry>& entries);

  std::span<const int32_t> operator[](size_t key) const {
    return {numbers_.data() + begin_[key], begin_[key + 1] - begin_[key]};
  }
  size_t entries() const { return numbers_.size(); }

 private:
  std::vector<int32_t> numbers_;
  std::vector<size_t> begin_;  // per key, and the end
};

// Who reads each tensor, as op numbers in order; an op that reads it twice stands there twice.
Lists readers_of(const Graph& graph);

// Who reads what each op makes, likewise.
Lists followers_of(const Graph& graph);

}  // namespace whale
