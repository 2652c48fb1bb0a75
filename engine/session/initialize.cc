#include "session/initialize.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <new>
#include <numbers>

#include "base/error.h"
#include "base/float_env.h"
#include "base/philox.h"
#include "base/side_by_side.h"
#include "checkpoint/safetensors.h"
#include "data/convert.h"

namespace whale {
namespace {

constexpr size_t kChunk = 1 << 16;     // elements that one thread makes at a time
constexpr double kCutSigmas = 2;       // of the truncated normal
constexpr uint64_t kMaxAttempts = 64;  // 0.0455 of the draws are beyond the cut; to the 64th power that is nothing

float unit(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }  // [0, 1)

// Box-Muller: words (0, 1) give elements (0, 1), words (2, 3) give (2, 3).
std::array<float, 4> normals(const PhiloxBlock& words) {
  std::array<float, 4> z;
  for (size_t pair = 0; pair < 4; pair += 2) {
    const float radius = std::sqrt(-2.0f * std::log(unit(words[pair]) + 0x1p-24f));  // of (0, 1]
    const float angle = 2.0f * std::numbers::pi_v<float> * unit(words[pair + 1]);
    z[pair] = radius * std::cos(angle);
    z[pair + 1] = radius * std::sin(angle);
  }
  return z;
}

float truncated(uint64_t seed, uint64_t key, uint64_t element, float z) {
  for (uint64_t attempt = 1; std::abs(z) > static_cast<float>(kCutSigmas) && attempt < kMaxAttempts; ++attempt)
    z = normals(RandomStream(seed, key, attempt).block(element / 4))[element % 4];
  return std::clamp(z, -static_cast<float>(kCutSigmas), static_cast<float>(kCutSigmas));
}

void random_values(const Initializer& init, uint64_t seed, uint64_t key, uint64_t begin, size_t count, float* to) {
  const RandomStream stream(seed, key, 0);
  const float a = static_cast<float>(init.a), b = static_cast<float>(init.b);
  for (size_t i = 0; i < count; i += 4) {
    const PhiloxBlock words = stream.block((begin + i) / 4);
    std::array<float, 4> values;
    if (init.kind == InitKind::kUniform) {
      const float below = b > a ? std::nextafter(b, a) : a;
      for (size_t k = 0; k < 4; ++k) values[k] = std::min(a + (b - a) * unit(words[k]), std::max(below, a));
    } else {
      values = normals(words);
      for (size_t k = 0; k < 4; ++k) {
        if (init.kind == InitKind::kTruncatedNormal) values[k] = truncated(seed, key, begin + i + k, values[k]);
        values[k] = a + b * values[k];
      }
    }
    std::copy_n(values.begin(), std::min<size_t>(4, count - i), to + i);
  }
}

// Tells of a number that became none.
template <class Tell>
void check_range(DType from_type, const void* from, DType to_type, const void* to, size_t n, const Tell& tell) {
  if (from_type == to_type || !is_float(to_type)) return;
  std::vector<double> before(n), after(n);
  convert(from_type, from, DType::kF64, before.data(), n);
  convert(to_type, to, DType::kF64, after.data(), n);
  for (size_t i = 0; i < n; ++i)
    if (std::isfinite(before[i]) && !std::isfinite(after[i])) tell(i, before[i]);
}

void fill_from_file(Machine& machine, size_t index, const SafetensorsFile& file) {
  const PlanVariable& variable = machine.plan().variables[index];
  const std::string key = variable.init.key.empty() ? variable.name : variable.init.key;
  const StoredTensor* stored = file.find(key);
  if (stored == nullptr)
    throw error(Code::kNotFound, "'{}' has no tensor '{}', the initial value of '{}'", file.path(), key, variable.name);
  if (stored->dims != variable.dims || !convertible(stored->dtype, variable.dtype))
    throw invalid("'{}': tensor '{}' is {} {}, variable '{}' needs {} {}", file.path(), key, name_of(stored->dtype),
                  to_string(stored->dims), variable.name, name_of(variable.dtype), to_string(variable.dims));
  const uint64_t count = static_cast<uint64_t>(element_count(variable.dims));
  const size_t from_bytes = static_cast<size_t>(size_of(stored->dtype)),
               to_bytes = static_cast<size_t>(size_of(variable.dtype));
  std::vector<char> from(kChunk * from_bytes), to(kChunk * to_bytes);
  for (uint64_t at = 0; at < count; at += kChunk) {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(kChunk, count - at));
    file.read(*stored, at * from_bytes, from.data(), n * from_bytes);
    convert(stored->dtype, from.data(), variable.dtype, to.data(), n);
    check_range(stored->dtype, from.data(), variable.dtype, to.data(), n, [&](size_t i, double value) {
      throw invalid("'{}': element {} of tensor '{}' is {}, which variable '{}' of {} cannot hold", file.path(), at + i,
                    key, value, variable.name, name_of(variable.dtype));
    });
    machine.write_variable(index, at * to_bytes, to.data(), n * to_bytes);
  }
}

bool stays_zero(const Initializer& init) {
  return init.kind == InitKind::kZeros || (init.kind == InitKind::kConstant && init.a == 0 && !std::signbit(init.a));
}

}  // namespace

