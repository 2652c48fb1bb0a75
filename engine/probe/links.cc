#include <algorithm>

#include "base/error.h"
#include "probe/measure.h"
#include "probe/timing.h"

namespace whale {
namespace {

Operand numbers(const ProbedMemory& memory, int64_t bytes) {
  return {memory.data(), DType::kF32, {bytes / 4}, false, nullptr};
}

}  // namespace

ProbedMemory::ProbedMemory(Device& device, size_t bytes)
    : device_(device), bytes_(bytes), data_(bytes == 0 ? nullptr : device.allocate(bytes)) {
  const std::vector<char> ones(bytes, 1);  // pages that nobody has written are one page, in the cache
  device_.copy_in(data_, ones.data(), bytes);
}

ProbedMemory::~ProbedMemory() {
  if (data_ != nullptr) device_.release(data_, bytes_);
}

// The circle method: one stays, the others move on by a place.
std::vector<Group> groups_of_pairs(int devices) {
  std::vector<Group> groups{{"all", {{}}}};
  for (int d = 0; d < devices; ++d) groups[0].parts[0].push_back(d);
  const int even = devices + devices % 2;
  for (int round = 0; round + 1 < even; ++round) {
    Group group{"pair", {}};
    const auto at = [&](int place) { return place == 0 ? 0 : 1 + (place - 1 + round) % (even - 1); };
    for (int k = 0; k < even / 2; ++k) {
      const int a = std::min(at(k), at(even - 1 - k)), b = std::max(at(k), at(even - 1 - k));
      if (b < devices) group.parts.push_back({a, b});
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

Prober::Prober(int number, const std::vector<Group>& groups, Transport& transport, Device& device, Lookout* lookout)
    : number_(static_cast<size_t>(number)),
      groups_(groups),
      transport_(transport),
      device_(device),
      lookout_(lookout),
      all_(groups[0].parts[0].size()),
      on_device_(device, all_.size() * sizeof(float)),
      in_(device, all_.size() > 1 ? Meetings::kLarge : 0),
      out_(device, in_.size()) {
  CollectiveSpec spec;
  spec.op = OpCode::k_all_reduce;
  spec.in = spec.out = {numbers(on_device_, static_cast<int64_t>(on_device_.size()))};
  sum_ = transport_.bind(number, spec, device_);
}

void Prober::run(Collective& collective) {
  if (!collective.run(lookout_)) throw ProbeAborted{};
}

// Each has a place in a sum.
double Prober::most(double mine) {
  std::fill(all_.begin(), all_.end(), 0.0f);
  all_[number_] = static_cast<float>(mine);
  device_.copy_in(on_device_.data(), all_.data(), on_device_.size());
  run(*sum_);
  device_.copy_out(all_.data(), on_device_.data(), on_device_.size());
  return *std::max_element(all_.begin(), all_.end());
}

// Who is in no pair of the group waits with the others.
double Prober::seconds_of(OpCode op, int group, int64_t bytes, double budget) {
  const auto& parts = groups_[group].parts;
  const auto is_mine = [&](const auto& part) {
    return std::find(part.begin(), part.end(), static_cast<int32_t>(number_)) != part.end();
  };
  const auto part = std::find_if(parts.begin(), parts.end(), is_mine);
  Collective* bound = nullptr;
  if (part != parts.end()) {
    CollectiveSpec spec;
    spec.op = op, spec.group = group;
    const bool gathers = op == OpCode::k_all_gather;
    const auto members = static_cast<int64_t>(part->size());
    const int64_t mine = gathers ? bytes / members / 4 * 4 : bytes;
    spec.in = {numbers(in_, mine)}, spec.out = {numbers(out_, gathers ? mine * members : mine)};
    if (gathers) {
      SubAxisCuts cuts{SubAxis{0, 1, 1}, {}};
      for (int64_t m = 0; m < members; ++m) cuts.cuts.push_back({m * mine / 4, (m + 1) * mine / 4});
      spec.cuts = {cuts};
    }
    bound = bound_.emplace_back(transport_.bind(static_cast<int>(number_), spec, device_)).get();
  }
  const auto call = [&] {
    if (bound != nullptr) run(*bound);
  };
  const double seconds = median_seconds(
      call, [&](double once) { return calls_for(budget, most(once)); }, [&] { (void)most(0); });
  return bound != nullptr ? seconds : 0;
}

Meetings Prober::measure(double budget) {
  Meetings out;
  const size_t n = all_.size();
  out.small.resize(n), out.large.resize(n);
  if (n < 2) return out;
  out.small_gather = most(seconds_of(OpCode::k_all_gather, 0, Meetings::kSmall, budget));
  out.large_gather = most(seconds_of(OpCode::k_all_gather, 0, Meetings::kLarge, budget));
  for (size_t g = 1; g < groups_.size(); ++g)
    for (const auto& [bytes, to] : {std::pair(Meetings::kSmall, &out.small), {Meetings::kLarge, &out.large}}) {
      const double seconds = seconds_of(OpCode::k_shift, static_cast<int>(g), bytes, budget);
      for (const auto& pair : groups_[g].parts)
        for (const size_t k : {0, 1})
          if (pair[k] == static_cast<int32_t>(number_)) (*to)[pair[1 - k]] = seconds;
    }
  return out;
}

}  // namespace whale
