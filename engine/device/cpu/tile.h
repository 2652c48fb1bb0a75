// Elementwise arithmetic on short runs of float in the first-level cache: what the fused interpreter is made of.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "ir/dtype.h"
#include "ops/op.h"

namespace whale::cpu {

// y[i] = op(a[i], b[i], c[i]); unused operands are null. y may be a, b or c. Booleans are 0 and 1.
using TileFunction = void (*)(const float* a, const float* b, const float* c, float* y, int64_t n);
TileFunction tile_function(OpCode op);  // null: no such op
// The same for integers; comparisons are compare_function.
using IntTileFunction = void (*)(const int64_t* a, const int64_t* b, int64_t* y, int64_t n);
IntTileFunction int_tile_function(OpCode op);
using CompareFunction = void (*)(const int64_t* a, const int64_t* b, float* y, int64_t n);
CompareFunction compare_function(OpCode op);

// Between memory of any type and a run of float or int64.
void load_tile(DType dtype, const void* from, int64_t at, float* to, int64_t n);
void store_tile(DType dtype, const float* from, void* to, int64_t at, int64_t n);
void load_tile(DType dtype, const void* from, int64_t at, int64_t* to, int64_t n);
void store_tile(DType dtype, const int64_t* from, void* to, int64_t at, int64_t n);
void round_tile_bf16(const float* from, float* to, int64_t n);

// max(y, 0) of elements begin .. end - 1 of f32 or bf16; NaN stays.
void relu_in_place(DType dtype, void* y, int64_t begin, int64_t end);

// Words of elements first .. first + n - 1.
void random_words(const RandomStream& stream, uint64_t first, uint32_t* words, int64_t n);
// Dropout: y[i] = words[i] >= threshold ? x[i] * scale : 0.
void keep_tile(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n);

}  // namespace whale::cpu
