#include "checkpoint/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/watch.h"

namespace whale {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // as the safetensors package
constexpr size_t kBlockBytes = 1 << 20;
constexpr uint64_t kAlignment = 64;

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kNames[] = {
    {DType::kF32, "F32"}, {DType::kF64, "F64"}, {DType::kBF16, "BF16"}, {DType::kF16, "F16"},   {DType::kI32, "I32"},
    {DType::kI64, "I64"}, {DType::kU8, "U8"},   {DType::kI8, "I8"},     {DType::kBool, "BOOL"}, {DType::kU16, "U16"}};

template <class... A>
[[noreturn]] void malformed(const std::string& path, fmt::format_string<A...> format, A&&... args) {
  throw error(Code::kDataLoss, "'{}' is not a valid safetensors file: {}", path,
              fmt::format(format, std::forward<A>(args)...));
}

const char* stored_name(DType dtype) {
  for (const DTypeName& row : kNames)
    if (row.dtype == dtype) return row.name;
  throw internal("no safetensors name for dtype {}", static_cast<int>(dtype));
}

uint64_t natural(const std::string& path, const std::string& name, const Json& value) {
  if (!value.is_number_unsigned()) malformed(path, "tensor '{}' has a number that is not a natural one", name);
  return value.get<uint64_t>();
}

StoredTensor parse_entry(const std::string& path, const std::string& name, const Json& entry, uint64_t data_bytes) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets") ||
      !entry["dtype"].is_string() || !entry["shape"].is_array() || !entry["data_offsets"].is_array() ||
      entry["data_offsets"].size() != 2)
    malformed(path, "tensor '{}' has no dtype, shape and data_offsets", name);
  StoredTensor tensor;
  tensor.name = name;
  const std::string dtype = entry["dtype"].get<std::string>();
  const auto row =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const DTypeName& r) { return dtype == r.name; });
  if (row == std::end(kNames))
    throw unimplemented("'{}': tensor '{}' has dtype '{}', which libwhale does not have", path, name, dtype);
  tensor.dtype = row->dtype;
  uint64_t bytes = static_cast<uint64_t>(size_of(tensor.dtype));
  bool empty = false;
  for (const Json& extent : entry["shape"]) {
    const uint64_t n = natural(path, name, extent);
    if (n > static_cast<uint64_t>(INT64_MAX)) malformed(path, "tensor '{}' has an extent of {}", name, n);
    tensor.dims.push_back(static_cast<int64_t>(n));
    empty = empty || n == 0;
    if (!empty && n > data_bytes / bytes) malformed(path, "tensor '{}' is larger than the file", name);
    bytes *= empty ? 1 : n;
  }
  if (empty) bytes = 0;
  tensor.begin = natural(path, name, entry["data_offsets"][0]);
  tensor.end = natural(path, name, entry["data_offsets"][1]);
  if (tensor.begin > tensor.end || tensor.end > data_bytes)
    malformed(path, "tensor '{}' lies at [{}, {}) of {} bytes", name, tensor.begin, tensor.end, data_bytes);
  if (tensor.bytes() != bytes)
    malformed(path, "tensor '{}' has {} bytes, its dtype and shape need {}", name, tensor.bytes(), bytes);
  return tensor;
}

// A name that is there twice is an error: which of the two is meant, nothing says.
Json parse_header(const std::string& path, std::string_view text) {
  std::set<std::string> names;
  std::string twice;
  const auto found = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key && !names.insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), found, false);
  if (!twice.empty()) malformed(path, "it holds tensor '{}' twice", twice);
  return json;
}

std::vector<StoredTensor> parse_tensors(const std::string& path, const Json& json, uint64_t data_bytes) {
  if (!json.is_object()) malformed(path, "its header is not a JSON object");
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : json.items())
    if (name != "__metadata__") tensors.push_back(parse_entry(path, name, entry, data_bytes));
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != at)
      malformed(path, "tensor '{}' begins at byte {}, expected {}: tensors overlap or leave a hole", tensor.name,
                tensor.begin, at);
    at = tensor.end;
  }
  if (at != data_bytes) malformed(path, "its tensors have {} bytes, it holds {}", at, data_bytes);
  return tensors;
}

}  // namespace

