#include "ir/dtype.h"

#include "base/error.h"

namespace whale {
namespace {

struct Row {
  DType dtype;
  const char* name;
  const char* numpy;
  int64_t bytes;
  bool is_float, is_integer;
};

constexpr Row kRows[] = {
    {DType::kF32, "f32", "float32", 4, true, false},    {DType::kF64, "f64", "float64", 8, true, false},
    {DType::kBF16, "bf16", "bfloat16", 2, true, false}, {DType::kF16, "f16", "float16", 2, true, false},
    {DType::kI32, "i32", "int32", 4, false, true},      {DType::kI64, "i64", "int64", 8, false, true},
    {DType::kU8, "u8", "uint8", 1, false, true},        {DType::kI8, "i8", "int8", 1, false, true},
    {DType::kBool, "bool", "bool", 1, false, false},    {DType::kU16, "u16", "uint16", 2, false, true},
};
constexpr int kCount = static_cast<int>(std::size(kRows));

const Row& row(DType dtype) {
  const int i = static_cast<int>(dtype) - 1;
  if (i < 0 || i >= kCount) throw invalid("dtype number {} is not one of 1 to {}", i + 1, kCount);
  return kRows[i];
}

}  // namespace

int64_t size_of(DType dtype) { return row(dtype).bytes; }
const char* name_of(DType dtype) { return row(dtype).name; }
bool is_float(DType dtype) { return row(dtype).is_float; }
bool is_integer(DType dtype) { return row(dtype).is_integer; }
bool is_valid_dtype(int number) { return number >= 1 && number <= kCount; }

DType parse_dtype(std::string_view name) {
  for (const Row& r : kRows)
    if (name == r.name || name == r.numpy) return r.dtype;
  throw invalid(
      "unknown dtype '{}'; expected one of f32, f64, bf16, f16, i32, i64, u8, i8, bool, u16 (or numpy's names)", name);
}

}  // namespace whale
