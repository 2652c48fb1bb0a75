#include "variables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

constexpr size_t kBlock = 4096;

// SplitMix64 (Steele et al., 2014) of a counter, as a number in [-1, 1].
double noise(uint64_t key, uint64_t counter) {
  uint64_t z = key + counter * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-52 - 1;
}
uint64_t key_of(uint64_t seed, uint64_t step, uint64_t index) {
  return (seed * 1000003 + step) * 0x2545f4914f6cdd1du + index * 0xd1342543de82ef95u;
}

std::string low_of(const Variable& variable) { return variable.name + "/low"; }

Tensor like(const whale_tensor* tensor, int dtype) {
  return own<Tensor>(whale_tensor_create, static_cast<int32_t>(dtype), whale_tensor_dims(tensor),
                     whale_tensor_rank(tensor));
}

}  // namespace

std::vector<Variable> variables_of(const Runner& runner) {
  const nlohmann::json rows = nlohmann::json::parse(text(whale_session_variables_json, runner.session()));
  std::map<std::string, int64_t> copies;
  for (const auto& row : rows) copies.emplace(row.at("name"), std::ssize(row.at("copies")));
  std::vector<Variable> out;
  for (const auto& row : rows) {
    Variable v{.name = row.at("name"), .role = row.at("role"), .copies = row.at("copies")};
    const auto low = copies.find(low_of(v));
    v.halves = v.role == "parameter" && low != copies.end();
    if (v.halves) v.low_copies = low->second;
    const bool second = v.name.ends_with("/low") && row.at("dtype") == "u16";
    if (!second) out.push_back(std::move(v));
  }
  return out;
}

std::string kind_of(const Variable& variable) {
  const std::string kind = variable.name.substr(variable.name.rfind('/') + 1);
  return kind == "row" || kind == "col" ? "v" : kind;  // means of squares, as those of tensors without factors
}

std::vector<Variable> whole_variables(std::vector<Variable> variables) {
  for (Variable& v : variables) v.halves = false;
  return variables;
}

Tensor read_value(const Runner& runner, const Variable& variable, int64_t copy) {
  Tensor value = runner.read(variable.name, copy);
  if (!variable.halves) return value;
  const Tensor low = runner.read(low_of(variable), std::min(copy, variable.low_copies - 1));
  Tensor whole = like(value.get(), WHALE_F32);
  const auto* a = static_cast<const uint16_t*>(whale_tensor_data(value.get()));
  const auto* b = static_cast<const uint16_t*>(whale_tensor_data(low.get()));
  auto* to = static_cast<uint32_t*>(whale_tensor_data(whole.get()));
  for (size_t i = 0; i < elements(value.get()); ++i) to[i] = uint32_t{a[i]} << 16 | b[i];
  return whole;
}

namespace {

Tensor converted(const whale_tensor* value, int dtype) {
  Tensor out = like(value, dtype);
  double block[kBlock];
  for (size_t begin = 0, n = elements(value); begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    load(value, begin, count, block);
    store(out.get(), begin, count, block);
  }
  return out;
}

}  // namespace

void write_wide(Runner& runner, const Variable& variable, const whale_tensor* value) {
  const int dtype = whale_tensor_dtype(value), wanted = whale_tensor_dtype(runner.read(variable.name).get());
  if (dtype == wanted) return runner.write(variable.name, value);
  runner.write(variable.name, converted(value, wanted).get());
}

void write_value(Runner& runner, const Variable& variable, const whale_tensor* value) {
  if (!variable.halves) return runner.write(variable.name, value);
  const Tensor high = like(value, WHALE_BF16), low = like(value, WHALE_U16);
  const auto* from = static_cast<const uint32_t*>(whale_tensor_data(value));
  auto* a = static_cast<uint16_t*>(whale_tensor_data(high.get()));
  auto* b = static_cast<uint16_t*>(whale_tensor_data(low.get()));
  for (size_t i = 0; i < elements(value); ++i)
    a[i] = static_cast<uint16_t>(from[i] >> 16), b[i] = static_cast<uint16_t>(from[i]);
  runner.write(variable.name, high.get());
  runner.write(low_of(variable), low.get());
}

void Shake::move(Runner& runner, const Variable& variable, size_t index, double scale) const {
  const Tensor value = read_value(runner, variable);
  const uint64_t key = key_of(seed_, step_, index);
  double block[kBlock];
  for (size_t begin = 0, n = elements(value.get()); begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    load(value.get(), begin, count, block);
    for (size_t i = 0; i < count; ++i) block[i] += scale * noise(key, begin + i);
    store(value.get(), begin, count, block);
  }
  write_value(runner, variable, value.get());
}

void Shake::add(Runner& runner, const std::vector<Variable>& variables) {
  ++step_;
  rms_.assign(variables.size(), 0);
  std::vector<char> moves(variables.size(), 0);
  for (size_t v = 0; v < variables.size(); ++v) {
    if (variables[v].role != "parameter") continue;
    const Tensor value = read_value(runner, variables[v]);
    if (!storable(whale_tensor_dtype(value.get()))) continue;
    const size_t n = elements(value.get());
    double block[kBlock], sum = 0;
    for (size_t begin = 0; begin < n; begin += kBlock) {
      const size_t count = std::min(kBlock, n - begin);
      load(value.get(), begin, count, block);
      for (size_t i = 0; i < count; ++i) sum += block[i] * block[i];
    }
    rms_[v] = n > 0 ? std::sqrt(sum / static_cast<double>(n)) : 0;
    moves[v] = n > 0;
  }
  const double largest = rms_.empty() ? 0 : *std::max_element(rms_.begin(), rms_.end());
  for (size_t v = 0; v < variables.size(); ++v) {
    if (moves[v] && alike_.contains(variables[v].name)) rms_[v] = largest;
    if (rms_[v] > 0) move(runner, variables[v], v, amplitude_ * rms_[v]);
  }
}

void Shake::take_off(Runner& runner, const std::vector<Variable>& variables) {
  for (size_t v = 0; v < variables.size(); ++v)
    if (rms_[v] > 0) move(runner, variables[v], v, -amplitude_ * rms_[v]);
}

Batch Shake::inputs(const Batch& batch) const {
  Batch out = batch;
  for (size_t k = 0; k < out.size(); ++k) {
    if (!storable(out[k].dtype)) continue;
    const Tensor view = own<Tensor>(whale_tensor_view, static_cast<int32_t>(out[k].dtype),
                                    static_cast<const int64_t*>(out[k].dims.data()), out[k].dims.size(),
                                    static_cast<void*>(out[k].bytes.data()));
    const uint64_t key = key_of(~seed_, step_, k);
    double block[kBlock];
    for (size_t begin = 0, n = elements(view.get()); begin < n; begin += kBlock) {
      const size_t count = std::min(kBlock, n - begin);
      load(view.get(), begin, count, block);
      for (size_t i = 0; i < count; ++i) block[i] *= 1 + amplitude_ * noise(key, begin + i);
      store(view.get(), begin, count, block);
    }
  }
  return out;
}

}  // namespace tool
