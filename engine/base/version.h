// The version of the library; back ends are locked to it (device/open.cc). The same as in meson.build and whale.h.
#pragma once

namespace whale {

inline constexpr char kVersion[] = "0.2.0";

}  // namespace whale