void initial_values(const Initializer& init, uint64_t seed, std::string_view name, DType dtype, uint64_t begin,
                    size_t count, void* to) {
  switch (init.kind) {
    case InitKind::kZeros: return fill(dtype, to, count, 0);
    case InitKind::kOnes: return fill(dtype, to, count, 1);
    case InitKind::kConstant: return fill(dtype, to, count, init.a);
    case InitKind::kFile: throw internal("values of a file are read, not made");
    case InitKind::kData: {
      if (init.data == nullptr || (begin + count) * static_cast<uint64_t>(size_of(init.data_type)) > init.data->size())
        throw invalid("the initial values of '{}' end before its element {}", name, begin + count - 1);
      const auto* from = init.data->data() + begin * static_cast<uint64_t>(size_of(init.data_type));
      convert(init.data_type, from, dtype, to, count);
      check_range(init.data_type, from, dtype, to, count, [&](size_t i, double value) {
        throw invalid("element {} of the initial values of '{}' is {}, which {} cannot hold", begin + i, name, value,
                      name_of(dtype));
      });
      return;
    }
    default: break;
  }
  if (!is_float(dtype))
    throw invalid("variable '{}' is {}; random initializers make floating-point values", name, name_of(dtype));
  if (dtype == DType::kF32) return random_values(init, seed, hash_name(name), begin, count, static_cast<float*>(to));
  std::vector<float> values(count);
  random_values(init, seed, hash_name(name), begin, count, values.data());
  convert(DType::kF32, values.data(), dtype, to, count);
}

void initialize_variables(Machine& machine, uint64_t seed, size_t threads, const InitFiles& init_files) {
  struct Chunk {
    size_t variable;
    uint64_t begin;
    size_t count;
  };
  std::vector<Chunk> chunks;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files;
  const auto& variables = machine.plan().variables;
  for (size_t v = 0; v < variables.size(); ++v) {
    const Initializer& init = variables[v].init;
    if (init.kind == InitKind::kFile) {
      const std::string path = init_path(init.file, init_files, variables[v].name);
      auto& file = files[path];
      if (!file) file = std::make_unique<SafetensorsFile>(path);
      fill_from_file(machine, v, *file);
    } else if (!stays_zero(init)) {
      const uint64_t count = static_cast<uint64_t>(element_count(variables[v].dims));
      for (uint64_t at = 0; at < count; at += kChunk)
        chunks.push_back({v, at, static_cast<size_t>(std::min<uint64_t>(kChunk, count - at))});
    }
  }
  side_by_side(chunks.size(), threads, [&](size_t i, double) {
    const DefaultFloatEnv env;
    const Chunk& chunk = chunks[i];
    const PlanVariable& variable = variables[chunk.variable];
    const size_t bytes = static_cast<size_t>(size_of(variable.dtype));
    try {
      std::vector<char> values(chunk.count * bytes);
      initial_values(variable.init, seed, variable.name, variable.dtype, chunk.begin, chunk.count, values.data());
      machine.write_variable(chunk.variable, chunk.begin * bytes, values.data(), values.size());
    } catch (const std::bad_alloc&) {
      throw error(Code::kResourceExhausted, "no memory for {} initial values", chunk.count);
    }
  });
}

}  // namespace whale
