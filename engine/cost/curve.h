// What one GPU takes for one op of known shape: its data sheet and five constants that were fitted to measured ops
// (tools/fit/ops.py, docs/validation.md). Pure functions; more work is never faster.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cluster/gpu_sheet.h"
#include "ops/op.h"

namespace whale {

struct CurveConstants {
  double compute_share = 1;  // of the peak, that a product of large tiles achieves
  double memory_share = 1;   // of the memory's bandwidth, that a pass over it achieves
  double start_seconds = 0;  // of an op, as its caller sees it
  double tile_loss = 0;      // 0: a small tile is as efficient as one of 128 x 128; 1: it takes as long
  double strain = 0;         // of long rows (translation of addresses), or of long runs where the sheet says it heats
};

struct DeviceCurve {
  GpuSheet sheet;
  CurveConstants constants;
  std::string fitted_on;  // the GPU whose measurements gave the constants
  std::string note;       // empty: this very GPU; else what was assumed, for the report
};

// The constants of the GPU itself; where it was not measured those of the nearest architecture, and the note says so.
DeviceCurve curve_of(const GpuSheet& sheet);
// Throws for a name without a data sheet.
DeviceCurve curve_of(std::string_view gpu);
// Of a type of the table; nullptr: of none, or of no GPU. Lives as long as the program.
const DeviceCurve* curve_of_type(std::string_view type);

struct Product {  // batch of (m x k) (k x n)
  double batch = 1, m = 0, n = 0, k = 0;
  double bytes_an_element = 4;  // 2: at the peak of 16 bits
  double row = 0;               // elements of a row of the first operand in memory; 0: k
  double flops() const { return 2 * batch * m * n * k; }
  double bytes() const { return bytes_an_element * batch * (m * k + k * n + m * n); }
};

// What an op is as a product of its first two operands: sizes follow from theirs, from the result's and from the FLOPs,
// so that a convolution is that of its patches and filters. Nothing: it is none, or one with a side of less than 16.
std::optional<Product> product_of(const OpView& op, const OpCost& cost);

double product_seconds(const Product& product, const DeviceCurve& curve);
// How many times as long its arithmetic takes as at the rate of large products: small tiles, a last wave that is nearly
// empty, long rows, a clock that falls.
double product_stretch(const Product& product, const DeviceCurve& curve);
// Arithmetic and memory traffic of one kernel: a soft maximum.
double beside_memory(double arithmetic_seconds, double memory_seconds);
// An elementwise op: bytes read and written.
double pass_seconds(double bytes, const DeviceCurve& curve);
double softmax_seconds(double rows, double columns, double bytes_an_element, const DeviceCurve& curve);
double layer_norm_seconds(double rows, double columns, double bytes_an_element, const DeviceCurve& curve);

// Where no more is known than an instruction's FLOPs and bytes: product_seconds() of large square operands.
double op_seconds(const OpCost& cost, double bytes_an_element, const DeviceCurve& curve);

}  // namespace whale
