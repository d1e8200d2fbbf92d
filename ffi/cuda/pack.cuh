// Rows in packs of 16 bytes, the widest access of a thread.
//
// A row may begin anywhere. It is seen through a window that begins at the 16-byte boundary at or before it, so that all
// packs but the first and the last are whole and aligned; of those two, only the row's own elements are used, and only
// they are written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jaxsoft::cuda {

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

template <class To, class From>
__device__ To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Elements stay packed in 32-bit words until they are used: unpacked early, 16-bit ones would take twice the registers.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  using A = Accumulator<T>;
  uint32_t words[4];

  __device__ T raw(int k) const {
    T x;
    if constexpr (sizeof(T) == 2) return bits<T>(static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16)));
    else memcpy(&x, &words[k * sizeof(T) / 4], sizeof x);
    return x;
  }
  __device__ A get(int k) const {
    if constexpr (std::is_same<T, __nv_bfloat16>::value)  // the upper half of an f32
      return bits<float>(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);
    else
      return widen(raw(k));
  }
  __device__ void set(int k, T x) {  // k from 0 upwards
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
  // Elements whose byte in `bytes` is 0, not 1, become x.
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
  // Element k, if there is one, becomes x.
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
  // -inf becomes the least finite number.
  __device__ void make_finite() {
    const A least = std::is_same<T, __half>::value ? A(-65504)
                    : std::is_same<T, __nv_bfloat16>::value ? A(-0x1.fep127)
                    : sizeof(T) == 4 ? A(-0x1.fffffep127) : A(-0x1.fffffffffffffp1023);
#pragma unroll
    for (int k = 0; k < size; k++)
      if (get(k) == -static_cast<A>(__builtin_huge_val())) replace(k, narrow<T>(least));
  }
  __device__ void fill(T x) {
#pragma unroll
    for (int k = 0; k < size; k++) set(k, x);
  }
  __device__ void toggle(uint32_t mask) {
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] ^= mask;
  }
  // x * 0: 0, or NaN.
  __device__ void times_zero() {
    A x[size];
#pragma unroll
    for (int k = 0; k < size; k++) x[k] = get(k) * 0;
    set_all(x);
  }
  // Multiplies bf16 elements by a power of two, pair by pair.
  __device__ void multiply(float factor) {
    uint32_t upper = bits<uint32_t>(factor) >> 16;
#pragma unroll
    for (int k = 0; k < 4; k++)
      words[k] = bits<uint32_t>(__hmul2(bits<Pair<T>>(words[k]), bits<Pair<T>>(upper << 16 | upper)));
  }
  // The maximum of the elements that are numbers; -inf if there are none.
  __device__ A maximum() const {
    A m = -static_cast<A>(__builtin_huge_val());
    if constexpr (sizeof(T) == 2) {
      auto pair = [&](int k) { return bits<Pair<T>>(words[k]); };
      Pack top;
      top.words[0] = bits<uint32_t>(__hmax2(__hmax2(pair(0), pair(1)), __hmax2(pair(2), pair(3))));
      return max(max(m, top.get(0)), top.get(1));
    }
#pragma unroll
    for (int k = 0; k < size; k++) m = max(m, get(k));
    return m;
  }
};

// The smaller of two elements; of a number and a NaN, the NaN.
__device__ inline float smaller(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline double smaller(double a, double b) { return a < b || isnan(a) ? a : b; }

// Takes the maximum of the elements that are numbers out of some packs: -inf takes its place, and the others may change
// theirs.
template <class T, int count>
__device__ Accumulator<T> take_maximum(Pack<T> (&packs)[count]) {
  using A = Accumulator<T>;
  using Word = std::conditional_t<sizeof(T) == 8, double, std::conditional_t<sizeof(T) == 4, float, uint32_t>>;
  constexpr int a_pack = 16 / sizeof(Word), all = count * a_pack;
  const A none = -static_cast<A>(__builtin_huge_val());
  Word words[all];
  memcpy(words, packs, sizeof words);
  // A knockout: the larger of two goes on to the next round, the smaller stays behind, and a NaN with it.
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

// A byte an element of a pack, 1 for those in [begin, end), as Pack::keep takes them.
constexpr uint64_t kEveryByte = 0x0101010101010101;
__device__ inline uint64_t range_bytes(int begin, int end) {
  int low = 4 * max(begin, 0), high = 4 * min(8 - end, 8);  // each twice, as a shift by 64 bits has no value
  return kEveryByte << low << low & kEveryByte >> high >> high;
}

// Packs of a line of the cache, 128 bytes.
constexpr int kLine = 8;

// How the rows of all operands lie: anyhow, or so that every row begins and ends at a multiple of 8 or 16 bytes.
enum class Layout { any, halves, whole };

// Elements of a row's first pack that are not the row's, in an operand like which all others lie, or not.
template <class T>
__device__ int head_of(const T* row, bool vector) {
  return vector ? static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)) : 0;
}

