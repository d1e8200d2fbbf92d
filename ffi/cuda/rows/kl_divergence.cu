// kl_divergence: sum(p * (log(p) - log(q))) of each row, with p the softmax of scores z and q that of scores w, reading
// each array once.
//
// With d = log(q / p) = (w - z) - c, where c is the logsumexp of w less that of z, the sum of p * (exp(d) - 1) is 0. So
// the divergence is the sum of p * h(d), with h(d) = exp(d) - 1 - d. No term is negative, and nothing cancels, however
// near p and q are. What a part of a row is reduced to has all this for the part alone; the chain rule combines parts:
//
//   m, s     the state of its scores z
//   c, k     the ratio and the divergence within the part
//   mq, sq   the state of those of its scores w beside which z has nearly no weight: they add to q alone
//
// c and k keep all their digits relative to themselves, since they are found from sums of exp(d) - 1 and of h(d) with a
// reference near c in d's place of it, which is corrected in the end.
//
// The gradients are g * p * (-d - k) by z, and g * (q - p) = g * p * (exp(d) - 1) by w, times their scales.
#include "kl_divergence.cuh"

#include <algorithm>
#include <climits>

#include "../devices.cuh"
#include "../exponential.cuh"
#include "../window.cuh"

namespace jaxsoft::cuda {
namespace {

// Up to here |d| is small, and h is a polynomial. Beyond kLargest, p is nothing beside q.
constexpr float kSmall = 1, kLargest = 50;
// Where the mean of h is above this, exp(d) - 1 - d is exact enough for small d, too.
constexpr float kFar = 1.f / 128;
// The maximum that weights are relative to is raised when a score is above it by so much: seldom. A weight that is then
// too small for f32 has a q of at most exp(kLag + kLargest - 87).
constexpr float kLag = 8;
// The reference is changed for elements with so many times the weight of all before.
constexpr float kHeavier = 8;
// In the place of a distance of -inf: the divergence is then above kInfinite.
constexpr float kFurthest = -1e30f, kInfinite = 1e20f;

template <class A>
__device__ A reference(A m) {
  return isfinite(m) ? m : A(0);
}
// exp(x), as a term of a sum.
template <class A>
__device__ A term(A x) {
  return power(exponent<false>(x, A(0)));
}
// exp(m - to), by which a sum relative to m is multiplied to be relative to `to`. 0 for an m of -inf.
template <class A>
__device__ A weight(A m, A to) {
  return term(m - reference(to));
}
// h(d) / d^2 for small d: 1/2! + d/3! + d^2/4! + ..., in f32 the polynomial with the least relative error (1.5e-6).
template <class A>
__device__ A series_beyond(A d) {
  if constexpr (sizeof(A) == 4) {
    constexpr A factors[] = {0.50000077f, 0.16666590f, 0.041652795f, 0.0083352551f, 0.0014262538f, 0.00019977662f};
    A sum = factors[5];
#pragma unroll
    for (int i = 4; i >= 0; i--) sum = fma(sum, d, factors[i]);
    return sum;
  } else {
    constexpr int terms = 18;
    double factorial[terms + 2] = {1, 1};
    for (int i = 2; i < terms + 2; i++) factorial[i] = factorial[i - 1] * i;
    A sum = A(1 / factorial[terms + 1]);
#pragma unroll
    for (int i = terms; i >= 2; i--) sum = fma(sum, d, A(1 / factorial[i]));
    return sum;
  }
}
template <class A>
__device__ A beyond(A d) {
  return fabs(d) < A(kSmall) ? d * d * series_beyond(d) : term(d) - 1 - d;
}

// Sums over a set of elements, or of parts, with d from a reference: of the weights a of p, of a * exp(d), of a * h(d),
// and of a * d. The divergence within parts is added to the third, and taken from the fourth.
template <class A>
struct Sums {
  A s = 0, grown = 0, beyond = 0, linear = 0;
  __device__ void scale(A factor) { s *= factor, grown *= factor, beyond *= factor, linear *= factor; }
  __device__ void add(A a, A d, A within) {
    s += a, grown += a * term(d), beyond += a * (within + cuda::beyond(d)), linear += a * (d - within);
  }
  // Adds what has so little of p beside its q that it is left out of q's sum here, or so little of q.
  __device__ void add_without_q(A a, A linear_part) { s += a, beyond -= a + linear_part, linear += linear_part; }
};

template <class A>
struct Part {
  A m = -INFINITY, s = 0, c = 0, k = 0, mq = -INFINITY, sq = 0;

