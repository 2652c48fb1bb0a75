// Element types. The numbers are stable: files and the C ABI (WHALE_DTYPE_*) use them.
#pragma once

#include <cstdint>
#include <string_view>

namespace whale {

enum class DType : uint8_t {
  kF32 = 1,
  kF64 = 2,
  kBF16 = 3,
  kF16 = 4,
  kI32 = 5,
  kI64 = 6,
  kU8 = 7,
  kI8 = 8,
  kBool = 9,
  kU16 = 10
};

int64_t size_of(DType dtype);              // bytes of one element
const char* name_of(DType dtype);          // "f32", "bf16", "i32", "bool", ...
DType parse_dtype(std::string_view name);  // throws on an unknown name; also accepts numpy's names ("float32")
bool is_float(DType dtype);
bool is_integer(DType dtype);  // i32 i64 u8 i8 u16 (not bool)
bool is_valid_dtype(int number);

// The type statistics and reductions are kept in: f64 for f64, otherwise f32.
inline DType accumulate_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
// Whether `wide` is what sums of the narrower `narrow` are kept in.
inline bool keeps_sums_of(DType wide, DType narrow) {
  return is_float(narrow) && wide != narrow && wide == accumulate_dtype(narrow);
}

}  // namespace whale
