// Random programs of differentiable ops with a loss.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "property.h"

namespace whale::test {

// One op (or a small group) for each word, on tensors made before; a few parameters and an input x with a batch of
// `batch` samples (0: without). Values stay near 1, so that finite differences mean something. The optimizer is SGD.
Graph random_graph(const std::vector<uint32_t>& words, int64_t batch);

// The same by name and word, op by op: in the scope that `maker().scope` says.
class RandomGraph {
 public:
  explicit RandomGraph(int64_t batch);
  ~RandomGraph();
  void add(std::string_view name, uint32_t word);  // a name of random_graph_ops()
  Graph finish();                                  // with the loss
  GraphMaker& maker();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The names in the table of random_graph: what a run should have met.
std::vector<std::string> random_graph_ops();

}  // namespace whale::test
