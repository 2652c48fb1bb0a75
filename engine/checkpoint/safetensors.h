// The safetensors format: eight bytes of header size (little-endian), a JSON header {name: {dtype, shape,
// data_offsets}}, the data. Written with the data 64-byte aligned; read from any bytes: what is malformed is an Error,
// never a crash.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "ir/dtype.h"
#include "ir/shape.h"

namespace whale {

struct StoredTensor {
  std::string name;
  DType dtype{};
  Dims dims;
  uint64_t begin = 0, end = 0;  // in the data, which starts after the header
  uint64_t bytes() const { return end - begin; }
};

// A file held open for reading; the header has been checked against the file's size.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);  // throws not_found, data_loss, unimplemented (a dtype)
  // header: checksum that it should have; where it cannot be read and has another one, it is damaged (data_loss).
  SafetensorsFile(const Directory& folder, const std::string& name, const uint32_t* header = nullptr);
  const std::string& path() const { return file_.path(); }
  uint64_t bytes() const { return file_.size(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by offset
  const StoredTensor* find(const std::string& name) const;
  std::string metadata(const std::string& key) const;            // of the header; empty: not there
  uint32_t header_checksum() const { return header_checksum_; }  // CRC-32C of all that is before the data
  uint32_t checksum(const StoredTensor& tensor) const;           // CRC-32C; reads it
  void read(const StoredTensor& tensor, uint64_t offset, void* to, size_t bytes) const;

 private:
  void read_header(const uint32_t* expected);
  InputFile file_;
  uint64_t data_begin_ = 0;
  uint32_t header_checksum_ = 0;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The header of a file of `file_bytes` bytes, `header` being the JSON text. For the reader and for fuzzing.
std::vector<StoredTensor> parse_safetensors_header(const std::string& path, const char* header, uint64_t header_bytes,
                                                   uint64_t data_bytes);

// Data of tensor `index` from byte `offset` on, `bytes` of it, into `to`.
using TensorSource = std::function<void(size_t index, uint64_t offset, void* to, size_t bytes)>;

struct FileChecksums {  // CRC-32C
  uint64_t bytes = 0;   // of the whole file
  uint32_t header = 0;  // of all that is before the data
  std::map<std::string, uint32_t> tensors;
};

// Writes and fsyncs a new file, and sums it up on the way; `begin` and `end` of the tensors are ignored. On an Error
// the file may be there, incomplete.
FileChecksums write_safetensors(const Directory& folder, const std::string& name,
                                const std::vector<StoredTensor>& tensors,
                                const std::map<std::string, std::string>& metadata, const TensorSource& source);

}  // namespace whale
