// A block's part of a row, in shared memory, and what an element weighs.
#pragma once

#include "../../exponential.cuh"
#include "../../window.cuh"
#include "../top_k/keys.cuh"
#include "block.cuh"

namespace jaxsoft::cuda {

// What the weights of a row, exp((x - m) * scale), are computed with. A mass is rounded down, so that it is 0 just
// where the weight is below 2^-octaves. All elements that have a mass are in one of the bins.
struct Weights {
  float m, scale;
  float of_exp2, of_bins;  // the factors of x - m to the exponent of 2, and to the bin

  __device__ Weights(float m, float scale)
      : m(m), scale(scale), of_exp2(scale * float(kLog2E)),
        of_bins(-of_exp2 * (1 / SampleCode::octaves_of_bin)) {}

  __device__ float operator()(float x) const { return exp2_approximately((x - m) * of_exp2); }
  // How far x is below m, in bins, as a float to which 2^23 has been added, so that it is rounded to a whole number. It
  // is `border(bins)` or more only where the mass is 0, as for -inf.
  __device__ float place(float x) const { return fmaf(x - m, of_bins, 0x1p23f); }
  // The x that is so many bins below m.
  __device__ float at(float bins) const { return m + bins / of_bins; }
  __device__ static float border(uint32_t bin) { return 0x1p23f + bin; }
  __device__ uint32_t bin(float x) const { return bits<uint32_t>(place(x)) - bits<uint32_t>(0x1p23f); }
  __device__ bool counts(float x) const { return place(x) < border(SampleCode::bins); }
  __device__ static Mass mass(float weight) {
    Mass sum = 0;
    Parts parts;
    parts.add(weight);
    parts.move_to(sum);
    return sum;
  }
  // A sum of a few masses in two words, as conversions to 64 bits are slow. Sums with 2^23 round to whole numbers, the
  // second one down.
  struct Parts {
    static constexpr float half = 1 << SampleCode::octaves / 2;
    uint32_t high = 0;
    int32_t low = 0;
    __device__ void add(float weight, bool counts = true) {
      const float up = fmaf(weight, half, 0x1p23f), rest = fmaf(weight, half, 0x1p23f - up);
      const float down = __fmaf_rz(rest, half, 0x1.8p23f);
      if (!counts) return;
      high += bits<uint32_t>(up) - bits<uint32_t>(0x1p23f);
      low += bits<int32_t>(down) - bits<int32_t>(0x1.8p23f);
    }
    __device__ void move_to(Mass& sum) {
      sum += (Mass(high) << SampleCode::octaves / 2) + static_cast<long long>(low);
      high = 0, low = 0;
    }
  };
  // Of x, where all that is left has this mass.
  __device__ float probability(float x, Mass all) const {
    return expf((x - m) * scale) / (float(all) / float(1ull << SampleCode::octaves));
  }
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

// Element k of a pack, where k is not known when this is compiled: packs are in registers, which have no addresses.
template <class T>
__device__ float element(const Pack<T>& pack, int k) {
  const int i = k * static_cast<int>(sizeof(T)) / 4;
  const uint32_t word = i < 2 ? (i == 0 ? pack.words[0] : pack.words[1]) : (i == 2 ? pack.words[2] : pack.words[3]);
  if constexpr (sizeof(T) == 4) return bits<float>(word);
  else return widen(bits<T>(static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16)));
}

// The part of a row that a block has: each of its warps has a range of packs, of which lanes take turns. Copies bring
// them into shared memory, where each thread has slots of its own. If there are not enough slots for all of its packs,
// they come again, mostly from the cache, each time that the thread goes over them.
template <class T>
struct RowPart {
  static constexpr int size = Pack<T>::size, ring = SampleCode::ring;
  const T* const row;
  const Window<T> window;
  const int steps;  // packs of a thread
  const int first;  // the thread's first pack
  const bool stays;  // whether each pack of a thread has a slot
  Pack<T>* const own;

  // `memory` has so many slots for each thread, at least `ring` of them.
  __device__ RowPart(const T* row, uint32_t n, unsigned block, unsigned blocks, void* memory, int slots)
      : row(row), window(row, n, true), steps(steps_of(window.packs, blocks)),
        first((block * SampleCode::warps + threadIdx.x / 32) * of_warp() + threadIdx.x % 32),
        stays(steps <= slots), own(static_cast<Pack<T>*>(memory) + threadIdx.x) {
    if (stays) {
#pragma unroll 1
      for (int j = 0; j < steps; j++) start(j);
    }
  }
  __host__ __device__ static int steps_of(int packs, unsigned blocks) {
    const int in_turn = blocks * SampleCode::threads;
    return (packs + in_turn - 1) / in_turn;
  }
  __device__ int of_warp() const { return steps * 32; }
  __device__ int warp_of(uint32_t index) const { return (index + window.head) / size / of_warp(); }
  __device__ static T nothing() { return narrow<T>(-float(__builtin_huge_val())); }

  // A pack, with -inf in place of what lies beyond the row's ends.
  __device__ Pack<T> fetch(int i) const {
    Pack<T> pack;
    if (i < window.packs) pack = window.fetch(row, i);
    return trimmed(pack, i);
  }

  // Calls use(pack, index of its first element), which may be negative, for each of the thread's packs. All lanes of a
  // warp call it as often.
  template <class Use>
  __device__ void for_packs(Use use) const {
    if (!stays) {
#pragma unroll 1
      for (int j = 0; j < ring - 1; j++) start(j);
    }
#pragma unroll 1
    for (int j = 0; j < steps; j++) {
      if (!stays) {
        start(j + ring - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(ring - 1) : "memory");
      } else if (j == 0) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
      }
      const int i = first + j * 32;
      use(trimmed(*slot(j), i), i * size - window.head);
    }
    asm volatile("" ::: "memory");
  }
  // The same for each element, in little code.
  template <class Use>
  __device__ void for_elements(Use use) const {
    for_packs([&](const Pack<T>& pack, int index) {
#pragma unroll 1
      for (int k = 0; k < size; k++) use(element(pack, k), uint32_t(index + k));
    });
  }

  // One of the packs that the thread has gone over.
  __device__ Pack<T> sample() const { return trimmed(*slot(steps - 1), first + (steps - 1) * 32); }

  // The order of the largest element; all ones if one is NaN.
  __device__ uint32_t top_order() const {
    Pack<T> largest;
    largest.fill(nothing());
    for_packs([&](const Pack<T>& pack, int) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        if constexpr (sizeof(T) == 2)
          largest.words[k] = bits<uint32_t>(__hmax2_nan(bits<Pair<T>>(largest.words[k]), bits<Pair<T>>(pack.words[k])));
        else
          largest.words[k] = bits<uint32_t>(larger(bits<float>(largest.words[k]), bits<float>(pack.words[k])));
    });
    float top = largest.get(0);
#pragma unroll
    for (int k = 1; k < size; k++) top = larger(top, largest.get(k));
    return isnan(top) ? ~0u : order_of(top);
  }

 private:
  __device__ Pack<T>* slot(int j) const { return own + (stays ? j : j % ring) * SampleCode::threads; }
  // Starts to copy a pack into its slot.
  __device__ void start(int j) const {
    const int i = first + j * 32;
    if (j < steps && i < window.packs)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot(j))),
                   "l"(row + (i * size - window.head))
                   : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ Pack<T> trimmed(Pack<T> pack, int i) const {
    if (window.inside(i)) return pack;
    if (i < window.packs) window.trim(pack, i, nothing());
    else pack.fill(nothing());
    return pack;
  }
  __device__ static float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
};

}  // namespace jaxsoft::cuda
