#include "data.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include <nlohmann/json.hpp>

#include "tensors.h"

namespace tool {
namespace {

using Json = nlohmann::json;

Array make_array(const InputSpec& spec) {
  Array array{spec.name, spec.dtype, spec.dims, {}};
  array.bytes.resize(static_cast<size_t>(count(spec.dims)) * size_of(spec.dtype));
  return array;
}

Tensor view_of(Array& array) {
  return own<Tensor>(whale_tensor_view, static_cast<int32_t>(array.dtype),
                     static_cast<const int64_t*>(array.dims.data()), array.dims.size(),
                     static_cast<void*>(array.bytes.data()));
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

bool is_integer(int dtype) {
  return dtype == WHALE_I64 || dtype == WHALE_I32 || dtype == WHALE_U8 || dtype == WHALE_I8;
}
int64_t int_at(const Array& array, int64_t index) {
  const uint8_t* at = array.bytes.data() + static_cast<size_t>(index) * size_of(array.dtype);
  int64_t wide = 0;
  int32_t narrow = 0;
  switch (array.dtype) {
    case WHALE_I64: std::memcpy(&wide, at, 8); return wide;
    case WHALE_I32: std::memcpy(&narrow, at, 4); return narrow;
    case WHALE_I8: return static_cast<int8_t>(*at);
    default: return *at;
  }
}
// The same numbers in another type of integers, or an error that begins with what the array `is`.
void to_integers(Array& array, int dtype, const std::string& is) {
  if (array.dtype == dtype) return;
  const int bits = dtype == WHALE_I64 ? 63 : dtype == WHALE_I32 ? 31 : dtype == WHALE_I8 ? 7 : 8;
  const int64_t most = bits == 63 ? INT64_MAX : (int64_t{1} << bits) - 1, least = dtype == WHALE_U8 ? 0 : -most - 1;
  Array out{array.name, dtype, array.dims, {}};
  const int64_t n = count(array.dims);
  out.bytes.resize(static_cast<size_t>(n) * size_of(dtype));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t value = int_at(array, i);
    if (value < least || value > most)
      throw Failure(is + "has " + std::to_string(value) + " as element " + std::to_string(i) +
                    " (counted from 0, in order); the input takes " + numpy_name(dtype) + ", " + std::to_string(least) +
                    " to " + std::to_string(most));
    store_int(out, i, value);
  }
  array = std::move(out);
}

// A pool of batches, so that a loss can fall.
class Synthetic : public DataSource {
 public:
  Synthetic(std::vector<InputSpec> inputs, Draw draw) : inputs_(std::move(inputs)), wide_(draw == Draw::kWide) {}
  Batch batch(uint64_t seed, int64_t iteration) override {
    constexpr int64_t kPool = 8;
    Pool& pool = pools_.try_emplace(seed, Pool{std::mt19937_64(seed), {}}).first->second;
    const auto at = static_cast<size_t>(iteration % kPool);
    while (pool.batches.size() <= at) pool.batches.push_back(make(pool.random, pool.batches.size()));
    return pool.batches[at];
  }

 private:
  struct Pool {
    std::mt19937_64 random;
    std::vector<Batch> batches;  // the first ones that it gives
  };
  Batch make(std::mt19937_64& random, size_t number) const {
    Batch batch;
    std::normal_distribution<double> normal(0, wide_ && number % 4 == 2 ? 4 : 1);
    for (const InputSpec& spec : inputs_) {
      Array array = make_array(spec);
      const int64_t n = count(spec.dims);
      if (storable(spec.dtype)) {
        std::vector<double> drawn(static_cast<size_t>(n));
        for (double& v : drawn) v = normal(random);
        const Tensor view = view_of(array);
        store(view.get(), 0, drawn.size(), drawn.data());
      }
      for (int64_t i = 0; i < n && !storable(spec.dtype); ++i) {
        const auto drawn = static_cast<int64_t>(random() % static_cast<uint64_t>(spec.limit > 0 ? spec.limit : 2));
        const bool left_out = wide_ && spec.ignored && i > 0 && random() % 6 == 0;  // never every one
        store_int(array, i, left_out ? *spec.ignored : drawn);
      }
      batch.push_back(std::move(array));
    }
    return batch;
  }
  std::vector<InputSpec> inputs_;
  bool wide_;
  std::map<uint64_t, Pool> pools_;  // by seed
};

// Windows of a text's bytes.
class Text : public DataSource {
 public:
  Text(std::string text, std::vector<InputSpec> inputs) : text_(std::move(text)), inputs_(std::move(inputs)) {
    for (const InputSpec& spec : inputs_) {
      if (spec.dims.size() != 2)
        throw Failure("a text file feeds token models with inputs [batch, sequence]; input '" + spec.name +
                      "' is not one. Use .npz or .safetensors");
      length_ = std::max(length_, spec.dims[1]);
      if (spec.limit > 0)
        for (const char c : text_)
          if (static_cast<uint8_t>(c) >= spec.limit)
            throw Failure("the text has byte " + std::to_string(static_cast<uint8_t>(c)) + ", input '" + spec.name +
                          "' takes values below " + std::to_string(spec.limit) +
                          ": for text it must take values below 256; with `whale model`: --vocab 256");
      has_source_ |= spec.name == "source";
      has_tokens_ |= spec.name == "tokens";
    }
    if (!has_tokens_)
      throw Failure(
          "a text file feeds models with an input named 'tokens'; this one has none. Use .npz or .safetensors");
    if (static_cast<int64_t>(text_.size()) < 2 * length_ + 2)
      throw Failure("the text is shorter than two windows of " + std::to_string(length_) + " bytes");
  }
  Batch batch(uint64_t seed, int64_t iteration) override {
    const auto of = static_cast<uint64_t>(iteration);
    std::seed_seq key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(of),
                      static_cast<uint32_t>(of >> 32)};
    std::mt19937_64 random(key);
    Batch batch;
    for (const InputSpec& spec : inputs_) batch.push_back(make_array(spec));
    const int64_t samples = inputs_[0].dims[0];
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t at = static_cast<int64_t>(random() % (text_.size() - static_cast<size_t>(2 * length_ + 1)));
      for (size_t i = 0; i < inputs_.size(); ++i) fill(batch[i], inputs_[i], s, at);
    }
    return batch;
  }

