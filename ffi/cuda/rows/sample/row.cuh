// A block's part of a row, most of it or all in registers, and what an element weighs.
#pragma once

#include "../../exponential.cuh"
#include "../../window.cuh"
#include "../top_k/keys.cuh"
#include "block.cuh"

namespace jaxsoft::cuda {

// What the weights of a row, exp((x - m) * scale), are computed with.
struct Weights {
  float m, scale;
  float of_exp2, of_bins;  // the factors of x - m to the exponent of 2, and to the bin

  __device__ Weights(float m, float scale)
      : m(m), scale(scale), of_exp2(scale * float(kLog2E)),
        of_bins(-of_exp2 * (float(SampleCode::bins) / SampleCode::octaves)) {}

  __device__ float operator()(float x) const { return exp2_approximately((x - m) * of_exp2); }
  // How far x is below m, in bins. It is `bins` or more where the weight counts as 0, as for -inf. The sum with 2^23
  // rounds to a whole number, which the low bits of the result are.
  __device__ uint32_t bin(float x) const {
    return bits<uint32_t>(fmaf(x - m, of_bins, 0x1p23f)) - bits<uint32_t>(0x1p23f);
  }
  __device__ static Mass mass(float weight) {
    Mass sum = 0;
    Parts parts;
    parts.add(weight);
    parts.move_to(sum);
    return sum;
  }
  // A sum of a few masses in two words, as conversions to 64 bits are slow. Sums with 2^23 round to whole numbers.
  struct Parts {
    static constexpr float half = 1 << SampleCode::octaves / 2;
    uint32_t high = 0;
    int32_t low = 0;
    __device__ void add(float weight, bool counts = true) {
      const float up = fmaf(weight, half, 0x1p23f), rest = fmaf(weight, half, 0x1p23f - up);
      const float down = fmaf(rest, half, 0x1.8p23f);
      if (counts) high += bits<uint32_t>(up) - bits<uint32_t>(0x1p23f), low += bits<int32_t>(down) - bits<int32_t>(0x1.8p23f);
    }
    __device__ void move_to(Mass& sum) {
      sum += (Mass(high) << SampleCode::octaves / 2) + static_cast<long long>(low);
      high = 0, low = 0;
    }
  };
  __device__ static float from_mass(Mass mass) { return float(mass) / float(1ull << SampleCode::octaves); }
};

// Elements in order: a key is greater where the value is larger, or the same and the index lower. The bits of the order
// that are 0 for every element of T are left out.
template <class T>
struct Keys {
  int index_bits;
  __device__ explicit Keys(uint32_t n) { index_bits = 32 - __clz(n - 1); }
  __device__ Key mask() const { return (Key(1) << index_bits) - 1; }
  __device__ Key operator()(float x, uint32_t index) const {
    return Key(order_of(x) >> kFree<T>) << index_bits | (mask() - index);
  }
  __device__ float value(Key key) const { return of_order(uint32_t(key >> index_bits) << kFree<T>); }
  __device__ uint32_t index(Key key) const { return uint32_t(mask() - (key & mask())); }
};

// The part of a row that a block has: each of its warps has a range of packs, of which lanes take turns. The first
// `held` of a thread stay in registers, and the others are read again from the cache whenever they are needed.
template <class T, int held>
struct RowPart {
  static constexpr int size = Pack<T>::size;
  const T* const row;
  const Window<T> window;
  const int of_warp;  // packs, a multiple of 32
  const int first;    // the thread's first pack
  Pack<T> packs[held > 0 ? held : 1];

