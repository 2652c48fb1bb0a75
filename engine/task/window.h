// Cuts of dimensions that ops read through windows: what a device reads, and what it gets from its neighbours.
#pragma once

#include "ir/sharding.h"
#include "ops/op.h"
#include "task/task_graph.h"

namespace whale {

// What is read for an interval of the result: inside [0, source), empty when the interval sees padding alone.
Interval read_through(const WindowRead& window, const Interval& result);

// Padding of the device whose interval of the result is `result`. `more`: what a transposed window leaves out at the
// high end (output_padding).
struct WindowPadding {
  int64_t low = 0, high = 0, more = 0;
};
WindowPadding padding_of(const WindowRead& window, const Interval& result);

// Every device of the axis has something to make and something to read.
bool window_fits(const WindowRead& window, const MeshAxis& axis);
// No device reads anything but its own share of the source.
bool reads_own(const WindowRead& window, const MeshAxis& axis);
// The most that a device reads of others' shares, in elements of the dimension.
int64_t halo_of(const WindowRead& window, const MeshAxis& axis);

// Writes the padding, and the sizes that attributes repeat, of a device whose share of the factor is `share`.
void localise_window(Attrs& attrs, const Factor& factor, const Interval& share);

// The sharding of an operand that a factor's cut asks for: plain where no device needs more than its own.
AxisSharding read_sharding(const Factor& factor, const SubAxis& sub_axis, const MeshAxis& axis);

}  // namespace whale
