// The element types: the type that sums of them have, conversions, and pairs of 16-bit elements in one word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace jaxsoft::cuda {

// The type in which sums and statistics of elements are computed: f32, and f64 for f64.
template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T> __device__ T narrow(Accumulator<T> x) { return x; }
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Two 16-bit elements in a word.
template <class T> struct PairOf {};
template <> struct PairOf<__half> { using type = __half2; };
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };
template <class T> using Pair = typename PairOf<T>::type;
__device__ inline __half2 narrow_pair(float a, float b, __half) { return __floats2half2_rn(a, b); }
__device__ inline __nv_bfloat162 narrow_pair(float a, float b, __nv_bfloat16) { return __floats2bfloat162_rn(a, b); }

// The bits of a value, as a value of another type of the same size.
template <class To, class From>
__device__ To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace jaxsoft::cuda
