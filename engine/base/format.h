// fmt, header-only, so that libwhale.so needs only libc, libm and libstdc++.
#pragma once
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY 1
#endif
#include <fmt/format.h>
#include <fmt/ranges.h>