 private:
  // source: the window before; tokens: the window; targets: the window one byte later.
  void fill(Array& array, const InputSpec& spec, int64_t sample, int64_t at) {
    const int64_t n = spec.dims[1];
    const int64_t shift = (has_source_ && spec.name != "source" ? length_ : 0) + (spec.name == "targets" ? 1 : 0);
    for (int64_t t = 0; t < n; ++t) store_int(array, sample * n + t, static_cast<uint8_t>(text_[at + shift + t]));
  }
  std::string text_;
  std::vector<InputSpec> inputs_;
  int64_t length_ = 0;
  bool has_source_ = false, has_tokens_ = false;
};

// Arrays with one row a sample, cut into batches in order; the last one may be smaller.
class Arrays : public DataSource {
 public:
  Arrays(const std::string& path, std::map<std::string, Array> arrays, std::vector<InputSpec> inputs)
      : path_(path), arrays_(std::move(arrays)), inputs_(std::move(inputs)) {
    for (const InputSpec& spec : inputs_) {
      const auto found = arrays_.find(spec.name);
      if (found == arrays_.end()) {
        std::string names;
        for (const auto& [name, array] : arrays_) names += (names.empty() ? "" : ", ") + name;
        throw Failure("'" + shown(path) + "' has no array named like input '" + spec.name + "'; it has " +
                      (names.empty() ? "none" : shown(names)));
      }
      Array& array = found->second;
      if (!array.unread.empty()) throw Failure(array.unread);
      const std::string is = "array '" + spec.name + "' of '" + shown(path) + "' ";
      if (is_integer(array.dtype) && is_integer(spec.dtype))
        to_integers(array, spec.dtype, is);
      else if (array.dtype != spec.dtype)
        throw Failure(is + "is " + numpy_name(array.dtype) + ", the input takes " + numpy_name(spec.dtype) +
                      (is_integer(spec.dtype)
                           ? ": save whole numbers"
                           : "; save " + spec.name + ".astype(" + (spec.dtype == WHALE_BF16 ? "ml_dtypes." : "numpy.") +
                                 numpy_name(spec.dtype) + ")"));
      const bool batched = spec.batch_dim == 0;
      if (spec.batch_dim > 0)
        throw Failure("input '" + spec.name + "' counts samples in dimension " + std::to_string(spec.batch_dim) +
                      "; files feed inputs that count them in dimension 0");
      if (array.dims.size() != spec.dims.size() ||
          !std::equal(array.dims.begin() + batched, array.dims.end(), spec.dims.begin() + batched))
        throw Failure("array '" + spec.name + "' of '" + shown(path) + "' has shape " + shape_text(array.dims) +
                      ", the input takes " + shape_text(spec.dims) +
                      (batched ? ", with any number of samples first" : ""));
      if (batched) {
        if (rows_ >= 0 && rows_ != array.dims[0])
          throw Failure("array '" + spec.name + "' of '" + shown(path) + "' has " + std::to_string(array.dims[0]) +
                        " samples, '" + first_ + "' has " + std::to_string(rows_) + ": give all the same number");
        rows_ = array.dims[0];
        first_ = spec.name;
      }
    }
    if (first_.empty()) rows_ = 1;  // no input has samples: each step takes the whole file
    if (rows_ <= 0) throw Failure("'" + shown(path) + "' has no samples");
  }
  Batch batch(uint64_t, int64_t iteration) override {
    Batch batch;
    const auto [at, take] = rows_of(iteration);
    for (const InputSpec& spec : inputs_) {
      const Array& from = arrays_.at(spec.name);
      Array array{spec.name, spec.dtype, from.dims, {}};
      if (spec.batch_dim == 0) {
        array.dims[0] = take;
        const size_t row = from.bytes.size() / static_cast<size_t>(rows_);
        array.bytes.assign(from.bytes.begin() + static_cast<int64_t>(row) * at,
                           from.bytes.begin() + static_cast<int64_t>(row) * (at + take));
      } else {
        array.bytes = from.bytes;
      }
      batch.push_back(std::move(array));
    }
    return batch;
  }
  std::string place_of(int64_t iteration) const override {
    if (first_.empty()) return "every step takes the whole of '" + shown(path_) + "'";
    const auto [at, take] = rows_of(iteration);
    return "the batch of this step is rows " + std::to_string(at) + " to " + std::to_string(at + take - 1) + " of '" +
           shown(path_) + "', counted from 0; of inputs with samples the sample [0] is row " + std::to_string(at);
  }

