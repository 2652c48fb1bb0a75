// Which devices stand together: the `device_order` of cluster and replica scopes.
#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {
namespace {

constexpr const char* kDeviceOrders = "all, row, column, average(n) or lists of devices such as [[0,1],[2,3]]";

// n of "average(n)".
std::optional<int64_t> average_of(std::string_view device_order) {
  constexpr std::string_view kAverage = "average(";
  int64_t n = 0;
  if (!device_order.starts_with(kAverage) || !device_order.ends_with(')')) return std::nullopt;
  const char* last = device_order.data() + device_order.size() - 1;
  const auto [end, error] = std::from_chars(device_order.data() + kAverage.size(), last, n);
  if (error != std::errc{} || end != last || n < 1) return std::nullopt;
  return n;
}

// Whose members are the slices: the replica that has the order, or the scope inside the cluster.
size_t sliced(const std::vector<Scope>& nest, size_t i) {
  if (nest[i].kind == ScopeKind::kReplica) return i;
  while (i < nest.size() && nest[i].kind == ScopeKind::kCluster) ++i;
  return i;
}

std::vector<int32_t> listed(const std::string& device_order, int64_t devices) {
  std::vector<int32_t> given;
  int64_t number = -1;
  for (const char c : device_order) {
    if (c >= '0' && c <= '9') {
      number = std::min<int64_t>(std::max<int64_t>(number, 0) * 10 + (c - '0'), devices);
    } else if (number >= 0) {
      given.push_back(static_cast<int32_t>(number)), number = -1;
    }
  }
  return given;
}

std::vector<int32_t> in_order(size_t devices) {
  std::vector<int32_t> order(devices);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Devices of each slice.
Ints slices_of(const TaskLeaf& leaf, size_t i, int64_t devices, const Ints& stage_devices) {
  const size_t j = sliced(leaf.nest, i);
  if (j == leaf.nest.size()) return {devices};
  const Scope& scope = leaf.nest[j];
  if (scope.kind == ScopeKind::kPipeline || scope.kind == ScopeKind::kStage) return stage_devices;
  if (std::find(scope.shares.begin(), scope.shares.end(), kNoDevice) != scope.shares.end() || devices % scope.count)
    refuse(leaf, fmt::format("has groups of different sizes and device_order={}; list the devices",
                             leaf.nest[i].device_order));
  return Ints(static_cast<size_t>(scope.count), devices / scope.count);
}

// As listed, where every slice lies inside one node.
std::vector<int32_t> by_row(const TaskLeaf& leaf, const std::vector<DeviceSpec>& devices, const Ints& slices) {
  size_t begin = 0;
  for (const int64_t size : slices) {
    const size_t last = begin + static_cast<size_t>(size) - 1;
    if (devices[begin].node != devices[last].node)
      refuse(leaf,
             fmt::format(
                 "keeps every slice inside a node (device_order=row); devices {} to {} are a slice of {}, device {} is "
                 "in node {} and device {} in node {}; choose a count whose slices fit into the nodes",
                 begin, last, size, begin, devices[begin].node, last, devices[last].node));
    begin = last + 1;
  }
  return in_order(devices.size());
}

// The first device of every node, then the second one of every node, ...: slices take as many of each.
std::vector<int32_t> by_column(const TaskLeaf& leaf, const std::vector<DeviceSpec>& devices, const Ints& slices) {
  const int64_t nodes = devices.empty() ? 1 : devices.back().node + 1;
  Ints sizes(static_cast<size_t>(nodes));
  for (const DeviceSpec& device : devices) ++sizes[device.node];
  if (std::any_of(sizes.begin(), sizes.end(), [&](int64_t n) { return n != sizes[0]; }))
    refuse(leaf, fmt::format(
                     "lays slices across nodes (device_order=column), which have [{}] devices; nodes of equal size are "
                     "needed, or list the devices",
                     fmt::join(sizes, ", ")));
  for (const int64_t size : slices)
    if (size % nodes && nodes % size)
      refuse(leaf,
             fmt::format(
                 "lays slices across nodes (device_order=column); a slice of {} device(s) does not take as many of "
                 "each of {} nodes; choose a count whose slices are a multiple of the nodes",
                 size, nodes));
  std::vector<int32_t> order;
  for (int64_t k = 0; k < sizes[0]; ++k)
    for (int64_t node = 0; node < nodes; ++node) order.push_back(static_cast<int32_t>(node * sizes[0] + k));
  return order;
}

std::vector<int32_t> order_of(const TaskLeaf& leaf, size_t i, const std::vector<DeviceSpec>& devices,
                              const Ints& stage_devices) {
  const std::string& device_order = leaf.nest[i].device_order;
  if (device_order == "row" || device_order == "column") {
    for (size_t k = 0; k < i; ++k)
      if (leaf.nest[k].kind != ScopeKind::kCluster)
        refuse(leaf,
               fmt::format("has device_order={} inside '{}'; put it outermost", device_order, to_string(leaf.nest[k])));
    const Ints slices = slices_of(leaf, i, std::ssize(devices), stage_devices);
    return device_order == "row" ? by_row(leaf, devices, slices) : by_column(leaf, devices, slices);
  }
  if (device_order[0] != '[') return in_order(devices.size());
  std::vector<int32_t> given = listed(device_order, std::ssize(devices));
  const std::set<int32_t> distinct(given.begin(), given.end());
  if (given.size() != devices.size() || distinct.size() != given.size() || *distinct.rbegin() >= std::ssize(devices))
    throw invalid("scope '{}' ({}): the device order lists [{}], expected each of the devices 0 to {} once",
                  to_string(leaf.nest[i]), leaf.path, fmt::join(given, ", "), devices.size() - 1)
        .at_scope(leaf.path);
  return given;
}

}  // namespace

void check_device_orders(TaskLeaf& leaf) {
  std::vector<Scope>& nest = leaf.nest;
  for (size_t i = 0; i < nest.size(); ++i) {
    const std::string& device_order = nest[i].device_order;
    const bool list =
        device_order.starts_with('[') && device_order.find_first_not_of("[], 0123456789") == device_order.npos;
    const std::optional<int64_t> slices = average_of(device_order);
    if (!device_order.empty() && !list && !slices && device_order != "all" && device_order != "row" &&
        device_order != "column")
      refuse(leaf, fmt::format("has {}, expected {}",
                               device_order.size() > 60 ? "an order of its own"
                                                        : fmt::format("the device order '{}'", device_order),
                               kDeviceOrders));
    const size_t j = sliced(nest, i);
    if (!slices || j == nest.size() || nest[j].kind == ScopeKind::kStage) continue;
    if (nest[j].count && nest[j].count != *slices)
      refuse(leaf, fmt::format("cuts the devices into {} slices, '{}' wants {}; give one number", *slices,
                               to_string(nest[j]), nest[j].count));
    nest[j].count = *slices;
  }
}

std::vector<int32_t> device_order(const TaskLeaves& leaves, const std::vector<DeviceSpec>& devices,
                                  const Ints& stage_devices) {
  std::vector<int32_t> order = in_order(devices.size());
  const TaskLeaf* first = nullptr;
  for (const TaskLeaf& leaf : leaves.list)
    for (size_t i = 0; i < leaf.nest.size(); ++i) {
      if (leaf.nest[i].device_order.empty()) continue;
      std::vector<int32_t> found = order_of(leaf, i, devices, stage_devices);
      if (first && found != order)
        refuse(leaf,
               fmt::format("puts the devices into another order than '{}' ({}); a model has one order of its devices, "
                           "give both the same device order",
                           brief(to_string(first->nest)), first->path));
      order = std::move(found), first = &leaf;
    }
  return order;
}

std::vector<int32_t> likely_order(const TaskLeaf& leaf, const std::vector<DeviceSpec>& devices) {
  for (const Scope& scope : leaf.nest) {
    if (scope.device_order.empty()) continue;
    try {
      if (scope.device_order.starts_with('[')) {
        std::vector<int32_t> given = listed(scope.device_order, std::ssize(devices));
        if (given.size() == devices.size() &&
            std::ranges::all_of(given, [&](int32_t d) { return d >= 0 && d < std::ssize(devices); }))
          return given;
      } else if (scope.device_order == "column") {
        return by_column(leaf, devices, {});
      }
    } catch (const Error&) {  // said where the order is made
    }
  }
  return in_order(devices.size());
}

}  // namespace whale
