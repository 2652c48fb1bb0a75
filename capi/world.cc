// Worlds: the ranks that run plans together.
#include "world/world.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/text.h"
#include "base/watch.h"
#include "guard.h"
#include "handles.h"
#include "world/environment.h"
#include "world/process.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace {
constexpr int kMostRanks = 4096;        // of one process
constexpr int kMostProcesses = 65536;   // of a job
constexpr size_t kMostTokenBytes = 64;  // meeting.cc
constexpr double kTimeoutSeconds = 30, kRunTimeoutSeconds = 600, kMostSeconds = 1e6;

// Of an option, or of the environment where it is 0.
double seconds_of(double given, const char* option, const char* variable, double otherwise) {
  const char* set = given == 0 ? std::getenv(variable) : nullptr;  // NOLINT(concurrency-mt-unsafe)
  char* end = nullptr;
  const double seconds = set != nullptr ? std::strtod(set, &end) : given;
  const bool is_number = set == nullptr || (end != set && *end == '\0');
  if (seconds == 0 && set == nullptr) return otherwise;
  if (!is_number || !(seconds > 0 && seconds <= kMostSeconds))
    throw invalid("{} is {}; it is seconds, more than 0 and at most {}", set ? variable : option,
                  set ? brief(set) : fmt::format("{:g}", given), kMostSeconds);
  return seconds;
}

ProcessOptions read_options(const whale_world_options& o, std::string folder) {
  ProcessOptions out;
  out.folder = std::move(folder);
  out.token = text(o.token, "options.token");
  out.timeout_seconds = seconds_of(o.timeout_seconds, "options.timeout_seconds", "WHALE_TIMEOUT", kTimeoutSeconds);
  out.run_timeout_seconds =
      seconds_of(o.run_timeout_seconds, "options.run_timeout_seconds", "WHALE_RUN_TIMEOUT", kRunTimeoutSeconds);
  if (number<int>(o.size, 0, kMostProcesses, "options.size") == 0) {
    if (o.rank != 0 || o.port != 0 || o.address.size != 0)
      throw invalid("options.size is 0, for what the environment says, and a rank, port or address is given beside it");
    if (const auto found = launch_environment(out.folder, out.timeout_seconds)) {
      out.rank = found->rank, out.size = found->size;
      out.address = found->address, out.port = found->port;
      if (out.token.empty()) out.token = found->token;
    }
  } else {
    out.size = o.size;
    out.rank = number<int>(o.rank, 0, o.size - 1, "options.rank");
    out.port = number<uint16_t>(o.port, o.size > 1 ? 1 : 0, 65535, "options.port");
    if (const std::string address = text(o.address, "options.address"); !address.empty()) out.address = address;
    if (const char* token = std::getenv("WHALE_JOB_TOKEN");
        out.token.empty() && token)  // NOLINT(concurrency-mt-unsafe)
      out.token = token;
  }
  if (out.token.size() > kMostTokenBytes)
    throw invalid("the token of the job has {} bytes, at most {} are allowed", out.token.size(), kMostTokenBytes);
  return out;
}

}  // namespace

whale_status* whale_world_create_inproc(int32_t ranks, whale_world** out) {
  return guard([&] {
    number<int>(ranks, 1, kMostRanks, "ranks");
    need(out, "out");
    std::vector<std::unique_ptr<whale_world>> made;
    for (auto& worlds : make_inproc_ranks(ranks)) made.push_back(std::make_unique<whale_world>(std::move(worlds)));
    for (size_t r = 0; r < made.size(); ++r) out[r] = made[r].release();
  });
}

whale_status* whale_world_create(whale_engine* engine, const whale_world_options* options, whale_world** out) {
  return guard([&] {
    const whale_world_options o = capi::options(options, whale_world_options WHALE_WORLD_OPTIONS_INIT, "options");
    need(out, "out");
    const Watch watch("meeting the other ranks", o.cancel == nullptr ? nullptr : &o.cancel->cancel->flag(), 0);
    const ProcessOptions read = read_options(o, need(engine, "engine").backends->folder());
    *out = new whale_world(join_processes(read), read.size > 1 ? ::getpid() : 0);
  });
}

int32_t whale_world_rank(const whale_world* world) { return world == nullptr ? -1 : world->worlds->rank(); }
int32_t whale_world_size(const whale_world* world) { return world == nullptr ? 0 : world->worlds->size(); }

whale_status* whale_world_device_rank(const whale_world* world, const whale_plan* plan, size_t device, int32_t* out) {
  return guard([&] {
    const int ranks = need(world, "world").worlds->size();
    const size_t devices = need(plan, "plan").plan->devices.size();
    need(out, "out");
    if (device >= devices) throw invalid("argument `device` is {}; the plan is for {} devices", device, devices);
    *out = ranks_of_devices(ranks, devices)[device];
  });
}

void whale_world_release(whale_world* world) {
  // After fork() the child has none of its threads, which its end would wait for.
  if (world != nullptr && (world->process == 0 || world->process == static_cast<int64_t>(::getpid()))) delete world;
}
