// float16 and bfloat16 to and from float32, eight values at a time: exact one way, round to nearest
// even the other.
//
// In the compiler's vector types, which any x86-64 can run, because left to itself the compiler
// turns the conversions into branches. No operation here depends on a subnormal float32, so the
// result is also right in a thread that flushes those to zero, as TensorFlow's compute threads do.
#ifndef GBA_TF_CC_CORE_FLOAT16_H_
#define GBA_TF_CC_CORE_FLOAT16_H_

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(GBA_PORTABLE_ONLY)
#include <cpuid.h>
#include <immintrin.h>
// Of functions that need the instructions; call them only if HasAvx2() is true.
#define GBA_AVX2 __attribute__((target("avx2,f16c")))
#endif

// Code that is compiled for different instruction sets must be inlined into the function that says
// which one.
#define GBA_INLINE inline __attribute__((always_inline))

namespace gba {

constexpr int kLanes = 8;
using FloatLanes = float __attribute__((vector_size(kLanes * 4)));
using DoubleLanes = double __attribute__((vector_size(kLanes * 8)));
using Int32Lanes = int32_t __attribute__((vector_size(kLanes * 4)));
using UInt32Lanes = uint32_t __attribute__((vector_size(kLanes * 4)));
using UInt16Lanes = uint16_t __attribute__((vector_size(kLanes * 2)));

// Reads and writes eight 16-bit values at any address.
GBA_INLINE void LoadUInt16(const void* from, UInt32Lanes* lanes) {
  UInt16Lanes narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  *lanes = __builtin_convertvector(narrow, UInt32Lanes);
}
GBA_INLINE void StoreUInt16(const UInt32Lanes& lanes, void* to) {
  const UInt16Lanes narrow = __builtin_convertvector(lanes, UInt16Lanes);
  std::memcpy(to, &narrow, sizeof(narrow));
}

// Arithmetic on bits is unsigned, as it may wrap. Magnitudes have no sign bit and are compared and
// converted as signed numbers, for which there are instructions.

GBA_INLINE void LoadFloat16(const void* from, FloatLanes* value) {
  UInt32Lanes half;
  LoadUInt16(from, &half);
  const UInt32Lanes sign = (half & 0x8000u) << 16;
  const UInt32Lanes magnitude = half & 0x7fffu;
  const Int32Lanes size = reinterpret_cast<Int32Lanes>(magnitude);
  // Exponents differ by 112 in bias; infinity and NaN go from exponent 31 to 255 = 31 + 2 * 112.
  constexpr uint32_t kRebias = 112u << 23;
  const UInt32Lanes not_finite = reinterpret_cast<UInt32Lanes>(size >= 0x7c00);
  UInt32Lanes bits = (magnitude << 13) + kRebias + (not_finite & kRebias);
  // A subnormal half counts units of 2^-24, which is a normal float32.
  const FloatLanes subnormal = __builtin_convertvector(size, FloatLanes) * 0x1p-24f;
  bits = size < 0x0400 ? reinterpret_cast<UInt32Lanes>(subnormal) : bits;
  *value = reinterpret_cast<FloatLanes>(bits | sign);
}

GBA_INLINE void StoreFloat16(const FloatLanes& value, void* to) {
  const UInt32Lanes bits = reinterpret_cast<UInt32Lanes>(value);
  const UInt32Lanes sign = (bits >> 16) & 0x8000u;
  const UInt32Lanes magnitude = bits & 0x7fffffffu;
  const Int32Lanes size = reinterpret_cast<Int32Lanes>(magnitude);
  // Rounding may carry into the exponent, which is just what is wanted.
  const UInt32Lanes normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the result counts units of 2^-24: the spacing of float32 in [0.5, 1), so the
  // addition does the rounding.
  const FloatLanes shifted = reinterpret_cast<FloatLanes>(magnitude) + 0.5f;
  const UInt32Lanes subnormal = reinterpret_cast<UInt32Lanes>(shifted) - 0x3f000000u;
  UInt32Lanes half = size < 0x38800000 ? subnormal : normal;
  half = size >= 0x477ff000 ? UInt32Lanes{} + 0x7c00u : half;  // From 65520 on: infinity.
  const UInt32Lanes nan = ((magnitude >> 13) & 0x01ffu) | 0x7e00u;
  half = size > 0x7f800000 ? nan : half;
  StoreUInt16(half | sign, to);
}

#if defined(GBA_AVX2)
// Whether this machine has AVX2 and F16C, which in practice come together.
inline bool HasAvx2() {
  // Not __builtin_cpu_supports("f16c"), which is an error for compilers before GCC 11 and Clang 18.
  static const bool has_avx2 = [] {
    unsigned eax, ebx, ecx = 0, edx;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C) != 0;
  }();
  return has_avx2;
}

// As LoadFloat16 and StoreFloat16, bit for bit, in one instruction. (But for signalling NaN: made
// quiet here, and otherwise by the first operation on them.) Not GBA_INLINE: the compiler refuses
// to inline them into a GBA_INLINE loop, and does inline them once that loop is in a GBA_AVX2
// function.
GBA_AVX2 inline void LoadFloat16F16c(const void* from, FloatLanes* value) {
  const __m256 lanes = _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  std::memcpy(value, &lanes, sizeof(lanes));
}
GBA_AVX2 inline void StoreFloat16F16c(const FloatLanes& value, void* to) {
  __m256 lanes;
  std::memcpy(&lanes, &value, sizeof(lanes));
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT));
}
#endif

GBA_INLINE void LoadBFloat16(const void* from, FloatLanes* value) {
  UInt32Lanes half;
  LoadUInt16(from, &half);
  *value = reinterpret_cast<FloatLanes>(half << 16);
}

GBA_INLINE void StoreBFloat16(const FloatLanes& value, void* to) {
  const UInt32Lanes bits = reinterpret_cast<UInt32Lanes>(value);
  const UInt32Lanes sign = (bits >> 16) & 0x8000u;
  const UInt32Lanes magnitude = bits & 0x7fffffffu;
  const UInt32Lanes rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  const UInt32Lanes nan = (magnitude >> 16) | 0x0040u;
  const UInt32Lanes half = reinterpret_cast<Int32Lanes>(magnitude) > 0x7f800000 ? nan : rounded;
  StoreUInt16(half | sign, to);
}

}  // namespace gba

#endif  // GBA_TF_CC_CORE_FLOAT16_H_
