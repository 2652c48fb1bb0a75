// The ranks (processes, or parts of one) that run one plan together: which of them this is, which devices of the plan
// are here, a store to meet by, and the wire between them. A world carries one session.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/wire.h"
#include "plan/plan.h"

namespace whale {

// Keys and values that all ranks of a world see. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;
  virtual void put(const std::string& key, std::string value) = 0;
  // Waits until somebody has put it; throws deadline_exceeded.
  virtual std::string get(const std::string& key, double timeout_seconds) = 0;
};
std::shared_ptr<Store> make_inproc_store();

struct World {
  std::shared_ptr<Store> store;
  std::shared_ptr<Wire> wire;
  std::vector<int32_t> ranks;  // of each device of the plan; empty: as even runs of devices as there are ranks

  int rank() const { return wire->rank(); }
  int size() const { return wire->size(); }
};

// The rank of each device of a plan; throws invalid when the world and the devices do not fit.
std::vector<int32_t> ranks_of_devices(const World& world, size_t devices);

// All ranks have put the same text under this name: else throws failed_precondition, on every rank, naming the first
// that differs from rank 0 and what it differs in. Texts are "word value" lines.
void agree(const World& world, const std::string& name, const std::string& text, double timeout_seconds);

// Worlds of `ranks` parts of this process, which share a store and a wire and nothing else.
std::vector<World> make_inproc_worlds(int ranks);

}  // namespace whale
