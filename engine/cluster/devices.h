// Device lists as text (semantics.md section 3): "cpu:4", "cpu@0,cpu@1*2", "ref:3", "null:8", joined by commas. Several
// machines are nodes joined by |, and Nx repeats one: "16xnull:8", "null:8|null:4". A kind with an amount of memory,
// "null-80GB:8", is filled by plans no further. A device type, "V100-32GB:8", is a null device with the memory and
// figures of that type (device_types.h). "~100Gb/s" behind a node is its network, "~100Gb/s~600Gb/s" also what is
// between its own devices (links_text.h). "8xV100-32GB + 8xP100-16GB", "60 nodes of 8xA100-80GB, 800Gb/s": presets.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cluster/device_spec.h"

namespace whale {

struct DeviceType;  // device_types.h

// The logical CPUs that this process may use: its affinity mask, as many of them as the CPU quota of its control group
// pays for.
std::vector<int> usable_cores();
std::vector<int> allowed_cores();  // the mask alone
// How many cores a control group's quota pays for, from the text of cpu.max ("200000 100000"); 0: no limit.
int cores_of_quota(std::string_view cpu_max);

// `cpu:N` deals `cores` to N devices in nearly equal runs (the first ones get one more); with more devices than cores,
// devices share cores in turn. Throws with the item that is wrong and what was expected.
std::vector<DeviceSpec> parse_devices(std::string_view text, const std::vector<int>& cores);
std::vector<DeviceSpec> parse_devices(std::string_view text);  // over usable_cores()
DeviceSpec device_of(const DeviceType& type);
// The text of a cluster file, as a device list: a node a line, or several in a few words (presets.h), from # on a
// comment. (In JSON: cluster_file.h.)
std::string devices_of_file(std::string_view content);

std::string to_string(const DeviceSpec& device);  // "cpu@0-3", "ref", "cuda@1"
// Parses to the same cores, then named: "cpu@0*2,cpu@1,ref:2". Figures of a cluster file or a probe are not in it.
std::string to_string(const std::vector<DeviceSpec>& devices);

}  // namespace whale
