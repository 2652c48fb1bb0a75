// Products in chunks of rows that overlap with their collective (CoCoNeT): of `matmul -> all_reduce` or `matmul ->
// reduce_scatter` the collective of a chunk runs beside the product of the next; of `all_gather -> matmul` the product
// of a chunk beside the gather of the next. Chunks are parts of the buffers that were there: nothing is copied, and
// rows of a product do not depend on each other; bits stay where its kernel does not depend on their number.
#pragma once

#include "lower/program.h"

namespace whale {

struct ChunkReport {
  int products = 0;    // in chunks
  int64_t chunks = 0;  // of all of them
  double seconds = 0, whole_seconds = 0;
};

// On a program whose buffers share no storage yet. The number of chunks follows from what all members of the group
// know, so that they agree.
void chunk_products(Draft& draft, const Lowering& lowering, ChunkReport& report);

}  // namespace whale
