// Which devices are alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/device_spec.h"

namespace whale {

// Equal kind, figures, links of their nodes and memory. Where they are does not count.
bool are_alike(const DeviceSpec& one, const DeviceSpec& other);

// Numbers of devices from 0, in the order in which kinds come: equal for those that are alike.
std::vector<int32_t> kinds_of(const std::vector<DeviceSpec>& devices);

// What each is called: its type, or its kind; those of one name that are not alike have a number behind it ("T4 (2)").
std::vector<std::string> names_of_kinds(const std::vector<DeviceSpec>& devices);

// Whether work is to be dealt by what they achieve: figures of their own differ, those of links and prices aside, or
// memory does.
bool are_unlike(const std::vector<DeviceSpec>& devices);

// How many of them run on its cores, each itself included.
std::vector<int64_t> sharers_of(const std::vector<DeviceSpec>& devices);

// The chosen ones, with nodes numbered anew.
std::vector<DeviceSpec> chosen_of(const std::vector<DeviceSpec>& devices, const std::vector<int32_t>& chosen);

}  // namespace whale
