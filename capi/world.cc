// Worlds: the ranks that run plans together.
#include "world/world.h"

#include "guard.h"
#include "handles.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace {
constexpr int kMostRanks = 4096;  // of one process
}

whale_status* whale_world_create_inproc(int32_t ranks, whale_world** out) {
  return guard([&] {
    number<int>(ranks, 1, kMostRanks, "ranks");
    need(out, "out");
    std::vector<std::unique_ptr<whale_world>> made;
    for (auto& worlds : make_inproc_ranks(ranks)) made.push_back(std::make_unique<whale_world>(std::move(worlds)));
    for (size_t r = 0; r < made.size(); ++r) out[r] = made[r].release();
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

void whale_world_release(whale_world* world) { delete world; }
