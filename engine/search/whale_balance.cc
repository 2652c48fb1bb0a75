#include "search/whale_balance.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "cluster/shares.h"

namespace whale {
namespace {

constexpr double kSame = 1e-12;  // what sums in another order differ by

bool less(double a, double b) { return a < b * (1 - kSame); }  // of numbers that are not negative

void check(const WhaleTask& task, const std::vector<WhaleDevice>& devices) {
  const auto is = [](double x) { return std::isfinite(x) && x >= 0; };
  if (!is(task.flop) || !is(task.memory))
    throw invalid("a TaskGraph of {} FLOP and {} bytes, expected finite numbers that are not negative", task.flop,
                  task.memory);
  if (devices.empty()) throw invalid("a TaskGraph is to be balanced over no devices, expected at least one");
  for (size_t i = 0; i < devices.size(); ++i)
    if (!is(devices[i].memory) || !is(devices[i].flops) || devices[i].flops == 0)
      throw invalid("device {} has {} FLOP/s and {} bytes, expected a finite speed above 0 and memory from 0", i,
                    devices[i].flops, devices[i].memory);
}

class Algorithm1 {
 public:
  Algorithm1(const WhaleTask& task, const std::vector<WhaleDevice>& devices) : task_(task), devices_(devices) {
    check(task, devices);
    double all = 0;
    for (const WhaleDevice& d : devices) all += d.flops;
    for (const WhaleDevice& d : devices) loads_.push_back(d.flops / all);
  }

  WhaleBalance run(Peak rule) {
    std::vector<size_t> oom, free;
    for (size_t i = 0; i < loads_.size(); ++i) (fits(i) ? free : oom).push_back(i);
    while (!oom.empty() && !free.empty()) {
      const auto peak = std::max_element(oom.begin(), oom.end(), [&](size_t a, size_t b) {
        return less(memory_utilization(a), memory_utilization(b));
      });
      const auto valley = std::min_element(free.begin(), free.end(), [&](size_t a, size_t b) {
        const double x = flop_utilization(a), y = flop_utilization(b);
        return less(x, y) || (!less(y, x) && less(memory_utilization(a), memory_utilization(b)));
      });
      if (!shift_load(*peak, *valley))
        free.erase(valley);
      else if (rule == Peak::kDone || fits(*peak))
        oom.erase(peak);
    }
    WhaleBalance out{.loads = loads_, .over = {}};
    for (size_t i = 0; i < loads_.size(); ++i)
      if (!fits(i)) out.over.push_back(static_cast<int32_t>(i));
    return out;
  }

 private:
  double memory_utilization(size_t i) const {
    const double needed = loads_[i] * task_.memory;
    return needed == 0 ? 0 : needed / devices_[i].memory;
  }
  double flop_utilization(size_t i) const { return loads_[i] * task_.flop / devices_[i].flops; }
  bool fits(size_t i) const { return !less(1, memory_utilization(i)); }
  double room(size_t i) const { return devices_[i].memory / task_.memory - loads_[i]; }  // as a load

  bool shift_load(size_t peak, size_t valley) {
    const double moved = std::min(-room(peak), room(valley));
    if (!(moved > kSame)) return false;
    loads_[peak] -= moved, loads_[valley] += moved;
    return true;
  }

  WhaleTask task_;
  const std::vector<WhaleDevice>& devices_;
  std::vector<double> loads_;
};

}  // namespace

WhaleBalance whale_balance(const WhaleTask& task, const std::vector<WhaleDevice>& devices, Peak peak) {
  return Algorithm1(task, devices).run(peak);
}

Ints whale_units(int64_t units, const WhaleBalance& balance) { return round_shares(units, balance.loads); }

std::vector<int32_t> whale_stage_order(const std::vector<WhaleDevice>& devices) {
  std::vector<int32_t> order(devices.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](int32_t i) { return devices[i].memory; });
  return order;
}

}  // namespace whale
