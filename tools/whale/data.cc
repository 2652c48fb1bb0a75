#include "data.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

using Json = nlohmann::json;

struct DTypeRow {
  const char* name;
  const char* numpy;
  const char* safetensors;
  const char* npy;  // npy descriptor without byte order
  int dtype;
  size_t size;
};
constexpr DTypeRow kDTypes[] = {
    {"f32", "float32", "F32", "f4", WHALE_F32, 4},    {"f64", "float64", "F64", "f8", WHALE_F64, 8},
    {"bf16", "bfloat16", "BF16", "-", WHALE_BF16, 2}, {"f16", "float16", "F16", "f2", WHALE_F16, 2},
    {"i32", "int32", "I32", "i4", WHALE_I32, 4},      {"i64", "int64", "I64", "i8", WHALE_I64, 8},
    {"u8", "uint8", "U8", "u1", WHALE_U8, 1},         {"i8", "int8", "I8", "i1", WHALE_I8, 1},
    {"bool", "bool", "BOOL", "b1", WHALE_BOOL, 1},    {"u16", "uint16", "U16", "u2", WHALE_U16, 2},
};
const DTypeRow& row_of(int dtype) {
  for (const DTypeRow& row : kDTypes)
    if (row.dtype == dtype) return row;
  throw Failure("unknown dtype " + std::to_string(dtype));
}

int64_t count(const std::vector<int64_t>& dims) {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

Array make_array(const InputSpec& spec) {
  Array array{spec.name, spec.dtype, spec.dims, {}};
  array.bytes.resize(static_cast<size_t>(count(spec.dims)) * size_of(spec.dtype));
  return array;
}

void store_int(Array& array, int64_t index, int64_t value) {
  uint8_t* at = array.bytes.data() + static_cast<size_t>(index) * size_of(array.dtype);
  switch (array.dtype) {
    case WHALE_I64: std::memcpy(at, &value, 8); break;
    case WHALE_I32: {
      const auto v = static_cast<int32_t>(value);
      std::memcpy(at, &v, 4);
      break;
    }
    case WHALE_F32: {
      const auto v = static_cast<float>(value);
      std::memcpy(at, &v, 4);
      break;
    }
    case WHALE_F64: {
      const auto v = static_cast<double>(value);
      std::memcpy(at, &v, 8);
      break;
    }
    default: *at = static_cast<uint8_t>(value);
  }
}

// Random numbers: floats normal, integers below the limit. A pool of batches, so that a loss can fall.
class Synthetic : public DataSource {
 public:
  Synthetic(std::vector<InputSpec> inputs, uint64_t seed) : inputs_(std::move(inputs)), random_(seed) {}
  Batch next() override {
    constexpr size_t kPool = 8;
    if (pool_.size() < kPool) pool_.push_back(make());
    return pool_[step_++ % kPool];
  }

 private:
  Batch make() {
    Batch batch;
    std::normal_distribution<double> normal;
    for (const InputSpec& spec : inputs_) {
      Array array = make_array(spec);
      const int64_t n = count(spec.dims);
      const bool floating = spec.dtype == WHALE_F32 || spec.dtype == WHALE_F64;
      for (int64_t i = 0; i < n; ++i) {
        if (floating) {
          const double v = normal(random_);
          if (spec.dtype == WHALE_F32) {
            const auto f = static_cast<float>(v);
            std::memcpy(array.bytes.data() + i * 4, &f, 4);
          } else {
            std::memcpy(array.bytes.data() + i * 8, &v, 8);
          }
        } else {
          store_int(array, i, static_cast<int64_t>(random_() % static_cast<uint64_t>(spec.limit > 0 ? spec.limit : 2)));
        }
      }
      batch.push_back(std::move(array));
    }
    return batch;
  }
  std::vector<InputSpec> inputs_;
  std::mt19937_64 random_;
  std::vector<Batch> pool_;
  size_t step_ = 0;
};

// Windows of a text's bytes.
class Text : public DataSource {
 public:
  Text(std::string text, std::vector<InputSpec> inputs, uint64_t seed)
      : text_(std::move(text)), inputs_(std::move(inputs)), random_(seed) {
    for (const InputSpec& spec : inputs_) {
      if (spec.dims.size() != 2)
        throw Failure("a text file feeds token models with inputs [batch, sequence]; input '" + spec.name +
                      "' is not one. Use .npz or .safetensors");
      length_ = std::max(length_, spec.dims[1]);
      if (spec.limit > 0)
        for (const char c : text_)
          if (static_cast<uint8_t>(c) >= spec.limit)
            throw Failure("the text has byte " + std::to_string(static_cast<uint8_t>(c)) + ", input '" + spec.name +
                          "' takes values below " + std::to_string(spec.limit) + ": make the model with --vocab 256");
      has_source_ |= spec.name == "source";
      has_tokens_ |= spec.name == "tokens";
    }
    if (!has_tokens_)
      throw Failure(
          "a text file feeds models with an input named 'tokens'; this one has none. Use .npz or .safetensors");
    if (static_cast<int64_t>(text_.size()) < 2 * length_ + 2)
      throw Failure("the text is shorter than two windows of " + std::to_string(length_) + " bytes");
  }
  Batch next() override {
    Batch batch;
    for (const InputSpec& spec : inputs_) batch.push_back(make_array(spec));
    const int64_t samples = inputs_[0].dims[0];
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t at = static_cast<int64_t>(random_() % (text_.size() - static_cast<size_t>(2 * length_ + 1)));
      for (size_t i = 0; i < inputs_.size(); ++i) fill(batch[i], inputs_[i], s, at);
    }
    return batch;
  }

 private:
  // source: the window before; tokens: the window; targets: the window one byte later.
  void fill(Array& array, const InputSpec& spec, int64_t sample, int64_t at) {
    const int64_t n = spec.dims[1];
    const int64_t shift = (has_source_ && spec.name != "source" ? length_ : 0) + (spec.name == "targets" ? 1 : 0);
    for (int64_t t = 0; t < n; ++t)
      store_int(array, sample * n + t, static_cast<uint8_t>(text_[static_cast<size_t>(at + shift + t)]));
  }
  std::string text_;
  std::vector<InputSpec> inputs_;
  std::mt19937_64 random_;
  int64_t length_ = 0;
  bool has_source_ = false, has_tokens_ = false;
};

