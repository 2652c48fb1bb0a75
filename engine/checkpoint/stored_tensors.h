// The tensors of one kind (parameters, or state) of a checkpoint, logical and whole, in whichever files their parts
// are.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"
#include "data/variable_part.h"

namespace whale {

// A part of a stored tensor, as a whole in one file.
struct StoredPiece {
  const SafetensorsFile* file = nullptr;
  const StoredTensor* tensor = nullptr;  // in it
  VariablePart part;                     // of the logical one
  std::optional<uint32_t> checksum = {};
  void verify() const;  // reads it; throws data_loss
};
using Wanted = std::function<bool(const Part&)>;  // empty: all

class StoredTensors {
 public:
  // Files whose headers have been checked against the index, in the order of the ranks that wrote them. Throws
  // data_loss where their parts do not make whole tensors.
  StoredTensors(const CheckpointIndex& index, const std::vector<std::string>& names,
                std::vector<std::unique_ptr<SafetensorsFile>> files);
  const std::string& path() const { return path_; }  // for messages; of several files, that of the first
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  uint64_t bytes() const;  // of all files
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredTensor* find(const std::string& name) const;
  const std::vector<StoredPiece>& pieces(const StoredTensor& tensor) const;
  void read(const StoredTensor& tensor, uint64_t offset, void* to, size_t bytes) const;
  void verify(const StoredTensor& tensor, const Wanted& wanted = {}) const;  // the pieces of it that are wanted

 private:
  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<StoredTensor> tensors_;              // `begin` is 0
  std::vector<std::vector<StoredPiece>> pieces_;   // of each
  std::map<std::string, size_t, std::less<>> at_;  // by name
};

// Reads a tensor from its begin to its end, in blocks, and sums its pieces up on the way. Pieces that are not wanted
// are not read.
class TensorReader {
 public:
  TensorReader(const StoredTensors& from, const StoredTensor& tensor, const Wanted& wanted = {});
  // The next `count` elements; null: nothing of them is wanted. What is not wanted beside what is has any value.
  const char* next(size_t count);
  void check() const;  // at the end; throws data_loss where a piece is not what its checksum says

 private:
  struct Sum {
    const StoredPiece* piece;
    uint64_t begin, end;  // of the tensor: around the piece
    uint32_t crc = 0;
  };
  const StoredTensor& tensor_;
  uint64_t at_ = 0;
  std::vector<Sum> sums_;
  std::vector<char> data_, packed_;
};

}  // namespace whale
