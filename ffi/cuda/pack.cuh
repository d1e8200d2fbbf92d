// A pack: 16 bytes of elements, the widest access of a thread.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.cuh"

namespace jaxsoft::cuda {

// Elements stay packed in 32-bit words until they are used, because unpacked 16-bit elements take twice the registers.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  using A = Accumulator<T>;
  uint32_t words[4];

  __device__ T raw(int k) const {
    if constexpr (sizeof(T) == 2) {
      return bits<T>(static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16)));
    } else {
      T x;
      memcpy(&x, &words[k * sizeof(T) / 4], sizeof x);
      return x;
    }
  }
  __device__ A get(int k) const {
    if constexpr (std::is_same<T, __nv_bfloat16>::value)  // the upper half of an f32
      return bits<float>(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);
    else
      return widen(raw(k));
  }
  __device__ void set(int k, T x) {  // elements must be set in ascending order of k
    if constexpr (sizeof(T) == 2) {
      uint32_t half = bits<uint16_t>(x);
      words[k / 2] = k % 2 == 0 ? half : words[k / 2] | half << 16;
    } else {
      memcpy(&words[k * sizeof(T) / 4], &x, sizeof x);
    }
  }
  __device__ void set_all(const A (&x)[size], A factor = 1) {
#pragma unroll
    for (int k = 0; k < size; k++) {
      if constexpr (sizeof(T) == 2) {
        if (k % 2 == 0) words[k / 2] = bits<uint32_t>(narrow_pair(x[k] * factor, x[k + 1] * factor, T()));
      } else {
        set(k, x[k] * factor);
      }
    }
  }
  // Replaces by x every element whose byte in `bytes` is 0. The other bytes must be 1.
  __device__ void keep(uint64_t bytes, T x) {
    uint32_t halves[2] = {static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes >> 32)};
    if constexpr (sizeof(T) == 2) {
      uint32_t both = bits<uint16_t>(x);
      both |= both << 16;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        uint32_t mask = __byte_perm(halves[k / 2] * 0xffu, 0, k % 2 == 0 ? 0x1100 : 0x3322);
        words[k] = (words[k] & mask) | (both & ~mask);
      }
    } else {
#pragma unroll
      for (int k = 0; k < size; k++)
        if (!(halves[0] >> 8 * k & 0xff)) set(k, x);
    }
  }
  // Replaces element k by x. Does nothing where the pack has no element k.
  __device__ void replace(int k, T x) {
    Pack all;
    all.fill(x);
#pragma unroll
    for (int i = 0; i < size; i++) {
      if (i != k) continue;
      if constexpr (sizeof(T) == 2) {
        const uint32_t mask = 0xffffu << i % 2 * 16;
        words[i / 2] = (words[i / 2] & ~mask) | (all.words[0] & mask);
      } else {
        set(i, x);
      }
    }
  }
  // Replaces -inf by the least finite number.
  __device__ void make_finite() {
    const A least = std::is_same<T, __half>::value ? A(-65504)
                    : std::is_same<T, __nv_bfloat16>::value ? A(-0x1.fep127)
                    : sizeof(T) == 4 ? A(-0x1.fffffep127) : A(-0x1.fffffffffffffp1023);
#pragma unroll
    for (int k = 0; k < size; k++)
      if (get(k) == -static_cast<A>(__builtin_huge_val())) replace(k, narrow<T>(least));
  }
  // Replaces smaller elements of 16 bits by x, pair by pair. NaN stays.
  __device__ void raise(T x) {
    Pack least;
    least.fill(x);
#pragma unroll
    for (int k = 0; k < 4; k++)
      words[k] = bits<uint32_t>(__hmax2_nan(bits<Pair<T>>(words[k]), bits<Pair<T>>(least.words[k])));
  }
  __device__ void fill(T x) {
#pragma unroll
    for (int k = 0; k < size; k++) set(k, x);
  }
  // Flips the bits of `mask` in every word.
  __device__ void toggle(uint32_t mask) {
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] ^= mask;
  }
  // Multiplies every element, and rounds the products.
  __device__ void multiply_each(A factor) {
    A x[size];
#pragma unroll
    for (int k = 0; k < size; k++) x[k] = get(k) * factor;
    set_all(x);
  }
  // Multiplies bf16 elements by a power of two, pair by pair.
  __device__ void multiply(float factor) {
    uint32_t upper = bits<uint32_t>(factor) >> 16;
#pragma unroll
    for (int k = 0; k < 4; k++)
      words[k] = bits<uint32_t>(__hmul2(bits<Pair<T>>(words[k]), bits<Pair<T>>(upper << 16 | upper)));
  }
  // The maximum of the elements that are not NaN, or -inf if all are.
  __device__ A maximum() const {
    A m = -static_cast<A>(__builtin_huge_val());
    if constexpr (sizeof(T) == 2) {
      auto pair = [&](int k) { return bits<Pair<T>>(words[k]); };
      Pack top;
      top.words[0] = bits<uint32_t>(__hmax2(__hmax2(pair(0), pair(1)), __hmax2(pair(2), pair(3))));
      return max(max(m, top.get(0)), top.get(1));
    } else {
#pragma unroll
      for (int k = 0; k < size; k++) m = max(m, get(k));
      return m;
    }
  }
};

