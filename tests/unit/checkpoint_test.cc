// Checkpoints: what is written is read back, and a failure at any point leaves the previous one.
#include "checkpoint/checkpoint.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"

using namespace whale;  // NOLINT
namespace fs = std::filesystem;

namespace {

struct Folder {
  fs::path path;
  Folder() {
    char name[] = "/tmp/whale_checkpoint_XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { fs::remove_all(path); }
};

CheckpointPart part(const std::vector<std::pair<std::string, Dims>>& tensors, float value) {
  CheckpointPart out;
  for (const auto& [name, dims] : tensors) out.tensors.push_back({name, DType::kF32, dims, 0, 0});
  out.source = [value](size_t index, uint64_t offset, void* to, size_t bytes) {
    auto* floats = static_cast<float*>(to);
    for (size_t i = 0; i < bytes / 4; ++i)
      floats[i] = value + static_cast<float>(index) + static_cast<float>(offset / 4 + i) / 1024;
  };
  return out;
}

void write(const std::string& directory, float value, const FaultProbe& probe = {}) {
  write_checkpoint(directory, {"model", 7, static_cast<int64_t>(value), 1, 0.5},
                   part({{"w", {300, 5}}, {"b", {5}}, {"none", {0, 4}}}, value), part({{"w/m", {300, 5}}}, value),
                   probe);
}

// The whole content agrees with what write(value) stored.
void check_holds(const std::string& directory, float value) {
  const Checkpoint c = open_checkpoint(directory);
  CHECK(c.meta.iteration == static_cast<int64_t>(value));
  CHECK(c.meta.seed == 7);
  CHECK(c.meta.learning_rate == 0.5);
  const StoredTensor* w = c.model->find("w");
  REQUIRE(w != nullptr);
  CHECK(w->dims == Dims{300, 5});
  std::vector<float> data(1500);
  c.model->read(*w, 0, data.data(), data.size() * 4);
  CHECK(data[0] == value);
  CHECK(data[1499] == value + 1499.0f / 1024);
  REQUIRE(c.optimizer->find("w/m") != nullptr);
}

}  // namespace

TEST_CASE("checkpoint: what is written is read back, and replaced as a whole") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  check_holds(at, 1);
  write(at, 2);
  check_holds(at, 2);
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);  // nothing is left beside it
}

TEST_CASE("checkpoint: a failure at any point leaves the previous one or the new one, whole") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  std::vector<std::string> points;
  write(at, 1, [&](std::string_view point) { points.emplace_back(point); });
  REQUIRE(points.size() >= 3);
  for (const std::string& fail : points) {
    CAPTURE(fail);
    write(at, 1);
    bool threw = false;
    try {
      write(at, 2, [&](std::string_view point) {
        if (point == fail) throw error(Code::kDataLoss, "injected at {}", point);
      });
    } catch (const Error&) {
      threw = true;
    }
    CHECK(threw);
    const int64_t found = open_checkpoint(at).meta.iteration;
    CHECK((found == 1 || found == 2));
    check_holds(at, static_cast<float>(found));
  }
}

TEST_CASE("checkpoint: a full disk is an error and the previous one stays") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  CHECK_THROWS_AS(write(at, 2), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  check_holds(at, 1);
}

TEST_CASE("checkpoint: places that are not there, not writable, or broken") {
  const Folder folder;
  CHECK_THROWS_AS(write("/proc/nowhere/ckpt", 1), Error);
  CHECK_THROWS_AS(open_checkpoint(folder.path / "nothing"), Error);
  const std::string at = folder.path / "ckpt";
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "whale.json"}) {
    for (const size_t keep : {size_t{0}, size_t{5}, size_t{40}}) {
      write(at, 1);
      fs::resize_file(fs::path(at) / file, keep);
      CHECK_THROWS_AS(open_checkpoint(at), Error);
    }
    write(at, 1);
    fs::remove(fs::path(at) / file);
    CHECK_THROWS_AS(open_checkpoint(at), Error);
  }
}

TEST_CASE("safetensors: headers that lie") {
  const auto parse = [](const std::string& header, uint64_t data) {
    return parse_safetensors_header("f", header.data(), header.size(), data);
  };
  CHECK(parse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8).size() == 1);
  for (
      const char* bad :
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})",
       R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", R"({"a":{"dtype":"F32","shape":[2]}})", R"([])",
       R"({"a":1})", R"({)",
       R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse(bad, 8), Error);
  }
}
