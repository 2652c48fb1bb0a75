// Graphs as bytes (graph.fbs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ir/graph.h"

namespace whale {

// 2: options of scopes in a default strategy are called as they are now (ir/renamed_options.h).
inline constexpr uint32_t kGraphFormatVersion = 2;

std::vector<uint8_t> serialize(const Graph& graph);
// Any bytes give a graph that has passed verify() and verify_ops(), or an Error. serialize(read_graph(x)) == x for
// every x that serialize() wrote.
Graph read_graph(const uint8_t* data, size_t size);

// Files say in front how many bytes they have and their CRC-32C, in bytes that nothing of the FlatBuffer refers to:
// readers of other makes pass over them, and files of other makes have none. A changed bit that hides the mark left the
// rest whole.
std::vector<uint8_t> with_checksum(std::vector<uint8_t> bytes);
bool has_checksum(const uint8_t* data, size_t size);
// How many of the bytes are the FlatBuffer (versions before wrote the checksum behind it). DATA_LOSS, of `what`, where
// bytes are missing or changed.
size_t checked_size(const uint8_t* data, size_t size, std::string_view what);

bool is_graph_file(const uint8_t* data, size_t size);  // by the identifier alone
bool is_plan_file(const uint8_t* data, size_t size);

}  // namespace whale