// The window on n elements, a row or a part of one. Pack i holds the elements [i * size - head, ...) of them. Positions
// are ints, which take fewer registers. Rows of halves have no head: a pack is read and written in two pieces.
template <class T, Layout layout = Layout::any>
struct Window {
  static constexpr int size = Pack<T>::size;
  int n;
  int head = 0;  // elements of the first pack that are not the row's
  int packs;
  int whole_end;  // packs [whole_begin(), whole_end) are all the row's own
  bool vector;      // whether the operands lie alike, so that packs of all of them are aligned

  // `like` is the row in any of the operands.
  __device__ Window(const T* like, int n, bool vector) : n(n), vector(layout != Layout::any || vector) {
    if (layout == Layout::any) head = head_of(like, vector);
    whole_end = (head + n) / size;
    packs = layout == Layout::whole ? whole_end : (head + n + size - 1) / size;
  }
  __device__ int whole_begin() const { return head > 0; }
  __device__ bool inside(int i) const { return layout == Layout::whole || (i < whole_end && (i > 0 || head == 0)); }
  __device__ bool whole(int i) const { return vector && inside(i); }
  // Pack i as it lies in memory: anything past the row's ends. 16 bytes that begin at a multiple of 16 lie in device
  // memory if one of them does. So that a thread may have many reads on the way, nothing here waits for what is read.
  __device__ Pack<T> fetch(const T* row, int i) const {
    if constexpr (layout == Layout::halves) {
      auto* half = reinterpret_cast<const uint2*>(row + i * size);
      uint2 low = half[0], high = inside(i) ? half[1] : uint2{};
      return {{low.x, low.y, high.x, high.y}};
    }
    if (vector) return *reinterpret_cast<const Pack<T>*>(row + (i * size - head));
    return gather(row, i);
  }
  // The same of a row that may lie otherwise than the window's.
  __device__ Pack<T> fetch_anywhere(const T* row, bool aligned, int i) const {
    if (layout == Layout::whole || (aligned && inside(i)))
      return *reinterpret_cast<const Pack<T>*>(row + (i * size - head));
    return gather(row, i);
  }
  __device__ Pack<T> gather(const T* row, int i) const {
    int first = i * size - head;
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < size; k++) pack.set(k, first + k >= 0 && first + k < n ? row[first + k] : narrow<T>(0));
    return pack;
  }
  // Elements past the row's ends become `fill`.
  __device__ void trim(Pack<T>& pack, int i, T fill) const {
    if (inside(i)) return;
    if constexpr (layout == Layout::halves) {
      Pack<T> all;
      all.fill(fill);
      pack.words[2] = all.words[2], pack.words[3] = all.words[3];
      return;
    }
    int first = i * size - head;
    pack.keep(range_bytes(-first, min(n - first, size)), fill);
  }
  __device__ void store(T* row, int i, Pack<T> pack) const {
    int first = i * size - head;
    if constexpr (layout == Layout::halves) {
      auto* half = reinterpret_cast<uint2*>(row + first);
      half[0] = {pack.words[0], pack.words[1]};
      if (inside(i)) half[1] = {pack.words[2], pack.words[3]};
      return;
    }
    if (whole(i)) {
      *reinterpret_cast<Pack<T>*>(row + first) = pack;
      return;
    }
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < n) row[first + k] = pack.raw(k);
  }
};

}  // namespace jaxsoft::cuda