  // What sums with the reference c amount to. The reference is corrected by what the sum of p * (exp(d) - 1) differs
  // from 0, which also is the sum of p * h(d) and of p * d.
  __device__ void set(A c, const Sums<A>& sums) {
    s = sums.s, this->c = c, k = 0;
    if (s == 0) return;
    const A excess = (sums.linear + sums.beyond) / s;
    if (fabs(excess) < A(0.5)) {
      const A log = log1p(excess);
      A series = 0;  // of log - excess
      for (int i = 16; i >= 2; i--) series = A(i % 2 ? 1.0 : -1.0) / i + excess * series;
      this->c += log;
      k = sums.beyond / s + (fabs(excess) < A(0.1) ? excess * excess * series : log - excess);
    } else {  // then the divergence is no small difference
      const A log = ::log(max(sums.grown / s, A(1e-30)));
      this->c += log, k = log - sums.linear / s;
    }
  }
  // Adds scores that belong to q alone: so many whose exponential is that of w.
  __device__ void add_alone(A w, A count = 1) {
    if (w > mq) sq *= weight(mq, w), mq = w;
    sq += count * term(w - reference(mq));
  }
};

// Adds one of the parts that are combined, given the maximum m and the ratio c of the one with the most weight.
template <class A>
__device__ void add_part(Part<A>& to, Sums<A>& sums, const Part<A>& part, A m, A c) {
  const A a = part.s * weight(part.m, m), d = part.c - c;
  if (part.sq != 0) to.add_alone(part.mq, part.sq);
  if (part.s == 0) return;
  if (d > A(kLargest) || a == 0) {
    to.add_alone(part.m + ::log(part.s) + part.c);
    sums.add_without_q(a, a * (d - part.k));
  } else {
    sums.add(a, d, part.k);
  }
}

template <class A>
__device__ Part<A> combine(const Part<A>& a, const Part<A>& b) {
  Part<A> both;
  both.m = max(a.m, b.m);
  Sums<A> sums;
  const bool first = a.s * weight(a.m, both.m) >= b.s * weight(b.m, both.m);
  const A c = first ? a.c : b.c;
  add_part(both, sums, a, both.m, c), add_part(both, sums, b, both.m, c);
  both.set(c, sums);
  return both;
}

template <class A>
__device__ A add_lanes(A x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
template <class A>
__device__ A largest_of_lanes(A x) {
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// Combines the parts of all lanes of a warp, in each of them.
template <class A>
__device__ Part<A> reduce_warp(const Part<A>& part) {
  Part<A> all, own;
  all.m = largest_of_lanes(part.m);
  const A mass = part.s * weight(part.m, all.m), most = largest_of_lanes(mass);
  const unsigned best = __ballot_sync(0xffffffffu, mass == most);
  const A c = __shfl_sync(0xffffffffu, part.c, best ? __ffs(best) - 1 : 0);
  Sums<A> sums;
  add_part(own, sums, part, all.m, c);
  sums = {add_lanes(sums.s), add_lanes(sums.grown), add_lanes(sums.beyond), add_lanes(sums.linear)};
  if (__any_sync(0xffffffffu, own.sq != 0)) {
    all.mq = largest_of_lanes(own.mq);
    all.sq = add_lanes(own.sq * weight(own.mq, all.mq));
  }
  all.set(c, sums);
  return all;
}

// Combines the parts of all threads of a block, in the first warp.
template <class A>
__device__ Part<A> reduce_block(Part<A> part) {
  part = reduce_warp(part);
  if (blockDim.x == 32) return part;
  __shared__ Part<A> warps[32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  if (threadIdx.x >= 32) return part;
  return reduce_warp(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : Part<A>());
}

// A thread's part as it grows, with d from the reference c. A weight is 2^(z log2(e) - shift), or e^(z - shift) in f64,
// where a shift by the maximum has digits after the point; else it is exp(z - m).
template <class A>
struct Running {
  static constexpr A to_base = sizeof(A) == 4 ? A(kLog2E) : A(1);
  Part<A> part;
  Sums<A> sums;
  A shift = 0, highest = -INFINITY;  // the largest score, above m by at most kLag
  bool small = true;  // whether all distances were small when it was last asked

  static __device__ bool may_shift(A m) { return fabs(m) < A(0x1p20); }
  __device__ A weight_of(A z) const { return power(fma(z, to_base, -shift)); }
  // What weights are too large by, as the shift is rounded.
  __device__ A excess() const { return may_shift(part.m) ? weight_of(part.m) : A(1); }

  // Adds elements, of which the largest score of p is given. Returns false, and has added nothing, if some of them do
  // not count, or have scores that are infinite, no numbers or very large, or distances that are.
  template <int count>
  __device__ bool add(const A (&z)[count], const A (&w)[count], A top) {
    if (top > part.m + A(kLag)) raise(top);
    if (!may_shift(part.m)) return false;
    highest = max(highest, top);
    if (sums.s == 0) start(z, w, top);
    Sums<A> more;
    A furthest = 0;
    bool done;
    if (small) {
#pragma unroll
      for (int k = 0; k < count; k++) {
        const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c;
        furthest = max(furthest, fabs(d)), more.s += a;
        more.beyond = fma(a * (d * d), series_beyond(d), more.beyond), more.linear = fma(a, d, more.linear);
      }
      done = furthest < A(kSmall);
    } else {
#pragma unroll
      for (int k = 0; k < count; k++) {
        const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c;
        furthest = max(furthest, d), more.s += a;
        more.beyond = fma(a, (power(d * to_base) - 1) - d, more.beyond), more.linear = fma(a, d, more.linear);
      }
      done = furthest < A(kLargest) && more.beyond > A(kFar) * more.s;
    }
    const bool heavier = more.s > A(kHeavier) * sums.s && sums.s != 0;
    if (heavier) move_reference(ratio_at(z, w, top));
    if ((heavier || !done) && !sums_of(z, w, &more)) return false;
    if (!isfinite(more.beyond)) return false;
    sums.s += more.s, sums.beyond += more.beyond, sums.linear += more.linear;
    sums.grown += more.s + (more.linear + more.beyond);
    return true;
  }
  // The sums of elements of which some are near and others far. Returns false if one is too far.
  template <int count>
  __device__ bool sums_of(const A (&z)[count], const A (&w)[count], Sums<A>* more) {
    *more = {};
    A nearest = 0, furthest = 0;
#pragma unroll
    for (int k = 0; k < count; k++) {
      const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c;
      const A h = fabs(d) < A(kSmall) ? d * d * series_beyond(d) : (power(d * to_base) - 1) - d;
      nearest = min(nearest, d), furthest = max(furthest, d);
      more->s += a, more->beyond = fma(a, h, more->beyond), more->linear = fma(a, d, more->linear);
    }
    small = max(-nearest, furthest) < A(kSmall);
    return furthest < A(kLargest);
  }
  // Takes the reference of the first elements.
  template <int count>
  __device__ void start(const A (&z)[count], const A (&w)[count], A top) {
    move_reference(ratio_at(z, w, top));
    A furthest = 0;
#pragma unroll
    for (int k = 0; k < count; k++) furthest = max(furthest, fabs((w[k] - z[k]) - part.c));
    small = furthest < A(kSmall);
  }
  // The ratio of the element with the largest score.
  template <int count>
  __device__ A ratio_at(const A (&z)[count], const A (&w)[count], A top) const {
    A c = part.c;
#pragma unroll
    for (int k = 0; k < count; k++) c = z[k] == top ? w[k] - z[k] : c;
    return c;
  }
  // Adds any element.
  __device__ void add_one(A z, A w) {
    if (z > part.m + A(kLag)) raise(z);
    highest = max(highest, z);
    const A a = may_shift(part.m) ? weight_of(z) : term(z - reference(part.m));
    if (a > sums.s) move_reference(w - z);
    const A d = max((w - z) - part.c, A(kFurthest));
    if (isnan(z) || isnan(w)) {
      sums.s = A(nan(""));
    } else if (a == 0 || d > A(kLargest)) {
      if (w != A(-INFINITY)) part.add_alone(w);
      if (a != 0) sums.add_without_q(a, a * d);
    } else {
      sums.add(a, d, A(0));
    }
  }
  // Takes a larger maximum. What has no weight beside it belongs to q alone.
  __device__ void raise(A top) {
    if (sums.s != 0) {
      const A factor = weight(part.m, top) / excess();
      if (factor == 0 && sums.grown > 0) part.add_alone(part.m + ::log(sums.grown) + part.c);
      sums.scale(factor);
    }
    part.m = top, shift = may_shift(top) ? top * to_base : A(0);
    if (sums.s != 0) sums.scale(excess());
  }
  // Takes another reference, if it is a finite number.
  __device__ void move_reference(A c) {
    const A by = c - part.c;
    if (!isfinite(by)) return;
    if (sums.s != 0) {
      if (fabs(by) < A(kSmall / 2)) return;
      const A linear = sums.linear - by * sums.s;
      if (fabs(by) < A(kLargest)) {
        const A factor = term(-by);
        sums.beyond = fma(factor, sums.beyond, fma(factor - 1, sums.linear, sums.s * beyond(-by)));
        sums.grown *= factor, sums.linear = linear;
      } else {
        if (by < 0 && sums.grown > 0) part.add_alone(part.m + ::log(sums.grown / excess()) + part.c);
        sums = {sums.s, 0, -sums.s - linear, linear};
      }
    }
    part.c = c;
  }
  __device__ Part<A> finish() {
    if (highest > part.m) raise(highest);
    if (sums.s != 0) sums.scale(1 / excess());
    part.set(part.c, sums);
    return part;
  }
};

template <class T>
struct Arguments {
  using A = Accumulator<T>;
  const T *x, *y;
  T *dx, *dy;
  A *m, *s, *ratio, *divergence;
  const A* cotangent;
  int64_t rows, n;
  bool vector;
  Extras extras;
};

__device__ inline int64_t offset(const Extras& extras, const Extra& extra, int64_t row) {
  int64_t sum = 0;
  for (int i = 0; i < extras.groups; i++) sum += row / extras.divisor[i] % extras.size[i] * extra.stride[i];
  return sum;
}

// A part of a row of both arrays, and how the scores are made of it.
template <class T, bool with_extras>
struct Row {
  using A = Accumulator<T>;
  static constexpr int size = Pack<T>::size;
  const T *x, *y;
  Window<T> window;
  A scale = 1, other_scale = 1;
  int limit;                    // elements from here on do not count
  const bool* where = nullptr;  // which do, if it is not null

  __device__ Row(const Arguments<T>& args, int64_t row, int64_t begin, int64_t end)
      : x(args.x + row * args.n + begin), y(args.y + row * args.n + begin),
        window(x, static_cast<int>(end - begin), args.vector), limit(window.n) {
    if constexpr (!with_extras) return;
    const Extras& extras = args.extras;
    if (extras.scale.data) scale = static_cast<const A*>(extras.scale.data)[offset(extras, extras.scale, row)];
    if (extras.other_scale.data)
      other_scale = static_cast<const A*>(extras.other_scale.data)[offset(extras, extras.other_scale, row)];
    if (extras.limit.data) {
      const int64_t given = static_cast<const int32_t*>(extras.limit.data)[offset(extras, extras.limit, row)];
      limit = static_cast<int>(min(int64_t(limit), max(int64_t(0), given - begin)));
    }
    if (extras.where.data)
      where = static_cast<const bool*>(extras.where.data) + offset(extras, extras.where, row) + begin;
  }
  __device__ bool counts(int element) const {
    return element >= 0 && element < limit && (!with_extras || !where || where[element]);
  }
  // The scores of pack i, which is in the row as a whole. Those that do not count are so small that they have no weight,
  // and their distance is 0.
  __device__ void scores(const Pack<T>& of_x, const Pack<T>& of_y, int i, A* z, A* w) const {
#pragma unroll
    for (int k = 0; k < size; k++) z[k] = of_x.get(k), w[k] = of_y.get(k);
    if constexpr (with_extras) {
#pragma unroll
      for (int k = 0; k < size; k++) z[k] = multiplied(z[k], scale), w[k] = multiplied(w[k], other_scale);
      const int first = i * size - window.head;
      if (!where && first + size <= limit) return;
#pragma unroll
      for (int k = 0; k < size; k++)
        if (!counts(first + k)) z[k] = w[k] = A(-3e38f);
    }
  }
  // The scores of one element, which is read anew; -inf if it does not count.
  __device__ void score(int element, A* z, A* w) const {
    *z = *w = A(-INFINITY);
    if (!counts(element)) return;
    *z = multiplied(widen(x[element]), scale), *w = multiplied(widen(y[element]), other_scale);
  }
  static __device__ float multiplied(float a, float b) { return __fmul_rn(a, b); }  // never fused with a difference
  static __device__ double multiplied(double a, double b) { return __dmul_rn(a, b); }
};

constexpr int kThreads = 128;
constexpr int kInFlight = 2;          // packs of each array that a thread has
constexpr int kLeastPacks = 8;        // of each array that a thread has, where a block could have fewer threads
constexpr int kBlocks = 4;            // of each multiprocessor, where rows are cut for want of rows
constexpr int64_t kLeastPart = 1024;  // packs of a part of a row

// Reduces a part of a row by the block's threads. The first warp gets the result.
template <class T, bool with_extras>
__device__ Part<Accumulator<T>> reduce_row(const Arguments<T>& args, int64_t row, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  constexpr int size = Pack<T>::size;
  const Row<T, with_extras> at(args, row, begin, end);
  Running<A> running;
  auto one_by_one = [&](int element, int end) {
#pragma unroll 1
    for (element = max(element, 0), end = min(end, at.window.n); element < end; element++) {
      A z, w;
      at.score(element, &z, &w);
      if (z != A(-INFINITY) || w != A(-INFINITY)) running.add_one(z, w);
    }
  };
  // Adds packs i, i + step, ... of the row, as they have been loaded.
  auto add = [&](const auto& x, const auto& y, int i, int step) {
    constexpr int packs = sizeof(x) / sizeof(Pack<T>);
    A z[packs * size], w[packs * size], top = A(-INFINITY);
#pragma unroll
    for (int k = 0; k < packs; k++) at.scores(x[k], y[k], i + k * step, z + k * size, w + k * size);
    if constexpr (!with_extras) {
      top = maximum_of(x);  // the same in fewer steps
    } else {
#pragma unroll
      for (int k = 0; k < packs * size; k++) top = max(top, z[k]);
    }
    if (running.add(z, w, top)) return;
    for (int k = 0; k < packs; k++) {
      const int element = (i + k * step) * size - at.window.head;
      one_by_one(element, element + size);
    }
  };

  const int step = blockDim.x, first = at.window.whole_begin() + threadIdx.x, last = at.window.whole_end;
  if (!args.vector) {
    for (int i = threadIdx.x; i < at.window.n; i += step) one_by_one(i, i + 1);
    return reduce_block(running.finish());
  }
  // The elements of packs that are in the row in part are taken by the last threads, which may have less to do.
  if (threadIdx.x == step - 1 && at.window.head > 0) one_by_one(0, size - at.window.head);
  if (threadIdx.x == step - 2 && at.window.whole_end < at.window.packs && last >= at.window.whole_begin())
    one_by_one(last * size - at.window.head, at.window.n);
  const Pack<T>* from_x = reinterpret_cast<const Pack<T>*>(at.x - at.window.head) + first;
  const Pack<T>* from_y = reinterpret_cast<const Pack<T>*>(at.y - at.window.head) + first;
  Pack<T> x[kInFlight], y[kInFlight];
  auto load = [&] {
#pragma unroll
    for (int k = 0; k < kInFlight; k++) x[k] = from_x[k * step], y[k] = from_y[k * step];
  };
  const int all = (kInFlight - 1) * step;
  int i = first;
  if (i + all < last) load();
  while (i + all < last) {
    Pack<T> here_x[kInFlight], here_y[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; k++) here_x[k] = x[k], here_y[k] = y[k];
    from_x += kInFlight * step, from_y += kInFlight * step;
    if (i + kInFlight * step + all < last) load();  // while these are computed
    add(here_x, here_y, i, step);
    i += kInFlight * step;
  }
  for (; i < last; i += step, from_x += step, from_y += step) {
    const Pack<T> one_x[1] = {*from_x}, one_y[1] = {*from_y};
    add(one_x, one_y, i, step);
  }
  return reduce_block(running.finish());
}

// Writes the results of a row. What belongs to q alone joins by the chain rule.
template <class T>
__device__ void write(const Arguments<T>& args, int64_t row, const Part<Accumulator<T>>& part) {
  using A = Accumulator<T>;
  const A alone = part.sq == 0 ? A(-INFINITY) : part.mq + ::log(part.sq);
  A c = alone, k = 0;
  if (part.s != 0) {
    const A more = alone - (part.m + ::log(part.s) + part.c);
    const A log = more > 30 ? more : log1p(exp(more));
    c = part.c + log, k = part.k + log;
    if (k > A(kInfinite)) k = INFINITY;
    k = max(k, A(0));
  }
  const bool undefined = isnan(part.s) || isnan(part.k) || isnan(part.sq) || part.m == A(INFINITY) ||
                         part.mq == A(INFINITY);
  args.m[row] = part.m, args.s[row] = part.s;
  args.ratio[row] = c, args.divergence[row] = undefined ? A(nan("")) : k;
}

template <class T, bool with_extras>
__global__ void __launch_bounds__(kThreads)
    kl_divergence_rows(const __grid_constant__ Arguments<T> args) {
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    if (row != blockIdx.x) __syncthreads();  // the first warp has read the parts of the row before
    const auto part = reduce_row<T, with_extras>(args, row, 0, args.n);
    if (threadIdx.x == 0) write(args, row, part);
  }
}

// Reduces parts of rows, each of so many elements.
template <class T, bool with_extras>
__global__ void __launch_bounds__(kThreads)
    kl_divergence_parts(const __grid_constant__ Arguments<T> args, int64_t length, unsigned parts,
                        Part<Accumulator<T>>* found) {
  const int64_t row = blockIdx.x / parts, begin = blockIdx.x % parts * length;
  const auto part = reduce_row<T, with_extras>(args, row, begin, min(begin + length, args.n));
  if (threadIdx.x == 0) found[blockIdx.x] = part;
}

// Combines the parts of each row, by a warp.
template <class T>
__global__ void kl_divergence_merge(const __grid_constant__ Arguments<T> args, unsigned parts,
                                    const Part<Accumulator<T>>* found) {
  const Part<Accumulator<T>>* of_row = found + int64_t(blockIdx.x) * parts;
  Part<Accumulator<T>> part;
  for (unsigned i = threadIdx.x; i < parts; i += 32) part = combine(part, of_row[i]);
  part = reduce_warp(part);
  if (threadIdx.x == 0) write(args, blockIdx.x, part);
}

// The gradients, of packs that blocks share out row by row.
template <class T, bool with_extras, bool both>
__global__ void __launch_bounds__(kThreads)
    kl_divergence_gradients(const __grid_constant__ Arguments<T> args, unsigned blocks) {
  using A = Accumulator<T>;
  constexpr int size = Pack<T>::size;
  const int64_t row = blockIdx.x / blocks;
  const int64_t per_block = int64_t(blockDim.x) * kInFlight;
  const Row<T, with_extras> at(args, row, 0, args.n);
  const int first = static_cast<int>(blockIdx.x % blocks * per_block) + threadIdx.x;
  Pack<T> x[kInFlight], y[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; k++) {
    const int i = min(first + k * static_cast<int>(blockDim.x), at.window.packs - 1);
    x[k] = at.window.fetch(at.x, i), y[k] = at.window.fetch(at.y, i);
  }
  const A m = reference(args.m[row]), s = args.s[row], c = args.ratio[row], g = args.cotangent[row];
  const A k = reference(args.divergence[row]);
  const A inverse = s == 0 ? A(0) : 1 / s;
  // The logsumexp of w; where there is no p, or no q, exponentials relative to it are 0.
  const A ratio = m + ::log(s) + c, other = s == 0 || ratio == A(-INFINITY) ? A(INFINITY) : ratio;
  const A by_x = g * at.scale, by_y = g * at.other_scale;
  T* const dx = both ? args.dx + row * args.n : nullptr;
  T* const dy = args.dy + row * args.n;
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int i = first + j * blockDim.x;
    if (i >= at.window.packs) continue;
    A z[size], w[size];
    at.scores(x[j], y[j], i, z, w);
#pragma unroll
    for (int e = 0; e < size; e++) {
      const bool masked = with_extras && !at.counts(i * size - at.window.head + e);
      const A p = exponential<T>(z[e] - m) * inverse, d = (w[e] - z[e]) - c;
      A slope = exponential<T>(w[e] - other) - p;
      // Of results of 16 bits, the difference has all digits sooner.
      if constexpr (sizeof(T) == 2) slope = fabs(d) < A(0x1p-6) ? p * fma(d * A(0.5), d, d) : slope;
      else slope = fabs(d) < A(kSmall) ? p * fma(d * d, series_beyond(d), d) : slope;
      if constexpr (both) z[e] = p == 0 || masked ? A(0) : -by_x * p * ((isinf(d) ? A(0) : d) + k);
      w[e] = masked ? A(0) : by_y * slope;
    }
    Pack<T> pack;
    if constexpr (both) pack.set_all(z), at.window.store(dx, i, pack);
    pack.set_all(w), at.window.store(dy, i, pack);
  }
}

template <class T, bool with_extras>
cudaError_t launch_forward(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  using A = Accumulator<T>;
  Device device;
  if (auto e = device.read()) return e;
  const int64_t packs = (args.n + Pack<T>::size - 1) / Pack<T>::size + 1;
  const int64_t warps = (packs / kLeastPacks + 31) / 32;
  const int threads = static_cast<int>(std::max<int64_t>(32, std::min<int64_t>(kThreads, warps * 32)));
  const int64_t wanted = int64_t(kBlocks) * device.processors / args.rows;
  const int64_t room = bytes / static_cast<int64_t>(sizeof(Part<A>)) / args.rows;
  int64_t parts = std::max<int64_t>(1, std::min({wanted, room, packs / kLeastPart}));
  parts = std::max(parts, (args.n + INT_MAX / 2) / (INT_MAX / 2));
  if (parts == 1) {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.rows, INT_MAX));
    kl_divergence_rows<T, with_extras><<<blocks, threads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  if (parts > room || args.rows * parts > INT_MAX) return cudaErrorInvalidValue;
  constexpr int64_t line = 128 / sizeof(T);  // so that parts share no cache lines where rows begin with one
  const int64_t length = ((args.n + parts - 1) / parts + line - 1) / line * line;
  parts = (args.n + length - 1) / length;
  auto* const found = static_cast<Part<A>*>(workspace);
  const auto rows = static_cast<unsigned>(args.rows), of_row = static_cast<unsigned>(parts);
  kl_divergence_parts<T, with_extras><<<rows * of_row, threads, 0, stream>>>(args, length, of_row, found);
  if (auto e = cudaGetLastError()) return e;
  kl_divergence_merge<T><<<rows, 32, 0, stream>>>(args, of_row, found);
  return cudaGetLastError();
}

template <class T, bool with_extras>
cudaError_t launch_gradients(const Arguments<T>& args, cudaStream_t stream) {
  const int64_t packs = (args.n + Pack<T>::size - 1) / Pack<T>::size + 1;
  const int threads = static_cast<int>(std::min<int64_t>(kThreads, (packs + 31) / 32 * 32));
  const int64_t blocks = (packs + threads * kInFlight - 1) / (threads * kInFlight);
  if (args.rows * blocks > INT_MAX || args.n > INT_MAX / 2) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(args.rows * blocks), of_row = static_cast<unsigned>(blocks);
  if (args.dx) kl_divergence_gradients<T, with_extras, true><<<grid, threads, 0, stream>>>(args, of_row);
  else kl_divergence_gradients<T, with_extras, false><<<grid, threads, 0, stream>>>(args, of_row);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t run_kl_divergence(const Call& call, cudaStream_t stream) {
  using A = Accumulator<T>;
  const Buffers& buffers = call.buffers;
  auto number = [](const Buffer& buffer) { return static_cast<A*>(buffer.data); };
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  Arguments<T> args;
  args.x = static_cast<const T*>(buffers.first.data), args.y = static_cast<const T*>(buffers.other.data);
  args.dx = static_cast<T*>(buffers.result.data), args.dy = static_cast<T*>(buffers.other_result.data);
  args.m = number(buffers.maximum), args.s = number(buffers.sum);
  args.ratio = number(buffers.ratio), args.divergence = number(buffers.beside);
  args.cotangent = number(buffers.cotangent);
  args.rows = call.shape.rows, args.n = call.shape.n;
  args.vector = aligned(args.x) && aligned(args.y) && aligned(args.dx) && aligned(args.dy);
  args.extras = call.extras;
  const Extras& extras = call.extras;
  const bool with_extras = extras.scale.data || extras.other_scale.data || extras.limit.data || extras.where.data;
  if (args.cotangent) {
    if (with_extras) return launch_gradients<T, true>(args, stream);
    return launch_gradients<T, false>(args, stream);
  }
  void* const workspace = buffers.workspace.data;
  const int64_t bytes = buffers.workspace.bytes();
  if (with_extras) return launch_forward<T, true>(args, workspace, bytes, stream);
  return launch_forward<T, false>(args, workspace, bytes, stream);
}

template cudaError_t run_kl_divergence<__half>(const Call&, cudaStream_t);
template cudaError_t run_kl_divergence<__nv_bfloat16>(const Call&, cudaStream_t);
template cudaError_t run_kl_divergence<float>(const Call&, cudaStream_t);
template cudaError_t run_kl_divergence<double>(const Call&, cudaStream_t);

}  // namespace jaxsoft::cuda