// The maximum of the elements of several packs that are not NaN, or -inf if all are.
template <class T, int count>
__device__ Accumulator<T> maximum_of(const Pack<T> (&packs)[count]) {
  Pack<T> top = packs[0];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 1; k < count; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        top.words[i] = bits<uint32_t>(__hmax2(bits<Pair<T>>(top.words[i]), bits<Pair<T>>(packs[k].words[i])));
    return top.maximum();
  } else {
    Accumulator<T> m = top.maximum();
#pragma unroll
    for (int k = 1; k < count; k++) m = max(m, packs[k].maximum());
    return m;
  }
}

// The smaller of two elements, or NaN if either is NaN.
__device__ inline float smaller(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline double smaller(double a, double b) { return a < b || isnan(a) ? a : b; }

// Finds the maximum of the elements that are not NaN, and replaces it by -inf. The other elements may change places,
// within a pack and between packs.
template <class T, int count>
__device__ Accumulator<T> take_maximum(Pack<T> (&packs)[count]) {
  using A = Accumulator<T>;
  using Word = std::conditional_t<sizeof(T) == 8, double, std::conditional_t<sizeof(T) == 4, float, uint32_t>>;
  constexpr int a_pack = 16 / sizeof(Word), all = count * a_pack;
  const A none = -static_cast<A>(__builtin_huge_val());
  Word words[all];
  memcpy(words, packs, sizeof words);
  // This is a knockout: the larger of two elements goes on to the next round. The smaller one, or a NaN, stays behind.
#pragma unroll
  for (int step = 1; step < all; step *= 2) {
#pragma unroll
    for (int k = 0; k + step < all; k += 2 * step) {
      Word &a = words[k], &b = words[k + step];
      if constexpr (sizeof(T) == 2) {
        const auto x = bits<Pair<T>>(a), y = bits<Pair<T>>(b);
        a = bits<uint32_t>(__hmax2(x, y)), b = bits<uint32_t>(__hmin2_nan(x, y));
      } else {
        const Word high = max(a, b);
        b = smaller(a, b), a = high;
      }
    }
  }
  A top;
  if constexpr (sizeof(T) == 2) {
    Pack<T> pair;
    pair.words[0] = words[0];
    const A a = pair.get(0), b = pair.get(1);
    top = max(max(none, a), b);
    words[0] = bits<uint32_t>(narrow_pair(none, smaller(a, b), T()));
  } else {
    top = max(none, words[0]);
    words[0] = none;
  }
  memcpy(packs, words, sizeof words);
  return top;
}

// One byte for each element of a pack, as `Pack::keep` takes them: 1 for elements [begin, end), 0 for the others.
constexpr uint64_t kEveryByte = 0x0101010101010101;
__device__ inline uint64_t range_bytes(int begin, int end) {
  int low = 4 * max(begin, 0), high = 4 * min(8 - end, 8);  // half of each shift, as a shift by 64 bits is undefined
  return kEveryByte << low << low & kEveryByte >> high >> high;
}

}  // namespace jaxsoft::cuda
