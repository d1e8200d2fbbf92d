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
  // The factors of x - m to the exponent of 2, and to the bin.
  float of_exp2 = scale * float(kLog2E), of_bins = -of_exp2 * (1 / SampleCode::octaves_of_bin);

  __device__ float operator()(float x) const { return exp2_approximately((x - m) * of_exp2); }
  // How far x is below m, in bins, as a float to which 2^23 has been added, so that it is rounded to a whole number. It
  // is `border(bins)` or more only where the mass is 0, as for -inf.
  __device__ float place(float x) const { return fmaf(x - m, of_bins, 0x1p23f); }
  // The x that is `bins` bins below m.
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
  // The sum of at most eight masses, as conversions to 64 bits are slow. Floats from 2^b up to 2^(b + 1) are multiples
  // of 2^(b - 23). So the first sum takes the part of a weight that is a multiple of 2^-20, and the second one that of
  // the rest that is a multiple of 2^-40: both are exact.
  struct Parts {
    static constexpr float no_high = 0x1p3f, no_low = 0x1p-17f;
    static_assert(SampleCode::octaves == 40);
    float high = no_high, low = no_low;
    __device__ void add(float weight) {
      const float sum = __fadd_rz(high, weight);
      low = __fadd_rz(low, weight - (sum - high));
      high = sum;
    }
    // Adds what has been added to the other one alone.
    __device__ void add(const Parts& other) { high += other.high - no_high, low += other.low - no_low; }
    __device__ void move_to(Mass& sum) {
      sum += Mass(bits<uint32_t>(high) - bits<uint32_t>(no_high)) << SampleCode::octaves / 2;
      sum += bits<uint32_t>(low) - bits<uint32_t>(no_low);
      high = no_high, low = no_low;
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

// Which way a thread goes over its packs. If it goes back over those that do not stay, it finds the ones that it has
// gone over last in the cache, even if the cache has no room for all.
enum class Way { forward, back };

// The part of a row that a block has: each of its warps has a range of packs, of which lanes take turns. Copies bring
// them into shared memory, where each thread has slots of its own. If there are not enough slots for all of its packs,
// they come again, mostly from the cache, each time that the thread goes over them.
template <class T>
struct RowPart {
  static constexpr int size = Pack<T>::size, ring = SampleCode::ring, batch = SampleCode::batch;
  const T* const row;
  const Window<T> window;
  const int steps;  // packs of a thread
  const int first;  // the thread's first pack
  const bool stays;       // whether each pack of a thread has a slot
  const bool all_inside;  // whether each pack of a thread belongs to the row entirely
  Pack<T>* const own;  // the thread's first slot
  Pack<T>* const end_of_slots;

  // `memory` has so many slots for each thread, at least `ring` of them.
  __device__ RowPart(const T* row, uint32_t n, unsigned block, unsigned blocks, void* memory, int slots)
      : row(row), window(row, n, true), steps(steps_of(window.packs, blocks)),
        first((block * SampleCode::warps + threadIdx.x / 32) * of_warp() + threadIdx.x % 32),
        stays(steps <= slots), all_inside(window.inside(first) && window.inside(first + (steps - 1) * 32)),
        own(static_cast<Pack<T>*>(memory) + threadIdx.x),
        end_of_slots(own + slots * SampleCode::threads) {
    if (stays) {
#pragma unroll 1
      for (int t = 0; t < steps; t++) start(t, pack_at<Way::forward>(t));
    }
  }
  __host__ __device__ static int steps_of(int packs, unsigned blocks) {
    const int in_turn = blocks * SampleCode::threads;
    return (packs + in_turn - 1) / in_turn;
  }
  __device__ int of_warp() const { return steps * 32; }
  __device__ static T nothing() { return narrow<T>(-float(__builtin_huge_val())); }

  // A pack, with -inf in place of what lies beyond the row's ends.
  __device__ Pack<T> trimmed(Pack<T> pack, int i) const {
    if (window.inside(i)) return pack;
    if (i < window.packs) window.trim(pack, i, nothing());
    else pack.fill(nothing());
    return pack;
  }
  __device__ Pack<T> fetch(int i) const {
    Pack<T> pack;
    if (i < window.packs) pack = window.fetch(row, i);
    return trimmed(pack, i);
  }

  // Calls choose(pack) for each of the thread's packs. It has a bit for each element that is chosen, and for these
  // put(x, index, place) is called, where reserve(count) gives the place of the first of so many. All lanes of a warp
  // call it as often. What is chosen is mostly little. So this is done for some packs together, and in little code.
  // `started` says that start_batch() has been called.
  template <Way way, class Choose, class Reserve, class Put>
  __device__ void for_chosen(Choose choose, Reserve reserve, Put put, bool started = false) const {
    static_assert(batch * size <= 32);
    if (stays) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    } else if (!started) {
      start_batch<way>();
    }
    uint32_t chosen = 0;
    int of_batch = 0;  // packs of the batch that the thread has gone over
    const Pack<T>* here = own;
#pragma unroll 1
    for (int t = 0; t < steps; t++) {
      if (!stays) {
        start(t + batch, pack_at<way>(t + batch));
        asm volatile("cp.async.wait_group %0;" ::"n"(batch) : "memory");
      }
      Pack<T> pack = *here;
      if (!all_inside) pack = trimmed(pack, pack_at<way>(t));
      chosen |= choose(pack) << of_batch * size;
      here += SampleCode::threads;
      if (here == end_of_slots) here = own;
      if (++of_batch < batch && t + 1 < steps) continue;
      if (chosen) {
        auto place = reserve(static_cast<uint32_t>(__popc(chosen)));
#pragma unroll 1
        for (; chosen; chosen &= chosen - 1, place++) {
          const int bit = __ffs(chosen) - 1, pack = t + 1 - of_batch + bit / size, k = bit % size;
          const T x = reinterpret_cast<const T*>(slot(pack))[k];
          put(widen(x), uint32_t(pack_at<way>(pack) * size - window.head + k), place);
        }
      }
      of_batch = 0;
    }
    asm volatile("" ::: "memory");
  }
  // Calls use(pack) for each of the thread's packs.
  template <Way way, class Use>
  __device__ void for_packs(Use use, bool started = false) const {
    for_chosen<way>([&](const Pack<T>& pack) { return use(pack), 0u; }, [](uint32_t) { return 0; },
                    [](float, uint32_t, int) {}, started);
  }
  // Starts to copy the first packs, where they do not stay.
  template <Way way>
  __device__ void start_batch() const {
#pragma unroll 1
    for (int t = 0; t < batch; t++) start(t, pack_at<way>(t));
  }
  // Brings the packs after these into the cache.
  __device__ void bring_batch() const {
    constexpr int of_line = 128 / sizeof(Pack<T>);
    if (threadIdx.x % of_line > 0) return;
#pragma unroll 1
    for (int t = batch; t < 2 * batch; t++)
      if (const int i = first + t * 32; t < steps && i < window.packs)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + (i * size - window.head)) : "memory");
  }
  // Starts to copy pack i into a slot, if it is wanted and there is one.
  __device__ void start_into(Pack<T>* slot, int i, bool wanted) const {
    if (wanted && i < window.packs)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot)),
                   "l"(row + (i * size - window.head))
                   : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Calls use(x, index) for each element, in little code.
  template <class Use>
  __device__ void for_elements(Use use) const {
    for_chosen<Way::forward>([](const Pack<T>&) { return (1u << size) - 1; }, [](uint32_t) { return 0; },
                             [&](float x, uint32_t index, int) {
                               use(index < uint32_t(window.n) ? x : widen(nothing()), index);
                             });
  }

  // The order of the largest element; all ones if one is NaN.
  __device__ uint32_t top_order(bool started) const {
    Pack<T> largest;
    largest.fill(nothing());
    for_packs<Way::forward>([&](const Pack<T>& pack) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        if constexpr (sizeof(T) == 2)
          largest.words[k] = bits<uint32_t>(__hmax2_nan(bits<Pair<T>>(largest.words[k]), bits<Pair<T>>(pack.words[k])));
        else
          largest.words[k] = bits<uint32_t>(larger(bits<float>(largest.words[k]), bits<float>(pack.words[k])));
    }, started);
    float top = largest.get(0);
#pragma unroll
    for (int k = 1; k < size; k++) top = larger(top, largest.get(k));
    return isnan(top) ? ~0u : order_of(top);
  }

 private:
  // The pack that the thread comes to in this step.
  template <Way way>
  __device__ int pack_at(int t) const {
    return first + (way == Way::forward || stays ? t : steps - 1 - t) * 32;
  }
  // The slot of the pack that a thread comes to in this step.
  __device__ Pack<T>* slot(int t) const { return own + (stays ? t : t % ring) * SampleCode::threads; }
  // Starts to copy pack i into the slot for this step.
  __device__ void start(int t, int i) const { start_into(slot(t), i, t < steps); }
  __device__ static float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
};

}  // namespace jaxsoft::cuda
