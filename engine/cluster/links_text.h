// What connects the devices of a node, as text behind it: "~100Gb/s@10us" its network, "~100Gb/s~600Gb/s@5us" also
// what is between its own devices.
#pragma once

#include <string>
#include <string_view>

#include "cluster/device_spec.h"

namespace whale {

// Seconds. A message by a geostationary satellite takes a quarter of one, around the Earth by glass a fifth.
inline constexpr double kMostLatency = 1;

// Of a link of which none is said.
inline constexpr double kUsualLatency = 10e-6;

struct NodeLinks {
  LinkRates network{}, inside{};
  void put(DeviceFigures& figures) const;  // those that are said
};

// "100Gb/s~600Gb/s@5us", without spaces. Throws with what is wrong.
NodeLinks parse_links(std::string_view text);
LinkRates parse_rate(std::string_view text);  // "100Gb/s", "12.5GB/s@10us"

// Of the node that this device is of, with the ~; "" where its links are those of its type.
std::string links_text(const DeviceSpec& device);

}  // namespace whale