// Arrays with one row a sample, cut into batches in order; the last one may be smaller.
class Arrays : public DataSource {
 public:
  Arrays(std::map<std::string, Array> arrays, std::vector<InputSpec> inputs)
      : arrays_(std::move(arrays)), inputs_(std::move(inputs)) {
    for (const InputSpec& spec : inputs_) {
      const auto found = arrays_.find(spec.name);
      if (found == arrays_.end()) throw Failure("the file has no array named like input '" + spec.name + "'");
      const Array& array = found->second;
      if (array.dtype != spec.dtype)
        throw Failure("array '" + spec.name + "' is " + row_of(array.dtype).numpy + ", the input takes " +
                      row_of(spec.dtype).numpy);
      const bool batched = spec.batch_dim == 0;
      if (spec.batch_dim > 0)
        throw Failure("input '" + spec.name + "' counts samples in dimension " + std::to_string(spec.batch_dim) +
                      "; files feed inputs that count them in dimension 0");
      if (array.dims.size() != spec.dims.size() ||
          !std::equal(array.dims.begin() + batched, array.dims.end(), spec.dims.begin() + batched))
        throw Failure("array '" + spec.name + "' does not have the shape of the input");
      if (batched) {
        if (rows_ >= 0 && rows_ != array.dims[0]) throw Failure("the arrays have different numbers of samples");
        rows_ = array.dims[0];
      }
    }
    if (rows_ <= 0) throw Failure("the file has no samples");
  }
  Batch next() override {
    Batch batch;
    if (at_ >= rows_) at_ = 0;
    const int64_t take = std::min(batch_of(inputs_), rows_ - at_);
    for (const InputSpec& spec : inputs_) {
      const Array& from = arrays_.at(spec.name);
      Array array{spec.name, spec.dtype, from.dims, {}};
      if (spec.batch_dim == 0) {
        array.dims[0] = take;
        const size_t row = from.bytes.size() / static_cast<size_t>(rows_);
        array.bytes.assign(from.bytes.begin() + static_cast<int64_t>(row) * at_,
                           from.bytes.begin() + static_cast<int64_t>(row) * (at_ + take));
      } else {
        array.bytes = from.bytes;
      }
      batch.push_back(std::move(array));
    }
    at_ += take;
    return batch;
  }