  __device__ RowPart(const T* row, uint32_t n, unsigned block, unsigned blocks)
      : row(row), window(row, n, true), of_warp(packs_of_warp(window.packs, blocks)),
        first((block * SampleCode::warps + threadIdx.x / 32) * of_warp + threadIdx.x % 32) {
#pragma unroll
    for (int j = 0; j < held; j++)
      if (j * 32 < of_warp && first + j * 32 < window.packs) packs[j] = window.fetch(row, first + j * 32);
      else packs[j].fill(nothing());
#pragma unroll
    for (int j = 0; j < held; j++)
      if (j * 32 < of_warp && first + j * 32 < window.packs) window.trim(packs[j], first + j * 32, nothing());
  }
  __device__ static int packs_of_warp(int packs, unsigned blocks) {
    const int warps = blocks * SampleCode::warps * 32;
    return (packs + warps - 1) / warps * 32;
  }
  __device__ static T nothing() { return narrow<T>(-float(__builtin_huge_val())); }
  // A pack, with -inf in place of what lies beyond the row's ends.
  __device__ Pack<T> fetch(int i) const {
    Pack<T> pack;
    if (i < window.packs) {
      pack = window.fetch(row, i);
      window.trim(pack, i, nothing());
    } else {
      pack.fill(nothing());
    }
    return pack;
  }
  __device__ int warp_of(uint32_t index) const { return (index + window.head) / size / of_warp; }

  // Calls use(pack, index of its first element), which may be negative, for each of the thread's packs. All lanes of a
  // warp call it as often.
  template <class Use>
  __device__ void for_packs(Use use) const {
#pragma unroll
    for (int j = 0; j < held; j++) {
      if (j * 32 >= of_warp) return;
      use_pack(packs[j], j, use);
    }
    if constexpr (held == 0) {
      // The next packs are on their way while these are used.
      Pack<T> next[group];
      fetch_group(next, 0);
      for (int j = 0; j * 32 < of_warp; j += group) {
        Pack<T> these[group];
#pragma unroll
        for (int i = 0; i < group; i++) these[i] = next[i];
        fetch_group(next, j + group);
#pragma unroll
        for (int i = 0; i < group; i++) use_pack(trimmed(these[i], j + i), j + i, use);
      }
    } else {
      for (int j = held; j * 32 < of_warp; j++) use_pack(fetch(first + j * 32), j, use);
    }
  }
  template <class Use>
  __device__ void for_elements(Use use) const {
    for_packs([&](const Pack<T>& pack, int index) {
#pragma unroll
      for (int k = 0; k < size; k++) use(pack.get(k), uint32_t(index + k));
    });
  }

  // The order of the largest element; all ones if one is NaN.
  __device__ uint32_t top_order() const {
    float top;
    if constexpr (sizeof(T) == 2) {
      Pack<T> largest;
      largest.fill(nothing());
      for_packs([&](const Pack<T>& pack, int) {
#pragma unroll
        for (int k = 0; k < 4; k++)
          largest.words[k] = bits<uint32_t>(__hmax2_nan(bits<Pair<T>>(largest.words[k]), bits<Pair<T>>(pack.words[k])));
      });
      top = largest.get(0);
#pragma unroll
      for (int k = 1; k < size; k++) top = larger(top, largest.get(k));
    } else {
      top = nothing();
      for_elements([&](float x, uint32_t) { top = larger(top, x); });
    }
    return isnan(top) ? ~0u : order_of(top);
  }

 private:
  static constexpr int group = 4;

  __device__ void fetch_group(Pack<T> (&to)[group], int j) const {
#pragma unroll
    for (int i = 0; i < group; i++)
      if ((j + i) * 32 < of_warp && first + (j + i) * 32 < window.packs) to[i] = window.fetch(row, first + (j + i) * 32);
      else to[i].fill(nothing());
  }
  __device__ Pack<T> trimmed(Pack<T> pack, int j) const {
    if (first + j * 32 < window.packs) window.trim(pack, first + j * 32, nothing());
    return pack;
  }
  template <class Use>
  __device__ void use_pack(Pack<T> pack, int j, Use use) const {
    int index = (first + j * 32) * size - window.head;
    // The compiler shall not know that other calls have the same elements: it would keep what it computes of each, for
    // which there are no registers.
    asm volatile("" : "+r"(pack.words[0]), "+r"(pack.words[1]), "+r"(pack.words[2]), "+r"(pack.words[3]), "+r"(index));
    use(pack, index);
  }
  __device__ static float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
};

}  // namespace jaxsoft::cuda
