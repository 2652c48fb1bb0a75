// What this machine's cores can do, asked once at run time.
#pragma once

namespace whale::cpu {

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
inline bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
inline const char* isa_name() {
  return has_bf16() ? "AVX-512 BF16" : has_avx512() ? "AVX-512" : has_avx2() ? "AVX2" : "x86-64 baseline";
}

}  // namespace whale::cpu