std::vector<StoredTensor> parse_safetensors_header(const std::string& path, const char* header, uint64_t header_bytes,
                                                   uint64_t data_bytes) {
  return parse_tensors(path, parse_header(path, {header, header_bytes}), data_bytes);
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) { read_header(nullptr); }
SafetensorsFile::SafetensorsFile(const Directory& folder, const std::string& name, const uint32_t* header)
    : file_(folder, name) {
  read_header(header);
}

void SafetensorsFile::read_header(const uint32_t* expected) {
  const uint64_t size = file_.size();
  if (size < 8) malformed(path(), "it has {} bytes", size);
  unsigned char prefix[8];
  file_.read(0, prefix, sizeof prefix);
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | prefix[i];
  if (header_bytes > size - 8 || header_bytes > kMaxHeaderBytes)
    malformed(path(), "its header claims {} bytes, the file has {}", header_bytes, size);
  std::string header(header_bytes, '\0');
  file_.read(8, header.data(), header.size());
  data_begin_ = 8 + header_bytes;
  header_checksum_ = crc32c(header.data(), header.size(), crc32c(prefix, sizeof prefix));
  Json json;
  try {
    json = parse_header(path(), header);
    tensors_ = parse_tensors(path(), json, size - data_begin_);
  } catch (const Error& e) {
    if (expected == nullptr || *expected == header_checksum_) throw;
    throw error(Code::kDataLoss, "{} (its header is damaged: it has another checksum than when it was saved)",
                e.message());
  }
  if (json.contains("__metadata__") && json["__metadata__"].is_object())
    for (const auto& [key, value] : json["__metadata__"].items())
      if (value.is_string()) metadata_[key] = value.get<std::string>();
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  const auto at = std::find_if(tensors_.begin(), tensors_.end(), [&](const StoredTensor& t) { return t.name == name; });
  return at == tensors_.end() ? nullptr : &*at;
}

std::string SafetensorsFile::metadata(const std::string& key) const {
  const auto at = metadata_.find(key);
  return at == metadata_.end() ? std::string() : at->second;
}

uint32_t SafetensorsFile::checksum(const StoredTensor& tensor) const {
  std::vector<char> block(std::min<uint64_t>(kBlockBytes, tensor.bytes()));
  uint32_t crc = 0;
  for (uint64_t at = 0; at < tensor.bytes(); at += kBlockBytes) {
    Watch::look();
    const size_t n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, tensor.bytes() - at));
    read(tensor, at, block.data(), n);
    crc = crc32c(block.data(), n, crc);
  }
  return crc;
}

void SafetensorsFile::read(const StoredTensor& tensor, uint64_t offset, void* to, size_t bytes) const {
  file_.read(data_begin_ + tensor.begin + offset, to, bytes);
}

FileChecksums write_safetensors(const Directory& folder, const std::string& name,
                                const std::vector<StoredTensor>& tensors,
                                const std::map<std::string, std::string>& metadata, const TensorSource& source) {
  // Widest elements first, as the safetensors package does, so that every tensor is aligned to its type.
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size_of(tensors[a].dtype) > size_of(tensors[b].dtype); });

  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const size_t i : order) {
    const uint64_t bytes = static_cast<uint64_t>(element_count(tensors[i].dims) * size_of(tensors[i].dtype));
    header[tensors[i].name] = {
        {"dtype", stored_name(tensors[i].dtype)}, {"shape", tensors[i].dims}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
  std::string prefix(8, '\0');
  for (size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i) & 0xFF);

  FileChecksums written;
  written.bytes = prefix.size() + text.size() + at;
  written.header = crc32c(text.data(), text.size(), crc32c(prefix.data(), prefix.size()));
  OutputFile file(folder, name);
  file.write(prefix.data(), prefix.size());
  file.write(text.data(), text.size());
  std::vector<char> block(kBlockBytes);
  for (const size_t i : order) {
    const uint64_t bytes = static_cast<uint64_t>(element_count(tensors[i].dims) * size_of(tensors[i].dtype));
    uint32_t& crc = written.tensors[tensors[i].name];
    for (uint64_t offset = 0; offset < bytes; offset += kBlockBytes) {
      Watch::look();
      const size_t n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, bytes - offset));
      source(i, offset, block.data(), n);
      crc = crc32c(block.data(), n, crc);
      file.write(block.data(), n);
    }
  }
  file.finish();
  return written;
}

}  // namespace whale
