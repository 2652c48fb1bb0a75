// For tests of checkpoints: a small one whose every value follows from one number.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/checkpoint.h"

namespace whale::kit {

// In memory where that is possible: these tests save thousands of times.
struct TestFolder {
  std::filesystem::path path;
  explicit TestFolder(bool in_memory = true) {
    std::string name =
        (in_memory && access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + std::string("/whale_test_XXXXXX");
    path = mkdtemp(name.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path); }
};

inline CheckpointPart part(const std::vector<std::pair<std::string, Dims>>& tensors, float value) {
  CheckpointPart out;
  for (const auto& [name, dims] : tensors) out.tensors.push_back({name, DType::kF32, dims, 0, 0});
  out.source = [value](size_t index, uint64_t offset, void* to, size_t bytes) {
    auto* floats = static_cast<float*>(to);
    for (size_t i = 0; i < bytes / 4; ++i)
      floats[i] = value + static_cast<float>(index) + static_cast<float>(offset / 4 + i) / 1024;
  };
  return out;
}

inline void write(const std::string& directory, int64_t value, const FaultProbe& probe = {}) {
  const auto v = static_cast<float>(value);
  write_checkpoint(directory, {"model", 7, value, 1, 0.5, {}, 0},
                   part({{"w", {300, 5}}, {"b", {5}}, {"none", {0, 4}}}, v), part({{"w/m", {300, 5}}}, v), probe);
}

// The number that the checkpoint was written with; every byte of it has been compared.
inline int64_t read(const std::string& directory) {
  const Checkpoint c = open_checkpoint(directory);
  c.verify();
  const auto check = [&](const StoredTensors& file, const char* name, float first) {
    const StoredTensor* tensor = file.find(name);
    REQUIRE(tensor != nullptr);
    std::vector<float> data(tensor->bytes() / 4);
    file.read(*tensor, 0, data.data(), tensor->bytes());
    for (size_t i = 0; i < data.size(); ++i) REQUIRE(data[i] == first + static_cast<float>(i) / 1024);
  };
  const auto value = static_cast<float>(c.index.meta.iteration);
  check(*c.model, "w", value);
  check(*c.model, "b", value + 1);
  check(*c.optimizer, "w/m", value);
  return c.index.meta.iteration;
}

inline std::string content(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void put(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// Code and message of the Error that f throws; no Error fails the test.
template <class F>
Error error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e;
  }
  FAIL("no error");
  return internal("no error");
}
inline bool says(const Error& e, Code code, const std::string& words) {
  INFO(e.message());
  CHECK(e.code() == code);
  CHECK(e.message().find(words) != std::string::npos);
  return e.code() == code && e.message().find(words) != std::string::npos;
}

}  // namespace whale::kit