 private:
  std::map<std::string, Array> arrays_;
  std::vector<InputSpec> inputs_;
  int64_t rows_ = -1, at_ = 0;
};

template <class T>
T read_le(const std::string& data, size_t at, const std::string& path) {
  if (at + sizeof(T) > data.size()) throw Failure(path + " ends early");
  T value;
  std::memcpy(&value, data.data() + at, sizeof(T));
  return value;
}

Array parse_npy(const std::string& name, const std::string& data, const std::string& path) {
  if (data.size() < 10 || data.compare(0, 6, "\x93NUMPY") != 0)
    throw Failure(path + ": '" + name + "' is not an npy array");
  const bool wide = data[6] >= 2;
  const size_t header_size = wide ? read_le<uint32_t>(data, 8, path) : read_le<uint16_t>(data, 8, path);
  const size_t start = (wide ? 12 : 10) + header_size;
  if (start > data.size()) throw Failure(path + ": '" + name + "' ends early");
  const std::string header = data.substr(wide ? 12 : 10, header_size);
  if (header.find("'fortran_order': True") != std::string::npos)
    throw Failure(path + ": '" + name + "' is in Fortran order; save np.ascontiguousarray(x)");
  Array array{name, 0, {}, {}};
  for (const DTypeRow& row : kDTypes)
    if (header.find("'" + std::string("<") + row.npy + "'") != std::string::npos ||
        header.find("'|" + std::string(row.npy) + "'") != std::string::npos)
      array.dtype = row.dtype;
  if (array.dtype == 0) throw Failure(path + ": '" + name + "' has a dtype that no input takes");
  const size_t open = header.find('(', header.find("'shape'")), close = header.find(')', open);
  if (open == std::string::npos || close == std::string::npos) throw Failure(path + ": '" + name + "' has no shape");
  std::stringstream dims(header.substr(open + 1, close - open - 1));
  for (std::string each; std::getline(dims, each, ',');)
    if (each.find_first_of("0123456789") != std::string::npos) array.dims.push_back(std::stoll(each));
  const size_t bytes = static_cast<size_t>(count(array.dims)) * size_of(array.dtype);
  if (data.size() - start != bytes) throw Failure(path + ": '" + name + "' has the wrong number of bytes");
  array.bytes.assign(data.begin() + static_cast<int64_t>(start), data.end());
  return array;
}

// numpy.savez writes a zip whose members are stored, not compressed. The central directory at the end lists them.
std::map<std::string, Array> read_npz(const std::string& path) {
  const std::string data = read_file(path);
  const size_t end = data.rfind("PK\x05\x06");
  if (end == std::string::npos) throw Failure(path + " is not an npz file");
  const auto members = read_le<uint16_t>(data, end + 10, path);
  size_t at = read_le<uint32_t>(data, end + 16, path);
  std::map<std::string, Array> arrays;
  for (int i = 0; i < members; ++i) {
    if (read_le<uint32_t>(data, at, path) != 0x02014b50u) throw Failure(path + " has a broken directory");
    const auto method = read_le<uint16_t>(data, at + 10, path);
    const auto size = read_le<uint32_t>(data, at + 20, path);
    const auto name_size = read_le<uint16_t>(data, at + 28, path), extra = read_le<uint16_t>(data, at + 30, path),
               comment = read_le<uint16_t>(data, at + 32, path);
    const size_t local = read_le<uint32_t>(data, at + 42, path);
    if (at + 46 + name_size > data.size()) throw Failure(path + " ends early");
    std::string name = data.substr(at + 46, name_size);
    if (method != 0) throw Failure(path + " is compressed; write it with numpy.savez instead of savez_compressed");
    if (size == 0xFFFFFFFFu) throw Failure(path + " has an array of 4 GiB or more; use .safetensors");
    const size_t start =
        local + 30 + read_le<uint16_t>(data, local + 26, path) + read_le<uint16_t>(data, local + 28, path);
    if (start + size > data.size()) throw Failure(path + " ends early");
    if (name.size() > 4 && name.ends_with(".npy")) name.resize(name.size() - 4);
    arrays[name] = parse_npy(name, data.substr(start, size), path);
    at += 46u + name_size + extra + comment;
  }
  return arrays;
}

