// From shardings to instructions: local dimensions, buffers, segments, queues and waits, links, offsets. One program
// per class of devices with the same local shapes.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "plan/plan.h"
#include "shard/sharded_graph.h"

namespace whale {

// How much of an entry: all that runs it; or what figures are made of, without samples of rows, offsets (storage.h:
// place_arenas) and waits between rows; or of few layers, without messages to other stages too.
enum class Detail : uint8_t { kWhole, kFigures, kFiguresOfFew };

struct LowerOptions {
  std::string entry;                                        // "train", "eval"
  std::unordered_map<std::string_view, int32_t> variables;  // name -> number in Plan::variables
  bool share = true;                                        // one program for devices alike; false: one each
  bool overlap = true;                                      // collectives on the communication queue
  int64_t matmul_chunks = 0;                                // of products beside collectives; 0: by cost, 1: none
  Detail detail = Detail::kWhole;
  std::vector<std::string>* notes = nullptr;  // takes what was decided
};

Entry lower(const ShardedGraph& graph, const LowerOptions& options);

}  // namespace whale
