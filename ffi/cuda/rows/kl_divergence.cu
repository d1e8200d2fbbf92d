// kl_divergence: sum(p * (log(p) - log(q))) of each row, with p the softmax of scores z and q that of scores w, reading
// each array once.
//
// With d = log(q / p) = (w - z) - c, where c is the logsumexp of w less that of z, the sum of p * (exp(d) - 1) is 0. So
// the divergence is the sum of p * h(d), with h(d) = exp(d) - 1 - d. No term is negative, and nothing cancels, however
// near p and q are. c is not known before the end: a thread has a reference near it in its place, which is corrected
// then. The threads of a warp share a maximum and a reference, and move them seldom, as those who do delay the others.
//
// Scores w beside which z has nearly no weight add to q alone. They have a state of their own, (mq, sq).
//
// Where z and w are far from each other, or huge, w - z loses digits of both: a number near each is subtracted first,
// the origin, and c is that of what is left.
//
// The gradients are g * p * (-d - k) by z, and g * (q - p) = g * p * (exp(d) - 1) by w, times their scales.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "../../rows/call.h"
#include "../devices.cuh"
#include "../fold.cuh"
#include "rows.cuh"
#include "score.cuh"

namespace jaxsoft::cuda {
namespace {

// Up to here |d| is small, and h is a polynomial. Beyond kLargest, p is nothing beside q.
constexpr float kSmall = 0.5f, kLargest = 50;
// Where the mean of d^2 is above this, h is the difference of sums of exp(d), of 1 and of d.
constexpr float kFar = 1.f / 32;
// The maximum that weights are relative to is raised when a score is above it by so much: seldom. A weight that is then
// too small for f32 has a q of at most exp(kLag + kLargest - 87).
constexpr float kLag = 8;
// Scores of one element that are further apart than this have no digits of w left in w - z, so w is added to q as it
// is.
constexpr float kApart = 4096;
// Scores of an element up to kNear apart and up to kHuge in size need no origin. One is taken up to kLargestOrigin, so
// that the differences of origins are finite.
constexpr float kNear = 8, kHuge = 0x1p20f, kLargestOrigin = 1e30f;
// The sum of exp(d) is kept up to so many times that of 1: another reference may make it larger than f32 can hold.
constexpr float kMostGrown = 1e25f;
// In the place of a distance of -inf: the divergence is then above kInfinite.
constexpr float kFurthest = -1e30f, kInfinite = 1e20f;

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
// h(d) / d^2 for small d: 1/2! + d/3! + d^2/4! + .... In f32 it is a polynomial, whose relative error is at most 4e-8,
// or 9e-7 for scores of 16 bits.
template <class T>
__device__ Accumulator<T> series_beyond(Accumulator<T> d) {
  using A = Accumulator<T>;
  if constexpr (sizeof(T) == 2) {
    const A high = fma(fma(A(0.0013913684f), d, A(0.0083950022f)), d, A(0.041667341f));
    return fma(fma(high, d, A(0.16666290f)), d, A(0.5f));  // the first term is exact: terms of opposite sign follow
  } else if constexpr (sizeof(T) == 4) {
    const A high = fma(fma(fma(A(0.00019938324f), d, A(0.00139780974f)), d, A(0.00833328446f)), d, A(0.0416659547f));
    return fma(fma(high, d, A(0.166666679f)), d, A(0.5f));
  } else {
    constexpr int terms = 14;
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
  return fabs(d) < A(kSmall) ? d * d * series_beyond<A>(d) : term(d) - 1 - d;
}

// Sums over elements, with d from a reference: of the weights a of p, of a * exp(d), of a * h(d), and of a * d.
// --8<-- [start:sums]
template <class A>
struct Sums {
  A s = 0, grown = 0, beyond = 0, linear = 0;
  __device__ void scale(A factor) { s *= factor, grown *= factor, beyond *= factor, linear *= factor; }
  __device__ void add(const Sums& more) {
    s += more.s, grown += more.grown, beyond += more.beyond, linear += more.linear;
  }
  // Adds an element, but for its q if d is so large that it is added elsewhere, or so small that there is none.
  __device__ void add_without_q(A a, A d) { s += a, beyond -= a + a * d, linear += a * d; }
};
// --8<-- [end:sums]

// What scores are taken relative to: z to the first number, and w to the second. Both are 0 where none is needed.
template <class A>
struct Origin {
  A z = 0, w = 0;
  __device__ bool operator==(const Origin& other) const { return z == other.z && w == other.w; }
  __device__ bool none() const { return z == 0 && w == 0; }
};
// Whether scores, relative to a given origin, need another one.
template <class A>
__device__ bool is_far(A z, A w, const Origin<A>& from) {
  return fabs(w - z) > A(kNear) || fabs(z) > A(from.none() ? kHuge : 64);
}
// The origin that suits these scores, or the given one if they are not finite, or too large for it.
template <class A>
__device__ Origin<A> origin_for(A z, A w, const Origin<A>& otherwise) {
  if (!(isfinite(z) && isfinite(w) && max(z, w) < A(kLargestOrigin))) return otherwise;
  return is_far(z, w, Origin<A>()) ? Origin<A>{z, w} : Origin<A>();
}

// What a part of a row is reduced to: the sums relative to the maximum m and the reference c, and of those of its
// scores w beside which z has nearly no weight, which add to q alone, the maximum and the sum of exponentials. But for
// mq, all are those of scores less the origin.
template <class A>
struct Part {
  A m = -INFINITY, c = 0, mq = -INFINITY, sq = 0;
  A highest = -INFINITY;  // the largest score z, above m by at most kLag
  Origin<A> origin;
  Sums<A> sums;

  // Adds scores that belong to q alone: so many whose exponential is that of w, of which no origin is subtracted.
  __device__ void add_alone(A w, A count = 1) {
    if (w > mq) sq *= weight(mq, w), mq = w;
    sq += count * term(w - reference(mq));
  }
  // Moves what is in q from the sums to what belongs to q alone, given what weights are too large by.
  __device__ void part_with_q(A excess = 1) {
    if (sums.grown > 0) add_alone(origin.w + (m + ::log(sums.grown / excess) + c));
    sums.grown = 0, sums.beyond = -sums.s - sums.linear;
  }
  // Takes a larger maximum, given what weights are too large by. What has no weight beside it belongs to q alone.
  __device__ void raise(A top, A excess = 1) {
    if (sums.s != 0) {
      const A factor = weight(m, top) / excess;
      if (factor == 0) part_with_q(excess);
      sums.scale(factor);
    }
    m = top;
  }
  // Takes another reference, if it is a finite number.
  __device__ void move_reference(A to, A excess = 1) {
    const A by = to - c;
    if (!isfinite(by)) return;
    if (sums.s != 0) {
      const A linear = sums.linear - by * sums.s;
      const A factor = fabs(by) < A(kLargest) ? term(-by) : A(0);
      if (factor > 0 && sums.grown * factor < sums.s * A(kMostGrown)) {
        const A over = cuda::beyond(-by), more = fabs(by) < A(kSmall) ? over - by : factor - 1;
        sums.beyond = fma(factor, sums.beyond, fma(more, sums.linear, sums.s * over));
        sums.grown *= factor, sums.linear = linear;
      } else {
        part_with_q(excess);
        sums.linear = linear, sums.beyond = -sums.s - linear;
      }
    }
    c = to;
  }
  // Takes another origin. The sums stay as they are, but for q if the ratio has no digits left.
  __device__ void move_origin(const Origin<A>& to) {
    const A by_z = origin.z - to.z, by_w = origin.w - to.w, by = by_w - by_z;
    if (sums.s != 0 && fabs(by) > A(kApart)) part_with_q();
    m += by_z, highest += by_z, origin = to;
    c = sums.s == 0 ? A(0) : min(max(c + by, A(-1e37f)), A(1e37f));
  }
  // Adds another part that has the same origin, maximum and reference.
  __device__ void add(const Part& part) {
    sums.add(part.sums), highest = max(highest, part.highest);
    if (part.sq != 0) add_alone(part.mq, part.sq);
  }
};

// --8<-- [start:combine]
template <class A>
__device__ Part<A> combine(Part<A> a, Part<A> b) {
  if (!(a.origin == b.origin)) {
    if (a.origin.z + a.m >= b.origin.z + b.m) b.move_origin(a.origin);
    else a.move_origin(b.origin);
  }
  const A m = max(a.m, b.m);
  a.raise(m), b.raise(m);
  if (a.sums.s >= b.sums.s) b.move_reference(a.c);
  else a.move_reference(b.c);
  a.add(b);
  return a;
}
// --8<-- [end:combine]

// The sum of a group of lanes: of a warp or of so many lanes beside each other.
template <int lanes = 32, class A>
__device__ A add_lanes(A x) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
// The lane of the warp that is the first of its group to have what is asked for, or else the first of its group.
template <int lanes>
__device__ int first_lane(bool has) {
  const int group = threadIdx.x % 32 / lanes * lanes;
  const unsigned of_group = __ballot_sync(0xffffffffu, has) >> group & (0xffffffffu >> (32 - lanes));
  return group + (of_group ? __ffs(of_group) - 1 : 0);
}

// The part of a lane, with the origin, the maximum and the reference of its group. Out of line, as they mostly are the
// same already.
template <int lanes, class A>
__device__ __noinline__ Part<A> as_of_group(Part<A> part) {
  const A top = part.origin.z + part.m;
  const int best = first_lane<lanes>(top == reduce_maximum(top, lanes));
  const Origin<A> to = {__shfl_sync(0xffffffffu, part.origin.z, best), __shfl_sync(0xffffffffu, part.origin.w, best)};
  if (!(part.origin == to)) part.move_origin(to);
  part.raise(reduce_maximum(part.m, lanes));
  const int most = first_lane<lanes>(part.sums.s == reduce_maximum(part.sums.s, lanes));
  part.move_reference(__shfl_sync(0xffffffffu, part.c, most));
  return part;
}

// Combines the parts of a group of lanes, in each of them. All lanes of the warp call it.
template <int lanes = 32, class A>
__device__ Part<A> reduce_lanes(Part<A> part) {
  const A m = __shfl_sync(0xffffffffu, part.m, 0, lanes), c = __shfl_sync(0xffffffffu, part.c, 0, lanes);
  const bool same = part.m == m && part.c == c && part.origin.none();
  if (!__all_sync(0xffffffffu, same)) part = as_of_group<lanes>(part);
  const Sums<A>& sums = part.sums;
  part.sums = {add_lanes<lanes>(sums.s), add_lanes<lanes>(sums.grown), add_lanes<lanes>(sums.beyond),
               add_lanes<lanes>(sums.linear)};
  part.highest = reduce_maximum(part.highest, lanes);
  if (__any_sync(0xffffffffu, part.sq != 0)) {
    const A mq = reduce_maximum(part.mq, lanes);
    part.sq = add_lanes<lanes>(part.sq * weight(part.mq, mq)), part.mq = mq;
  }
  return part;
}

// A thread's part as it grows, with d from the reference c. Scores are less the origin. A weight is 2^(z log2(e) -
// shift), or e^(z - shift) in f64, where a shift by the maximum has digits after the point; else it is exp(z - m).
template <class T>
struct Running {
  using A = Accumulator<T>;
  static constexpr A to_base = sizeof(A) == 4 ? A(kLog2E) : A(1);
  Part<A> part;
  A shift = 0;
  bool small = true;  // whether all distances were small when it was last asked

  static __device__ bool may_shift(A m) { return fabs(m) < A(kHuge); }
  __device__ A weight_of(A z) const { return power(fma(z, to_base, -shift)); }
  // What weights are too large by, as the shift is rounded.
  __device__ A excess() const { return may_shift(part.m) ? weight_of(part.m) : A(1); }

  // Takes the maximum and the mean ratio of the first elements of all lanes of a warp, so that its threads seldom go
  // different ways, and an origin if these need one.
  template <int count>
  __device__ void start(A (&z)[count], A (&w)[count]) {
    if (start_from(z, w)) return;
    A other_top = -INFINITY;
#pragma unroll
    for (int k = 0; k < count; k++) other_top = max(other_top, w[k]);
    const Origin<A> origin = origin_for(part.m, reduce_maximum(other_top, 32), part.origin);
    if (origin.none()) return;
    part.move_origin(origin);
#pragma unroll
    for (int k = 0; k < count; k++) z[k] -= origin.z, w[k] -= origin.w;
    start_from(z, w);
  }
  // Returns whether these elements need no origin.
  template <int count>
  __device__ bool start_from(const A (&z)[count], const A (&w)[count]) {
    A top = -INFINITY, mass = 0, mean = 0, square = 0;
#pragma unroll
    for (int k = 0; k < count; k++) top = max(top, z[k]);
    raise(reduce_maximum(top, 32));
    if (!may_shift(part.m)) return false;
#pragma unroll
    for (int k = 0; k < count; k++) {
      const A c = w[k] - z[k], a = fabs(c) < A(-kFurthest) ? weight_of(z[k]) : A(0);
      if (a > 0) mass += a, mean = fma(a, c, mean), square = fma(a * c, c, square);
    }
    mass = add_lanes(mass), mean = add_lanes(mean) / mass, square = add_lanes(square) / mass;
    if (!isfinite(mean)) return false;
    part.c = mean, small = !(square - mean * mean > A(kFar));
    return fabs(mean) <= A(kNear);
  }
  // Adds elements, of which the largest score of p is given. Returns false, and has added nothing, if some of them do
  // not count, or have scores that are infinite, no numbers or very large, or distances that are.
  template <int count>
  __device__ bool add(const A (&z)[count], const A (&w)[count], A top) {
    if (top > part.m + A(kLag)) {
      A c = part.c;
#pragma unroll
      for (int k = 0; k < count; k++) c = z[k] == top ? w[k] - z[k] : c;
      if (is_far(top, top + c, part.origin)) return false;
      raise(top);
      move_reference(c);
    }
    if (!may_shift(part.m) || fabs(part.c) > A(kApart)) return false;
    part.highest = max(part.highest, top);
    Sums<A> more;
    A furthest = 0;
    if (small) {
#pragma unroll
      for (int k = 0; k < count; k++) {
        const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c;
        furthest = max(furthest, fabs(d)), more.s += a;
        more.beyond = fma(a * (d * d), series_beyond<T>(d), more.beyond), more.linear = fma(a, d, more.linear);
      }
      more.grown = more.s + (more.linear + more.beyond);
    } else {
#pragma unroll
      for (int k = 0; k < count; k++) {
        const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c;
        furthest = max(furthest, fabs(d)), more.s += a;
        more.grown = fma(a, power(d * to_base), more.grown), more.linear = fma(a, d, more.linear);
      }
      more.beyond = (more.grown - more.s) - more.linear;
    }
    const bool done = furthest < (small ? A(kSmall) : A(kLargest));
    if (!done && !sums_of(z, w, &more)) return false;
    if (!isfinite(more.beyond)) return false;
    part.sums.add(more);
    if (!done) small = !(2 * part.sums.beyond > A(kFar) * part.sums.s);
    return true;
  }
  // The sums of elements of which some are near and others far. Returns false if one is too far.
  template <int count>
  __device__ bool sums_of(const A (&z)[count], const A (&w)[count], Sums<A>* more) {
    *more = {};
    A furthest = 0;
#pragma unroll
    for (int k = 0; k < count; k++) {
      const A a = weight_of(z[k]), d = (w[k] - z[k]) - part.c, e = power(d * to_base);
      const A h = fabs(d) < A(kSmall) ? d * d * series_beyond<T>(d) : (e - 1) - d;
      furthest = max(furthest, fabs(d));
      more->s += a, more->grown = fma(a, e, more->grown);
      more->beyond = fma(a, h, more->beyond), more->linear = fma(a, d, more->linear);
    }
    return furthest < A(kLargest);
  }
  // Adds any element, of whose scores no origin is subtracted.
  __device__ void add_one(A of_p, A of_q) {
    A z = of_p - part.origin.z, w = of_q - part.origin.w;
    if (z > part.m + A(kLag)) {
      if (is_far(z, w, part.origin)) {
        move_origin(origin_for(of_p, of_q, part.origin));
        z = of_p - part.origin.z, w = of_q - part.origin.w;
      }
      raise(z);
    }
    part.highest = max(part.highest, z);
    const A a = may_shift(part.m) ? weight_of(z) : term(z - reference(part.m));
    if (a > part.sums.s) move_reference(w - z);
    const A d = max((w - z) - part.c, A(kFurthest));
    if (isnan(z) || isnan(w)) {
      part.sums.s = A(nan(""));
    } else if (a == 0 || d > A(kLargest) || fabs(w - z) > A(kApart)) {
      if (of_q != A(-INFINITY)) part.add_alone(of_q);
      if (a != 0) part.sums.add_without_q(a, d);
    } else {
      part.sums.add({a, a * term(d), a * beyond(d), a * d});
    }
  }
  // The same out of line, as it is long and seldom called: code that fits the instruction cache is quicker.
  static __device__ __noinline__ Running with_one(Running running, A z, A w) {
    running.add_one(z, w);
    return running;
  }
  __device__ void move_origin(const Origin<A>& to) {
    if (part.origin == to) return;
    part.sums.scale(1 / excess());
    part.move_origin(to);
    shift = may_shift(part.m) ? part.m * to_base : A(0);
    part.sums.scale(excess());
  }
  __device__ void raise(A top) {
    part.raise(top, excess());
    shift = may_shift(top) ? top * to_base : A(0);
    part.sums.scale(excess());
  }
  __device__ void move_reference(A c) { part.move_reference(c, excess()); }
  __device__ Part<A> finish() {
    part.sums.scale(1 / excess());
    return part;
  }
};

template <class T>
struct TwoArrays {
  using A = Accumulator<T>;
  const T *x, *y;
  T *dx, *dy;
  A *m, *s, *other_reference, *ratio, *divergence;
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

  __device__ Row(const TwoArrays<T>& args, int64_t row, int64_t begin, int64_t end)
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
  // The scores of pack i, which is in the row as a whole, less an origin if `with_origin`. Those that do not count are
  // so small that they have no weight, and their distance is 0.
  template <bool with_origin>
  __device__ void scores(const Pack<T>& of_x, const Pack<T>& of_y, int i, const Origin<A>& from, A* z, A* w) const {
#pragma unroll
    for (int k = 0; k < size; k++) z[k] = of_x.get(k), w[k] = of_y.get(k);
    if constexpr (with_extras) {
#pragma unroll
      for (int k = 0; k < size; k++) z[k] = rounded_product(z[k], scale), w[k] = rounded_product(w[k], other_scale);
    }
    if constexpr (with_origin) {
#pragma unroll
      for (int k = 0; k < size; k++) z[k] -= from.z, w[k] -= from.w;
    }
    if constexpr (with_extras) {
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
    *z = rounded_product(widen(x[element]), scale), *w = rounded_product(widen(y[element]), other_scale);
  }
};

constexpr int kThreads = 128, kGradientThreads = 256;
constexpr int kLeastPacks = 8;        // of each array that a thread has, where a block could have fewer threads
constexpr int64_t kLeastPart = 1024;  // packs of a block's share where rows are cut
constexpr int kRowsAtOnce = 32;       // whose warps' parts are combined at a time
template <class T>
constexpr int kBlocks = sizeof(T) == 8 ? 2 : 5;  // of kThreads, on a multiprocessor

// How the elements of all rows, one after the other, are shared out to blocks: equally, with borders at multiples of
// `grain` elements of a row, or only between rows if that is 0. Of a row that is cut, each block keeps what its part is
// reduced to in `found`: first that of the row it begins in, then that of the row it ends in, if this is another.
template <class T>
struct Shares {
  int64_t n;
  unsigned blocks;
  int64_t length;
  unsigned longer;  // blocks with one element more
  int grain;
  Part<Accumulator<T>>* found;
  struct Border {
    int64_t row, element;
  };
  // Where the share of a block begins. All rows end at border(blocks).
  __device__ Border border(unsigned block) const {
    const int64_t at = length * block + min(block, longer), row = at / n;
    return {row, at - row * n & -int64_t(grain)};
  }
};

// Reads the packs of a part of a row that belong to it entirely, two of each array at a time, and the next two while
// they are used.
template <class T>
struct Reader {
  const Pack<T> *from_x, *from_y;
  int i, last, step = blockDim.x;
  Pack<T> x[2] = {}, y[2] = {};

  template <bool with_extras>
  __device__ void begin(const Row<T, with_extras>& at) {
    i = at.window.whole_begin() + threadIdx.x, last = at.window.vector ? at.window.whole_end : 0;
    from_x = reinterpret_cast<const Pack<T>*>(at.x - at.window.head) + i;
    from_y = reinterpret_cast<const Pack<T>*>(at.y - at.window.head) + i;
    load();
  }
  __device__ void load() {
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (i + k * step < last) x[k] = from_x[k * step], y[k] = from_y[k * step];
  }
  __device__ void advance() {
    i += 2 * step, from_x += 2 * step, from_y += 2 * step;
    load();
  }
};

// Reduces the packs of a part of a row that a thread has.
template <class T, bool with_extras>
__device__ Part<Accumulator<T>> reduce_packs(const Row<T, with_extras>& at, Reader<T>& reader) {
  using A = Accumulator<T>;
  constexpr int size = Pack<T>::size;
  Running<T> running;
  auto one_by_one = [&](int element, int end, int step) {
#pragma unroll 1
    for (element = max(element, 0), end = min(end, at.window.n); element < end; element += step) {
      A z, w;
      at.score(element, &z, &w);
      if (z != A(-INFINITY) || w != A(-INFINITY)) running = Running<T>::with_one(running, z, w);
    }
  };
  // Adds packs i, i + step, ... of the row.
  auto add = [&](const auto& x, const auto& y, int i, auto with_origin) {
    constexpr int packs = sizeof(x) / sizeof(Pack<T>);
    A z[packs * size], w[packs * size], top = A(-INFINITY);
#pragma unroll
    for (int k = 0; k < packs; k++)
      at.template scores<with_origin.value>(x[k], y[k], i + k * reader.step, running.part.origin, z + k * size,
                                            w + k * size);
    if constexpr (!with_extras) {
      top = maximum_of(x) - (with_origin.value ? running.part.origin.z : A(0));  // the same in fewer steps
    } else {
#pragma unroll
      for (int k = 0; k < packs * size; k++) top = max(top, z[k]);
    }
    if (running.add(z, w, top)) return;
    for (int k = 0; k < packs; k++) {
      const int element = (i + k * reader.step) * size - at.window.head;
      one_by_one(element, element + size, 1);
    }
  };

  {
    A z[size], w[size];
    at.template scores<false>(reader.x[0], reader.y[0], reader.i, {}, z, w);
#pragma unroll
    for (int k = 0; k < size; k++)
      if (reader.i >= reader.last) z[k] = w[k] = A(-INFINITY);
    running.start(z, w);
  }
  // Adds what is left for as long as there is an origin, or none.
  auto add_while = [&](auto with_origin) {
    while (reader.i < reader.last && running.part.origin.none() != with_origin.value) {
      const int i = reader.i;
      const Pack<T> x[2] = {reader.x[0], reader.x[1]}, y[2] = {reader.y[0], reader.y[1]};
      reader.advance();
      if (i + reader.step < reader.last) {
        add(x, y, i, with_origin);
      } else {
        const Pack<T> first_x[1] = {x[0]}, first_y[1] = {y[0]};
        add(first_x, first_y, i, with_origin);
      }
    }
  };
  do {
    add_while(std::false_type());
    add_while(std::true_type());
  } while (reader.i < reader.last);
  // What belongs to no whole pack is taken by the last threads, which may have less to do.
  const int begin = at.window.whole_begin(), thread = blockDim.x - 1 - threadIdx.x;
  if (!at.window.vector) one_by_one(threadIdx.x, at.window.n, reader.step);
  else if (thread == 0 && begin) one_by_one(0, size - at.window.head, 1);
  else if (thread == 1 && reader.last >= begin) one_by_one(reader.last * size - at.window.head, at.window.n, 1);
  return running.finish();
}

// Writes the results of a row. The reference is corrected by what the mean of exp(d) - 1, which also is that of h(d)
// and of d, differs from 0. What belongs to q alone joins by the chain rule.
template <class T>
__device__ void write(const TwoArrays<T>& args, int64_t row, Part<Accumulator<T>> part) {
  using A = Accumulator<T>;
  const Origin<A> origin = part.origin;
  if (part.highest > part.m) part.raise(part.highest);
  const A m = origin.z + part.m;
  if (!origin.none() && isfinite(m)) part.raise(m - origin.z);  // it is rounded
  const Sums<A>& sums = part.sums;
  // The other reference, and the ratio: at first those of what belongs to q alone.
  A o = part.mq, c = part.sq == 0 ? A(-INFINITY) : ::log(part.sq), k = 0;
  if (sums.s != 0) {
    const A excess = (sums.linear + sums.beyond) / sums.s;
    A log = ::log(max(sums.grown / sums.s, A(1e-30)));
    if (fabs(excess) < A(0.5) && sums.beyond < sums.s) {
      log = log1p(excess);
      A series = 0;  // of log - excess
      for (int i = 16; i >= 2; i--) series = A(i % 2 ? 1.0 : -1.0) / i + excess * series;
      k = sums.beyond / sums.s + (fabs(excess) < A(0.1) ? excess * excess * series : log - excess);
    } else {  // then the divergence is no small difference
      k = log - sums.linear / sums.s;
    }
    const A ratio = part.c + log, of_alone = c - ::log(sums.s);
    const A more = ((part.mq - origin.w) - part.m) + (of_alone - ratio), joint = more > 30 ? more : log1p(exp(more));
    k += joint;
    if (k > A(kInfinite)) k = INFINITY;
    k = max(k, A(0));
    if (more > 30) {
      c = of_alone;
    } else {
      c = ratio + joint, o = origin.none() ? m : origin.w + part.m;
      if (!origin.none()) c -= (o - origin.w) - part.m;
      if (fabs(c) > 32) {  // w has its largest scores where z has not
        const A moved = o + c;
        c -= moved - o, o = moved;
      }
    }
  }
  if (sums.s != 0 && sums.grown == 0 && part.sq == 0) o = c = A(-INFINITY);
  const bool undefined = isnan(sums.s) || isnan(sums.beyond) || isnan(part.sq) || part.m == A(INFINITY) ||
                         part.mq == A(INFINITY);
  args.m[row] = m, args.s[row] = sums.s, args.other_reference[row] = o, args.ratio[row] = c;
  args.divergence[row] = undefined ? A(nan("")) : k;
}

// Reduces a block's share of the rows. Its warps do so on their own: what they find is combined for many rows at a
// time.
template <class T, bool with_extras>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    kl_divergence_rows(const __grid_constant__ TwoArrays<T> args, const __grid_constant__ Shares<T> shares) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const of_warps = reinterpret_cast<Part<A>*>(memory);  // kRowsAtOnce times so many as there are warps
  const int warps = blockDim.x / 32;
  const auto begin = shares.border(blockIdx.x), end = shares.border(blockIdx.x + 1);
  const int64_t end_row = end.row + (end.element > 0);
  auto at_row = [&](int64_t row) {
    return Row<T, with_extras>(args, row, row == begin.row ? begin.element : 0, row == end.row ? end.element : args.n);
  };
  Reader<T> reader;
  Row<T, with_extras> at = at_row(begin.row);
  reader.begin(at);
  int kept = 0;
  for (int64_t row = begin.row; row < end_row; row++) {
    Part<A> part = reduce_packs(at, reader);
    if (row + 1 < end_row) at = at_row(row + 1), reader.begin(at);
    part = reduce_lanes(part);
    if (threadIdx.x % 32 == 0) of_warps[kept * warps + threadIdx.x / 32] = part;
    if (++kept < kRowsAtOnce && row + 1 < end_row) continue;
    __syncthreads();
    const int from = threadIdx.x / warps;
    part = from < kept ? of_warps[threadIdx.x] : Part<A>();
    if (warps == 4) part = reduce_lanes<4>(part);
    if (warps == 2) part = reduce_lanes<2>(part);
    if (from < kept && threadIdx.x % warps == 0) {
      const int64_t of = row + 1 - kept + from;
      const bool first = of == begin.row, whole = (!first || begin.element == 0) && of < end.row;
      if (whole) write(args, of, part);
      else shares.found[2 * blockIdx.x + !first] = part;
    }
    __syncthreads();
    kept = 0;
  }
}

// Combines the parts of rows that are cut. The first border within a row has a warp that does so; those of others have
// nothing to do.
template <class T>
__global__ void kl_divergence_merge(const __grid_constant__ TwoArrays<T> args,
                                    const __grid_constant__ Shares<T> shares) {
  const unsigned first = blockIdx.x;
  const auto begin = shares.border(first), cut = shares.border(first + 1);
  auto cuts = [&](const auto& border) { return border.row == cut.row && border.element > 0; };
  if (!cuts(cut) || cuts(begin)) return;
  Part<Accumulator<T>> part;
  for (unsigned block = first + threadIdx.x; block < shares.blocks; block += 32) {
    if (block > first && !cuts(shares.border(block))) break;
    part = combine(part, shares.found[2 * block + (block == first && begin.row != cut.row)]);
  }
  part = reduce_lanes(part);
  if (threadIdx.x == 0) write(args, cut.row, part);
}

// The gradients, of packs that blocks share out row by row.
template <class T, bool with_extras, bool both>
__global__ void __launch_bounds__(kGradientThreads)
    kl_divergence_gradients(const __grid_constant__ TwoArrays<T> args, unsigned blocks) {
  using A = Accumulator<T>;
  constexpr int size = Pack<T>::size;
  const int64_t row = blockIdx.x / blocks;
  const Row<T, with_extras> at(args, row, 0, args.n);
  const int i = static_cast<int>(blockIdx.x % blocks * blockDim.x + threadIdx.x);
  if (i >= at.window.packs) return;
  const Pack<T> x = at.window.fetch(at.x, i), y = at.window.fetch(at.y, i);
  const A m = reference(args.m[row]), o = reference(args.other_reference[row]), s = args.s[row];
  const A c = reference(args.ratio[row]), k = reference(args.divergence[row]), g = args.cotangent[row];
  const A inverse = s == 0 ? A(0) : 1 / s;
  const Origin<A> origin = m == o ? Origin<A>() : Origin<A>{m, o};
  // What z and w are relative to, and the logsumexp of w beyond that; where there is no p, or no q, exponentials
  // relative to it are 0.
  const A top = m - origin.z, other = s == 0 || args.ratio[row] == A(-INFINITY) ? A(INFINITY) : ::log(s) + c;
  const A by_x = g * at.scale, by_y = g * at.other_scale;
  T* const dx = both ? args.dx + row * args.n : nullptr;
  T* const dy = args.dy + row * args.n;
  A z[size], w[size];
  if (m == o) at.template scores<false>(x, y, i, origin, z, w);
  else at.template scores<true>(x, y, i, origin, z, w);
#pragma unroll
  for (int e = 0; e < size; e++) {
    const bool masked = with_extras && !at.counts(i * size - at.window.head + e);
    const A p = exponential<T>(z[e] - top) * inverse, d = (w[e] - z[e]) - c;
    A slope = exponential<T>((w[e] - top) - other) - p;
    // Of results of 16 bits, the difference has all digits sooner.
    if constexpr (sizeof(T) == 2) slope = fabs(d) < A(0x1p-6) ? p * fma(d * A(0.5), d, d) : slope;
    else slope = fabs(d) < A(kSmall) ? p * fma(d * d, series_beyond<T>(d), d) : slope;
    if constexpr (both) z[e] = p == 0 || masked ? A(0) : -by_x * p * ((isinf(d) ? A(0) : d) + k);
    w[e] = masked ? A(0) : by_y * slope;
  }
  Pack<T> pack;
  if constexpr (both) pack.set_all(z), at.window.store(dx, i, pack);
  pack.set_all(w), at.window.store(dy, i, pack);
}

template <class T, bool with_extras>
cudaError_t launch_forward(const TwoArrays<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  using A = Accumulator<T>;
  Device device;
  if (auto e = device.read()) return e;
  const int64_t n = std::max<int64_t>(1, args.n), packs = (n + Pack<T>::size - 1) / Pack<T>::size + 1;
  const int threads = packs < 64 * kLeastPacks ? 32 : packs < 128 * kLeastPacks ? 64 : kThreads;
  const int64_t resident = int64_t(kBlocks<T>) * kThreads / threads * device.processors;
  const int64_t room = bytes / static_cast<int64_t>(2 * sizeof(Part<A>));
  // Rows are cut where blocks of whole ones would wait for others for long.
  const int64_t most = std::max<int64_t>(1, std::min(resident, room));
  const int64_t equal = std::max(kLeastPart, args.rows * packs / most);
  int64_t blocks = std::min(args.rows, resident);
  const bool cut = (args.rows + blocks - 1) / blocks * packs > equal + 2 * kLeastPart;
  if (cut) blocks = std::min(most, args.rows * packs / equal);
  const int64_t length = args.rows * n / blocks;
  if (std::min(n, length) > INT_MAX / 2) return cudaErrorInvalidValue;
  Shares<T> shares = {n, static_cast<unsigned>(blocks), length, static_cast<unsigned>(args.rows * n % blocks)};
  shares.grain = cut ? 128 / sizeof(T) : 0;  // so that parts share no cache lines where rows begin with one
  shares.found = static_cast<Part<A>*>(workspace);
  const size_t memory = kRowsAtOnce * (threads / 32) * sizeof(Part<A>);
  kl_divergence_rows<T, with_extras><<<shares.blocks, threads, memory, stream>>>(args, shares);
  if (cut && !cudaPeekAtLastError()) kl_divergence_merge<T><<<shares.blocks - 1, 32, 0, stream>>>(args, shares);
  return cudaGetLastError();
}

template <class T, bool with_extras>
cudaError_t launch_gradients(const TwoArrays<T>& args, cudaStream_t stream) {
  const int64_t packs = (args.n + Pack<T>::size - 1) / Pack<T>::size + 1;
  const int threads = static_cast<int>(std::min<int64_t>(kGradientThreads, (packs + 31) / 32 * 32));
  const int64_t blocks = (packs + threads - 1) / threads;
  if (args.rows * blocks > INT_MAX || args.n > INT_MAX / 2) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(args.rows * blocks), of_row = static_cast<unsigned>(blocks);
  if (args.dx) kl_divergence_gradients<T, with_extras, true><<<grid, threads, 0, stream>>>(args, of_row);
  else kl_divergence_gradients<T, with_extras, false><<<grid, threads, 0, stream>>>(args, of_row);
  return cudaGetLastError();
}

// A call with a cotangent is that of the gradients, of which the first may be left out.
template <class T>
cudaError_t run_kl_divergence(const Call& call, void* workspace, int64_t bytes, cudaStream_t stream) {
  using A = Accumulator<T>;
  const Buffers& buffers = call.buffers;
  for (const Buffer* rows : {&buffers.other, &buffers.result, &buffers.other_result})
    if (rows->data && rows->dtype != buffers.first.dtype) return cudaErrorInvalidValue;  // Python has refused it
  auto number = [](const Buffer& buffer) { return static_cast<A*>(buffer.data); };
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  TwoArrays<T> args;
  args.x = static_cast<const T*>(buffers.first.data), args.y = static_cast<const T*>(buffers.other.data);
  args.dx = static_cast<T*>(buffers.result.data), args.dy = static_cast<T*>(buffers.other_result.data);
  args.m = number(buffers.maximum), args.s = number(buffers.sum);
  args.other_reference = number(buffers.other_reference), args.ratio = number(buffers.ratio);
  args.divergence = number(buffers.beside);
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
  if (with_extras) return launch_forward<T, true>(args, workspace, bytes, stream);
  return launch_forward<T, false>(args, workspace, bytes, stream);
}

}  // namespace

#define JAXSOFT_RUN(T)                                                                                              \
  template <>                                                                                                       \
  cudaError_t run<KlDivergence>(const Arguments<T>&, const Call& call, void* workspace, int64_t bytes,              \
                                cudaStream_t stream) {                                                              \
    return run_kl_divergence<T>(call, workspace, bytes, stream);                                                    \
  }
JAXSOFT_RUN(__half)
JAXSOFT_RUN(__nv_bfloat16)
JAXSOFT_RUN(float)
JAXSOFT_RUN(double)

}  // namespace jaxsoft::cuda
