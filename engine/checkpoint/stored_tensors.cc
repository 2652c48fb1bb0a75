#include "checkpoint/stored_tensors.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"

namespace whale {
namespace {

// Bytes [begin, end) of the tensor that are in the piece, to their places behind `to`, which is that of `begin`. They
// lie one after the other in the file: `packed` is where they are read to. Whether there are any.
bool read_piece(const StoredPiece& piece, uint64_t begin, uint64_t end, char* to, std::vector<char>& packed,
                uint32_t* crc) {
  uint64_t first = 0, bytes = 0;
  piece.part.each(begin, end, [&](uint64_t, uint64_t local, uint64_t n) {
    if (bytes == 0) first = local;
    bytes = local + n - first;
  });
  if (bytes == 0) return false;
  const bool whole = bytes == end - begin;
  if (!whole) packed.resize(bytes);
  char* const read = whole ? to : packed.data();
  piece.file->read(*piece.tensor, first, read, bytes);
  if (crc != nullptr) *crc = crc32c(read, bytes, *crc);
  if (!whole)
    piece.part.each(begin, end, [&](uint64_t logical, uint64_t local, uint64_t n) {
      std::memcpy(to + (logical - begin), read + (local - first), n);
    });
  return true;
}

[[noreturn]] void damaged(const SafetensorsFile& file, const std::string& what) {
  throw error(Code::kDataLoss, "'{}' is damaged: {}. Load another checkpoint", file.path(), what);
}

}  // namespace

void StoredPiece::verify() const {
  const uint32_t now = file->checksum(*tensor);
  if (checksum && *checksum != now)
    damaged(*file, fmt::format("tensor '{}' changed since it was saved (its checksum is not the one in whale.json)",
                               tensor->name));
}

StoredTensors::StoredTensors(const CheckpointIndex& index, const std::vector<std::string>& names,
                             std::vector<std::unique_ptr<SafetensorsFile>> files)
    : path_(files.front()->path()), files_(std::move(files)) {
  for (size_t f = 0; f < files_.size(); ++f) {
    const SafetensorsFile& file = *files_[f];
    const auto sums = index.files.find(names[f]);
    const auto parts = index.parts.find(names[f]);
    for (const StoredTensor& stored : file.tensors()) {
      const StoredPart* part = nullptr;
      if (parts != index.parts.end())
        if (const auto at = parts->second.find(stored.name); at != parts->second.end()) part = &at->second;
      const Dims& dims = part == nullptr ? stored.dims : part->dims;
      const auto [at, is_new] = at_.try_emplace(part == nullptr ? stored.name : part->of, tensors_.size());
      if (is_new) {
        const auto bytes = static_cast<uint64_t>(element_count(dims) * size_of(stored.dtype));
        tensors_.push_back({at->first, stored.dtype, dims, 0, bytes});
        pieces_.emplace_back();
      }
      StoredPiece piece{&file, &stored,
                        VariablePart(part == nullptr ? part_of(dims, std::vector<SubAxisCut>{}) : part->at, dims,
                                     size_of(stored.dtype))};
      if (sums != index.files.end()) {
        const auto sum = sums->second.tensors.find(stored.name);
        if (sum == sums->second.tensors.end())
          damaged(file, fmt::format("whale.json has no checksum of tensor '{}'", stored.name));
        piece.checksum = sum->second;
      }
      const StoredTensor& whole = tensors_[at->second];
      if (whole.dtype != stored.dtype || whole.dims != dims || piece.part.bytes() != stored.bytes())
        damaged(file, fmt::format("tensor '{}' is not the part that whale.json says", stored.name));
      pieces_[at->second].push_back(std::move(piece));
    }
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    uint64_t sum = 0;
    for (const StoredPiece& piece : pieces_[t]) sum += piece.part.bytes();
    if (sum != tensors_[t].bytes())
      damaged(*pieces_[t][0].file,
              fmt::format("tensor '{}' has {} bytes, its parts have {}", tensors_[t].name, tensors_[t].bytes(), sum));
  }
}

uint64_t StoredTensors::bytes() const {
  uint64_t sum = 0;
  for (const auto& file : files_) sum += file->bytes();
  return sum;
}

const StoredTensor* StoredTensors::find(const std::string& name) const {
  const auto at = at_.find(name);
  return at == at_.end() ? nullptr : &tensors_[at->second];
}

const std::vector<StoredPiece>& StoredTensors::pieces(const StoredTensor& tensor) const {
  return pieces_[at_.at(tensor.name)];
}

void StoredTensors::read(const StoredTensor& tensor, uint64_t offset, void* to, size_t bytes) const {
  std::vector<char> packed;
  for (const StoredPiece& piece : pieces(tensor))
    read_piece(piece, offset, offset + bytes, static_cast<char*>(to), packed, nullptr);
}

void StoredTensors::verify(const StoredTensor& tensor, const Wanted& wanted) const {
  for (const StoredPiece& piece : pieces(tensor))
    if (!wanted || wanted(piece.part.part())) piece.verify();
}

TensorReader::TensorReader(const StoredTensors& from, const StoredTensor& tensor, const Wanted& wanted)
    : tensor_(tensor) {
  for (const StoredPiece& piece : from.pieces(tensor))
    if (!wanted || wanted(piece.part.part())) {
      const auto [begin, end] = piece.part.bounds();
      sums_.push_back({&piece, begin, end});
    }
}

const char* TensorReader::next(size_t count) {
  const uint64_t begin = at_, end = begin + count * static_cast<uint64_t>(size_of(tensor_.dtype));
  at_ = end;
  data_.resize(end - begin);
  bool any = false;
  for (Sum& sum : sums_)
    if (sum.begin < end && sum.end > begin)
      any = read_piece(*sum.piece, begin, end, data_.data(), packed_, &sum.crc) || any;
  return any ? data_.data() : nullptr;
}

void TensorReader::check() const {
  for (const Sum& sum : sums_)
    if (sum.piece->checksum && *sum.piece->checksum != sum.crc)
      throw error(Code::kDataLoss, "'{}' was written to while it was loaded: tensor '{}' changed",
                  sum.piece->file->path(), sum.piece->tensor->name);
}

}  // namespace whale