 private:
  std::pair<int64_t, int64_t> rows_of(int64_t iteration) const {  // the first one, and how many
    const int64_t full = std::max<int64_t>(1, batch_of(inputs_)), batches = (rows_ - 1) / full + 1,
                  at = iteration % batches * full;
    return {at, std::min(full, rows_ - at)};
  }
  std::string path_;
  std::map<std::string, Array> arrays_;
  std::vector<InputSpec> inputs_;
  int64_t rows_ = -1;
  std::string first_;
};

// The one array of an npy file as that of the only input.
std::map<std::string, Array> named(const std::string& path, std::map<std::string, Array> arrays,
                                   const std::vector<InputSpec>& inputs) {
  if (inputs.size() != 1) {
    std::string names;
    for (const InputSpec& spec : inputs) names += (names.empty() ? "'" : ", '") + spec.name + "': ...";
    throw Failure("'" + shown(path) + "' holds one array, and this model has " + std::to_string(inputs.size()) +
                  " inputs; write them into one file: numpy.savez('data.npz', **{" + names + "})");
  }
  auto array = arrays.extract("");
  array.key() = inputs[0].name;
  arrays.insert(std::move(array));
  return arrays;
}

}  // namespace

std::vector<InputSpec> inputs_of(const whale_plan* plan, const std::string& entry) {
  const Json json = Json::parse(text(whale_plan_json, plan));
  std::vector<InputSpec> inputs;
  for (const Json& each : json.at("entries")) {
    if (each.at("name") != entry) continue;
    for (const Json& input : each.at("inputs"))
      inputs.push_back(
          {input.at("name"), parse_dtype(input.at("dtype")), input.at("dims"), input.at("batch_dim"),
           input.value("limit", int64_t{0}),
           input.at("ignored").is_null() ? std::nullopt : std::optional(input.at("ignored").get<int64_t>())});
    return inputs;
  }
  throw Failure("the plan has no '" + entry + "' entry: its graph has no loss to minimize");
}

Batch widen(const Batch& batch, const std::vector<InputSpec>& inputs) {
  Batch wide = batch;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (wide[i].dtype == inputs[i].dtype || !storable(wide[i].dtype) || !storable(inputs[i].dtype)) continue;
    const Tensor from = view_of(wide[i]);
    const Values values = values_of(from.get());
    Array to{wide[i].name, inputs[i].dtype, wide[i].dims, {}};
    to.bytes.resize(values.data.size() * size_of(to.dtype));
    const Tensor view = view_of(to);
    store(view.get(), 0, values.data.size(), values.data.data());
    wide[i] = std::move(to);
  }
  return wide;
}

int64_t batch_of(const std::vector<InputSpec>& inputs) {
  for (const InputSpec& spec : inputs)
    if (spec.batch_dim >= 0) return spec.dims[spec.batch_dim];
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

std::unique_ptr<DataSource> open_data(const std::string& path, const std::vector<InputSpec>& inputs, Draw draw) {
  if (path.empty()) return std::make_unique<Synthetic>(inputs, draw);
  std::string content = read_file(path);
  switch (kind_of_data(path, content)) {
    case DataKind::kNpz: return std::make_unique<Arrays>(path, read_npz(path, content), inputs);
    case DataKind::kSafetensors: return std::make_unique<Arrays>(path, read_safetensors(path, content), inputs);
    case DataKind::kNpy: return std::make_unique<Arrays>(path, named(path, read_npy(path, content), inputs), inputs);
    case DataKind::kText: break;
  }
  return std::make_unique<Text>(std::move(content), inputs);
}

}  // namespace tool
