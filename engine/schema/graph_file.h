// Graphs as bytes (graph.fbs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ir/graph.h"

namespace whale {

inline constexpr uint32_t kGraphFormatVersion = 1;

std::vector<uint8_t> serialize(const Graph& graph);
// Any bytes give a graph that has passed verify() and verify_ops(), or an Error. serialize(read_graph(x)) == x for
// every x that serialize() wrote.
Graph read_graph(const uint8_t* data, size_t size);

bool is_graph_file(const uint8_t* data, size_t size);  // by the identifier alone
bool is_plan_file(const uint8_t* data, size_t size);

}  // namespace whale
