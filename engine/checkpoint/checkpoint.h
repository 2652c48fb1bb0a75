// A checkpoint is a directory with model.safetensors (parameters and running statistics), optimizer.safetensors (state,
// named PARAMETER/STATE) and whale.json, the index: counters, the id of the save, and checksums. Of several ranks each
// writes two files of its own, model-00001-of-00003.safetensors and so on, with parts of tensors; the index says which.
//
// What holds, whatever fails or dies at whatever moment:
// - The directory holds the previous checkpoint or the new one, whole. Renaming the new index over the old one is the
//   moment that decides; until then the new files have names of their own, with the random id of their save.
// - That moment is rank 0's, once it has heard from every rank that its files are on the disk. A rank that fails, or is
//   lost, ends the save on all.
// - Nothing else in the directory or beside it is touched. Only files of these names are ever replaced, where the index
//   that is there names them or there is none of that name, and only what a save of libwhale has left under its id, or
//   the files of the checkpoint that was replaced, are ever removed.
// - One save at a time: another one of the same directory, from any thread or process, is aborted and does nothing.
// - A load sees one save. Its files carry the id that the index names; in between two saves it looks again.
// - A changed byte in any of the files is data_loss, with the name of the file and of the tensor.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/peers.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stored_tensors.h"

namespace whale {

struct CheckpointPart {  // one of the two files of a rank
  std::vector<StoredTensor> tensors;
  TensorSource source;
  StoredParts parts = {};  // what of them are parts, where there are several ranks
};

// Called with the name of each point at which writing may fail; for tests, which throw from it or end the process.
using FaultProbe = std::function<void(std::string_view point)>;

// Throws aborted while another save of this directory is under way; failed_precondition when the directory holds files
// of these names that are not a checkpoint's, or a newer format. An Error after the deciding moment leaves the new one.
// `peers`: of several ranks, which all call this with one directory, that they share, one `meta`, and parts that
// together are every tensor; null: this is the only rank. An Error of one rank is thrown on every one.
void write_checkpoint(const std::string& directory, const CheckpointMeta& meta, const CheckpointPart& model,
                      const CheckpointPart& optimizer, const FaultProbe& probe = {}, Peers* peers = nullptr);

// Throws what write_checkpoint would throw for this directory as it is now, and leaves everything as it is. A save that
// is under way is no error: it will have ended.
void check_checkpoint_target(const std::string& directory);

struct Checkpoint {
  std::string directory;
  CheckpointIndex index;
  std::unique_ptr<StoredTensors> model, optimizer;
  bool has_checksums() const { return index.format > 1; }
  // Reads every byte and compares the checksums, as far as there are any; throws data_loss.
  void verify() const;
};
// Opens the files of one save and checks all but the data; throws not_found, data_loss, or failed_precondition for a
// newer format.
Checkpoint open_checkpoint(const std::string& directory);
// The same on every rank: all open the save that rank 0 finds, or none does.
Checkpoint open_checkpoint(const std::string& directory, Peers& peers);

}  // namespace whale
