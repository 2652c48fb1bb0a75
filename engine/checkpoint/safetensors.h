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
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by offset
  const StoredTensor* find(const std::string& name) const;
  void read(const StoredTensor& tensor, uint64_t offset, void* to, size_t bytes) const;
  void read_through() const;  // every byte once: after this a failing disk is unlikely

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t data_begin_ = 0, data_bytes_ = 0;
  std::vector<StoredTensor> tensors_;
};

// The header of a file of `file_bytes` bytes, `header` being the JSON text. For the reader and for fuzzing.
std::vector<StoredTensor> parse_safetensors_header(const std::string& path, const char* header, uint64_t header_bytes,
                                                   uint64_t data_bytes);

// Data of tensor `index` from byte `offset` on, `bytes` of it, into `to`.
using TensorSource = std::function<void(size_t index, uint64_t offset, void* to, size_t bytes)>;

// Writes and fsyncs a new file; `begin` and `end` of the tensors are ignored. On an Error the file may be there,
// incomplete.
void write_safetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                       const std::map<std::string, std::string>& metadata, const TensorSource& source);

}  // namespace whale
