// fmt, compiled once (format.cc) and linked statically, so that libwhale.so needs only libc, libm and libstdc++.
#pragma once
#include <fmt/format.h>
#include <fmt/ranges.h>