std::map<std::string, Array> read_safetensors(const std::string& path) {
  const std::string data = read_file(path);
  const auto header_size = read_le<uint64_t>(data, 0, path);
  if (header_size > data.size() - 8) throw Failure(path + " is not a safetensors file");
  const Json header =
      Json::parse(data.begin() + 8, data.begin() + 8 + static_cast<int64_t>(header_size), nullptr, false);
  if (!header.is_object()) throw Failure(path + " has a broken header");
  std::map<std::string, Array> arrays;
  for (const auto& [name, each] : header.items()) {
    if (name == "__metadata__") continue;
    Array array{name, 0, {}, {}};
    try {
      for (const DTypeRow& row : kDTypes)
        if (each.at("dtype").get<std::string>() == row.safetensors) array.dtype = row.dtype;
      array.dims = each.at("shape").get<std::vector<int64_t>>();
      const auto begin = each.at("data_offsets").at(0).get<uint64_t>(),
                 end = each.at("data_offsets").at(1).get<uint64_t>();
      const uint64_t start = 8 + header_size;
      if (array.dtype == 0 || end < begin || end > data.size() - start)
        throw Failure(path + ": '" + name + "' is broken");
      array.bytes.assign(data.begin() + static_cast<int64_t>(start + begin),
                         data.begin() + static_cast<int64_t>(start + end));
    } catch (const Json::exception& error) {
      throw Failure(path + ": '" + name + "': " + error.what());
    }
    if (array.bytes.size() != static_cast<size_t>(count(array.dims)) * size_of(array.dtype))
      throw Failure(path + ": '" + name + "' has the wrong number of bytes");
    arrays[name] = std::move(array);
  }
  return arrays;
}

}  // namespace

size_t size_of(int dtype) { return row_of(dtype).size; }

int parse_dtype(const std::string& name) {
  for (const DTypeRow& row : kDTypes)
    if (name == row.name || name == row.numpy) return row.dtype;
  throw Failure("unknown dtype '" + name + "'");
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Failure("cannot open '" + path + "'");
  std::stringstream content;
  content << file.rdbuf();
  return std::move(content).str();
}

std::vector<InputSpec> inputs_of(const whale_plan* plan, const std::string& entry) {
  const Json json = Json::parse(text(whale_plan_json, plan));
  std::vector<InputSpec> inputs;
  for (const Json& each : json.at("entries")) {
    if (each.at("name") != entry) continue;
    for (const Json& input : each.at("inputs"))
      inputs.push_back({input.at("name"), parse_dtype(input.at("dtype")), input.at("dims"), input.at("batch_dim"),
                        input.value("limit", int64_t{0})});
    return inputs;
  }
  throw Failure("the plan has no '" + entry + "' entry: its graph has no loss to minimize");
}

int64_t batch_of(const std::vector<InputSpec>& inputs) {
  for (const InputSpec& spec : inputs)
    if (spec.batch_dim >= 0) return spec.dims[static_cast<size_t>(spec.batch_dim)];
  return 1;
}

int64_t items_of(const std::vector<InputSpec>& inputs) {
  for (const InputSpec& spec : inputs)
    if (spec.name == "tokens") return count(spec.dims);
  return batch_of(inputs);
}

const char* item_name(const std::vector<InputSpec>& inputs) {
  for (const InputSpec& spec : inputs)
    if (spec.name == "tokens") return "tokens";
  return "samples";
}

std::unique_ptr<DataSource> open_data(const std::string& path, const std::vector<InputSpec>& inputs, uint64_t seed) {
  if (path.empty()) return std::make_unique<Synthetic>(inputs, seed);
  if (path.ends_with(".npz")) return std::make_unique<Arrays>(read_npz(path), inputs);
  if (path.ends_with(".safetensors")) return std::make_unique<Arrays>(read_safetensors(path), inputs);
  return std::make_unique<Text>(read_file(path), inputs, seed);
}

}  // namespace tool
