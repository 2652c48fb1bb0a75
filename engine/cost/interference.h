// What a GPU does at the same time slows down: arithmetic, traffic between devices, copies to and from the host. Eight
// constants a GPU (tools/fit/overlap.py, docs/validation.md). The form follows Mist (EuroSys'25): while anything runs,
// each kind makes progress at a rate that follows from what runs beside it, until the first of them ends.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "cluster/device_spec.h"

namespace whale {

enum class Load : int { kCompute, kLink, kToDevice, kToHost };
inline constexpr int kLoads = 4;

template <class T>
using PerLoad = std::array<T, kLoads>;  // by Load

// By how much a second of one kind grows while another runs. "Far" traffic goes through the host or leaves the node,
// and so shares the way of copies; traffic over direct links inside a node does not.
struct Interference {
  double compute_by_link = 0;
  double compute_by_far_link = 0;
  double compute_by_copy = 0;
  double link_by_compute = 0;
  double far_link_by_copy = 0;
  double copy_by_far_link = 0;
  double to_device_by_to_host = 0;
  double to_host_by_to_device = 0;
};

// Of the GPU itself, else of the nearest architecture that was measured; `host_linked`: its devices reach each other
// through the host only. Names as in find_gpu(), or as in the tables ("a100-sxm4-40gb").
struct GpuInterference {
  Interference constants;
  bool host_linked = false;
  std::string_view fitted_on;
  bool own = true;  // false: of another GPU
};
GpuInterference interference_of(std::string_view gpu);

// Seconds of progress that each kind makes in one second; of those that do not run 0. None is faster than alone, and
// together they are never slower than one after another: the rates add up to at least 1.
PerLoad<double> progress_rates(const PerLoad<bool>& running, const Interference& interference, bool far);

// Seconds until all have ended that begin together and take these alone; 0: it does not run.
double together_seconds(const PerLoad<double>& alone, const Interference& interference, bool far);

// Of a device of a plan.
struct DeviceInterference {
  std::optional<Interference> gpu = {};  // of the table of types
  bool host_linked = false;
  bool shares_cores = false;  // communicates with the cores that compute: of loads that run at once each has its part
  bool goes_far(bool leaves_node) const { return leaves_node || host_linked; }
};
DeviceInterference interference_of(const DeviceSpec& device);
inline double part_of_cores(int loads) { return loads > 1 ? 1.0 / loads : 1; }
// progress_rates() of such a device; 1 of what runs where nothing is slower.
PerLoad<double> progress_rates(const PerLoad<bool>& running, const DeviceInterference& device, bool leaves_node);

}  // namespace whale
