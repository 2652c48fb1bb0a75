#include "simulate/beside.h"

#include <map>
#include <memory>
#include <set>

#include "cluster/device_types.h"
#include "cost/interference.h"

namespace whale {
namespace {

// Kinds of the clock. Far: to another node, or by the way that copies take.
enum Kind : int { kCompute, kLink, kFarLink, kToDevice, kToHost };
static_assert(kToHost + 1 == Clock::kKinds);

template <class Of>
Clock::Rates rates_by(const Of& of) {
  Clock::Rates out{};
  for (unsigned running = 0; running < out.size(); ++running) out[running] = of(running);
  return out;
}
bool has(unsigned running, Kind kind) { return (running >> kind & 1) != 0; }

// Of so many kinds each has its part.
const Clock::Rates& rates_of_cores() {
  static const Clock::Rates rates = rates_by([](unsigned running) {
    std::array<double, Clock::kKinds> out{};
    out.fill(part_of_cores(__builtin_popcount(running)));
    return out;
  });
  return rates;
}

Clock::Rates rates_of_gpu(const Interference& constants) {
  return rates_by([&](unsigned running) {
    const PerLoad<bool> loads{has(running, kCompute), has(running, kLink) || has(running, kFarLink),
                              has(running, kToDevice), has(running, kToHost)};
    const PerLoad<double> rates = progress_rates(loads, constants, has(running, kFarLink));
    return std::array<double, Clock::kKinds>{rates[0], rates[1], rates[1], rates[2], rates[3]};
  });
}

const Clock::Rates* rates_of(const DeviceSpec& device) {
  static const std::map<std::string, Clock::Rates, std::less<>> gpus = [] {
    std::map<std::string, Clock::Rates, std::less<>> out;
    for (const DeviceType& type : device_types())
      if (type.is_gpu()) out.emplace(type.name, rates_of_gpu(interference_of(type.sheet.name).constants));
    return out;
  }();
  const DeviceInterference mine = interference_of(device);
  if (mine.gpu) return &gpus.at(find_device_type(device.type)->name);
  return mine.shares_cores ? &rates_of_cores() : nullptr;
}

// By the numbers of a plan: whether what a device says goes far.
class Ways {
 public:
  Ways(const Plan& plan, const Entry& entry) : plan_(plan), entry_(entry), parts_(peers_of({plan, entry}).parts) {
    for (const DeviceSpec& device : plan.devices) by_host_.push_back(interference_of(device).host_linked);
    for (const Group& group : plan.groups) {
      far_parts_.emplace_back();
      for (const auto& part : group.parts) far_parts_.back().push_back(any_leaves(part));
    }
    for (const Link& link : entry.links) {
      leaving_.emplace_back();
      for (const Transfer& t : link.transfers)
        if (node(t.from) != node(t.to)) leaving_.back().insert(t.from);
    }
  }

  int kind(const Instruction& i, int32_t device) const {
    switch (i.kind()) {
      case InstructionKind::kVote:
      case InstructionKind::kCommit: return kNone;
      case InstructionKind::kCopy: return i.queue == Queue::kCopyIn ? kToDevice : kToHost;
      case InstructionKind::kSend: return way(leaving_[i.link()].contains(device), device);
      case InstructionKind::kCollective: {
        const auto g = static_cast<size_t>(i.group());
        return way(far_parts_[g][parts_[g][device]], device);
      }
      default: return kCompute;
    }
  }

 private:
  int node(int32_t device) const { return plan_.devices[device].node; }
  bool any_leaves(const std::vector<int32_t>& part) const {
    return std::ranges::any_of(part, [&](int32_t d) { return node(d) != node(part.front()); });
  }
  int way(bool leaves, int32_t device) const { return leaves || by_host_[device] ? kFarLink : kLink; }

  const Plan& plan_;
  const Entry& entry_;
  const PartNumbers parts_;
  std::vector<char> by_host_;                 // [device]
  std::vector<std::vector<char>> far_parts_;  // [group][part]
  std::vector<std::set<int32_t>> leaving_;    // [link]: who sends to another node
};

}  // namespace

Besides besides_of(const Plan& plan, const Entry& entry) {
  Besides out;
  bool any = false;
  for (const DeviceSpec& device : plan.devices) any |= (out.rates.emplace_back(rates_of(device)) != nullptr);
  if (!any) return {};
  out.kind = [ways = std::make_shared<Ways>(plan, entry)](const Instruction& i, int32_t device) {
    return ways->kind(i, device);
  };
  return out;
}

}  // namespace whale
