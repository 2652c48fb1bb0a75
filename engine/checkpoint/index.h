// The index of a checkpoint, whale.json: what was saved, by which save, and the checksums of the files beside it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/safetensors.h"
#include "plan/part.h"

namespace whale {

// What libwhale reads: 1, which has neither id nor checksums, 2, which it writes of one rank, and 3, of several.
inline constexpr int64_t kCheckpointFormat = 3;
inline constexpr int64_t kMostRanks = 99'999;  // of a checkpoint

// Of a session and of what it saves; a step beyond is refused. Exact in doubles, as the steps of a schedule are.
inline constexpr int64_t kMostIterations = int64_t{1} << 53;

struct CheckpointMeta {
  std::string model;  // name of the graph
  uint64_t seed = 0;
  int64_t iteration = 0, updates = 0;
  std::optional<double> learning_rate;  // set by hand; absent: the schedule's
  std::optional<double> loss_scale;     // f16
  int64_t steps_at_scale = 0;           // without an overflow, since the loss scale changed
  std::string optimizer = {};           // that made the state, as optimizer_name says; empty: not known (older ones)
};

// What a tensor in a file is a part of, where it is one.
struct StoredPart {
  std::string of;
  Dims dims;  // of the whole
  Part at;
};
using StoredParts = std::map<std::string, StoredPart>;  // by the name of the tensor in its file

struct CheckpointIndex {
  CheckpointMeta meta;
  int64_t format = 2;
  int64_t ranks = 1;                              // that wrote it; format 3: at least 2
  std::string library;                            // version that wrote it; format 1: empty
  std::string id;                                 // of the save, random, also in the files; format 1: empty
  std::map<std::string, FileChecksums> files;     // by name; format 1: none
  std::map<std::string, StoredParts> parts = {};  // by file; format 3
};

// What one rank tells of the files that it wrote: `files` and `parts` of the index alone.
std::string files_to_text(const CheckpointIndex& index);
void add_files(CheckpointIndex& index, const std::string& text);

// The text's last line is the checksum of the text itself, in this and later formats.
std::string to_text(const CheckpointIndex& index);
// Throws data_loss for what is damaged, failed_precondition for a newer format. `path` is for messages.
CheckpointIndex parse_index(const std::string& path, const std::string& text);
// Begins as libwhale's do, however it goes on: a damaged index is told from a user's file of the same name.
bool looks_like_index(const std::string& text);

}  // namespace whale
