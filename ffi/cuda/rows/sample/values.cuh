// Draws a token from one read of a row, where rows are of bf16, top-k leaves all, and there are so many rows that each
// has one block, in which it has no room.
//
// bf16 has few values. So the read counts how often each of them is there, in eight sections of the row. The counts
// tell all masses exactly: that of the row, and so the value at which top-p ends, and how many of the elements that
// equal it are left; and those of the sections. The token's section alone is read once more. An exponential is needed
// for each value, not for each element, and not before the largest element is known: so the first read does all. (On an
// H200, 256 rows of 128256 flat logits take 48 us with top-p of 0.9, and 87 us in the long way.)
//
// There are counts for zero and for 2047 magnitudes of either sign, about sixteen octaves. They end an octave or two
// above the largest magnitude in the packs that the threads read first. Elements of other magnitudes are put into a
// list, unless they are so far below the largest element that they weigh nothing, as -inf does. If the list is full,
// the row goes one of the other ways, and so does one with NaN or +inf.
#pragma once

#include "draw.cuh"

namespace jaxsoft::cuda {

// The elements that this is for.
template <class T> constexpr bool kCountsValues = std::is_same<T, __nv_bfloat16>::value;

// The count of each value has a slot. Those of a sign follow each other by descending magnitude, and the last one is
// that of zero, or without use for the negative sign.
struct ValueSlots {
  static constexpr uint32_t of_sign = SampleCode::values, other = of_sign - 1;
  static constexpr uint32_t inf = 0x7f80;  // its magnitude, which is a bf16 without its sign

  uint32_t highest;  // the magnitude that has the first slot

  __device__ explicit ValueSlots(float largest) {
    const uint32_t octave = bits<uint32_t>(largest) >> 23;
    highest = max(min((octave + 2) << 7, inf) - 1, other);
  }
  __device__ uint32_t slot(uint32_t magnitude) const { return min(highest - magnitude, other); }
  // The slots in the order of values. One of them is without use.
  __device__ static int in_order(int place) { return place < int(of_sign) ? place : int(3 * of_sign - 1) - place; }
  __device__ float value(uint32_t slot) const {
    if (slot == other) return 0;
    return bits<float>((highest - slot % of_sign) << 16 | (slot / of_sign) << 31);
  }
};

// The counts. A word has those of two sections.
struct ValueCounts {
  static constexpr int sections = SampleCode::value_sections, tables = sections / 2, slots = 2 * SampleCode::values;
  static_assert(sizeof(uint32_t) * tables * slots == SampleCode::value_memory);
  // They begin in the slots after those of the ring, and end in what follows the slots.
  static_assert(SampleCode::value_slots * SampleCode::threads * 16 + sizeof(SampleShared::more_values) ==
                SampleCode::value_memory);
  alignas(16) uint32_t words[tables][slots];

  __device__ static int table(int section) { return section % tables; }
  __device__ static uint32_t one(int section) { return section / tables > 0 ? 0x10000 : 1; }
  __device__ uint32_t at(int section, int slot) const {
    return words[table(section)][slot] >> (section / tables > 0 ? 16 : 0) & 0xffff;
  }
  // The words of a thread's slots, from the first of these on.
  static constexpr int own = slots / SampleCode::threads;
  __device__ void read(int table, int first, uint32_t (&to)[own]) const {
    static_assert(own % 4 == 0);
#pragma unroll
    for (int i = 0; i < own; i += 4) {
      const uint4 quad = *reinterpret_cast<const uint4*>(&words[table][first + i]);
      to[i] = quad.x, to[i + 1] = quad.y, to[i + 2] = quad.z, to[i + 3] = quad.w;
    }
  }
};

// Counts the elements of a pack, given the address of the table and what counts one there. `top` is an element of the
// row, and what is `nothing` or less weighs nothing beside it. Returns false if the list is seen to be full.
template <class T>
__device__ __forceinline__ bool count_pack(const Pack<T>& pack, uint32_t first_index, uint32_t address, uint32_t one,
                                           const ValueSlots& slots, const Keys<T>& keys, float nothing, float top,
                                           ByValue& found) {
  constexpr uint32_t both = 0x00010001, other = ValueSlots::other;
  const uint32_t to_slots = (slots.highest - 0x7fff & 0xffff) * both;
  uint32_t words[4], most = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    words[k] = __viaddmin_u16x2(~pack.words[k] & 0x7fff * both, to_slots, other * both);
    most = __vmaxu2(most, words[k]);
    words[k] |= pack.words[k] >> 4 & ValueSlots::of_sign * both;
  }
  auto count = [&](uint32_t at) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(one) : "memory"); };
  if ((most + both & ValueSlots::of_sign * both) == 0) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      // A half times the bytes of a count, and the address.
      count(__dp2a_lo(words[k], 4u, address));
      count(__dp2a_lo(words[k], 4u << 8, address));
    }
    return true;
  }
  Key low = Key(pack.words[1]) << 32 | pack.words[0], high = Key(pack.words[3]) << 32 | pack.words[2];
#pragma unroll 1
  for (int k = 0; k < Pack<T>::size; k++, low = low >> 16 | high << 48, high >>= 16) {
    const uint32_t word = static_cast<uint32_t>(low) & 0xffff, magnitude = word & 0x7fff;
    uint32_t slot = slots.slot(magnitude);
    if (slot < other) {
      slot |= word >> 4 & ValueSlots::of_sign;
    } else if (magnitude > 0) {
      const float x = bits<float>(word << 16);
      if (x <= nothing && x < top) continue;
      const uint32_t place = atomicAdd(&found.listed, magnitude >= ValueSlots::inf ? ByValue::room + 1 : 1u);
      if (place < ByValue::room) found.list[place].x = keys(x, first_index + k);
      continue;
    }
    count(address + slot * 4);
  }
  return *static_cast<volatile uint32_t*>(&found.listed) <= ByValue::room;
}

// The group of a listed value, by its place among those that are counted: above them, between them and zero on either
// side, and below them.
__device__ inline int group_of(float x, const ValueSlots& slots) {
  const bool large = bits<uint32_t>(fabsf(x)) >> 16 > slots.highest;
  return x > 0 ? (large ? 0 : 1) : (large ? 3 : 2);
}
// The group that comes before the value of this place; that of the last group is beyond them.
__device__ inline int group_before(int place) {
  constexpr int zero = ValueSlots::other;
  return place == 0 ? 0 : place == zero ? 1 : place == zero + 2 ? 2 : place == ValueCounts::slots ? 3 : -1;
}

// What the packs that have come first tell of a row: the order of their largest element, which is all ones if one is
// NaN, and their largest magnitude.
struct FirstPacks {
  uint32_t top;
  float largest;
};
template <class T>
__device__ __forceinline__ FirstPacks look_at_first(const RowPart<T>& part, SampleShared& shared) {
  constexpr int warps = SampleCode::warps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pack<T> tops;
  tops.fill(RowPart<T>::nothing());
  uint32_t magnitudes = 0;
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#pragma unroll 1
  for (int t = 0; t < RowPart<T>::batch - 1; t++) {
    const Pack<T> pack = part.trimmed(part.own[t * SampleCode::threads], part.first + t * 32);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      tops.words[0] = bits<uint32_t>(__hmax2_nan(bits<Pair<T>>(tops.words[0]), bits<Pair<T>>(pack.words[k])));
      magnitudes = __vmaxu2(magnitudes, pack.words[k] & 0x7fff7fff);
    }
  }
  const float first_half = tops.get(0), second_half = tops.get(1);
  const uint32_t order =
      isnan(first_half) || isnan(second_half) ? ~0u : max(order_of(first_half), order_of(second_half));
  const uint32_t of_warp = __reduce_max_sync(kWholeWarp, order);
  const uint32_t magnitude = __reduce_max_sync(kWholeWarp, max(magnitudes & 0xffff, magnitudes >> 16));
  if (lane == 0) shared.groups[warp] = of_warp, shared.groups[warps + warp] = magnitude;
  __syncthreads();
  return {__reduce_max_sync(kWholeWarp, shared.groups[lane % warps]),
          bits<float>(__reduce_max_sync(kWholeWarp, shared.groups[warps + lane % warps]) << 16)};
}

// Finds where top-p ends, given the thread that has this place among its values, of which the first one's place is
// `first`, and the mass before them. The lanes of its warp go over them.
__device__ __forceinline__ void find_end(bool has_end, int first, Mass before_own, Mass enough, float min_p,
                                         const Weights& weights, const ValueSlots& slots, const ValueCounts& counts,
                                         ByValue& found) {
  constexpr int own = ValueCounts::own, tables = ValueCounts::tables, sections = ValueCounts::sections;
  const int lane = threadIdx.x % 32;
  if (const unsigned with = __ballot_sync(kWholeWarp, has_end)) {
    const int source = __ffs(with) - 1, place = __shfl_sync(kWholeWarp, first, source) + lane;
    const Mass start = __shfl_sync(kWholeWarp, before_own, source);
    Mass before_value = 0, of_one = 0;
    uint32_t number = 0;
    int slot = 0;
    if (lane <= own && group_before(place) >= 0 && (lane < own || place == ValueCounts::slots))
      before_value = found.sums[group_before(place)];
    if (lane < own) {
      slot = ValueSlots::in_order(place);
#pragma unroll
      for (int i = 0; i < tables; i++) number += (counts.words[i][slot] & 0xffff) + (counts.words[i][slot] >> 16);
      of_one = Weights::mass(weights(slots.value(slot)));
    }
    const Mass both = before_value + of_one * number;
    const Mass until = start + scan_of_warp(both), before = until - both;
    if (lane <= own && before < enough && enough <= until) {
      const bool in_list = enough <= before + before_value;
      found.in_list = in_list ? group_before(place) : -1;
      found.before = before;
      found.end = slots.value(slot);
      // Of the elements that equal it, those of the lowest indices are left.
      auto left = in_list ? 0 : static_cast<uint32_t>((enough - before - before_value + of_one - 1) / of_one);
      const bool counts_any = !(weights(found.end) < min_p);
#pragma unroll 1
      for (int s = 0; s < sections; s++) {
        const uint32_t here = in_list ? 0 : counts.at(s, slot), left_here = min(here, left);
        left -= left_here;
        found.equal[s] = here, found.equal_left[s] = left_here;
        found.equal_mass[s] = counts_any ? left_here * of_one : 0;
      }
    }
  }
}

// Draws from the section that has the token. Each thread has some packs of it that follow each other. `last_in_list` is
// the index of the last element that is left and equals the end, where that is in the list, or -1.
template <class T>
__device__ __forceinline__ void draw_in_section(const Sampling<T>& call, int64_t index, const RowPart<T>& part,
                                                const Weights& weights, float min_p, float end, int last_in_list,
                                                int of_section, SampleShared& shared) {
  constexpr int size = Pack<T>::size;
  ByValue& found = shared.by_value;
  const Range range = shared.range;
  const uint32_t equal = found.equal[range.warp], equal_left = found.equal_left[range.warp];
  const bool parts_equal = 0 < equal_left && equal_left < equal;  // whether elements that equal the end differ here
  // The index of the last element that is left and equals the end.
  int last = last_in_list >= 0 ? last_in_list : equal > 0 && equal_left == equal ? INT32_MAX : -1;
  auto is_left = [&](float x, float weight, int i) {
    return (x > end || (x == end && i <= last)) && !(weight < min_p);
  };
  const int each = (of_section + SampleCode::threads - 1) / SampleCode::threads;
  const int begin = range.warp * of_section + min(static_cast<int>(threadIdx.x) * each, of_section);
  const int stop = min(begin + each, (range.warp + 1) * of_section);
  constexpr int ahead = 4;  // packs on their way
  static_assert(ahead <= SampleCode::value_ring + SampleCode::value_slots);
  uint32_t equals = 0;
  Mass mass = 0;
#pragma unroll 1
  for (int p = begin; p < stop; p += ahead) {
    const int here = min(stop - p, ahead);
#pragma unroll 1
    for (int t = 0; t < here; t++) part.start_into(part.own + t * SampleCode::threads, p + t, true);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll 1
    for (int t = 0; t < here; t++) {
      const int i = p + t;
      const Pack<T> pack = part.trimmed(part.own[t * SampleCode::threads], i);
      Weights::Parts some;
#pragma unroll
      for (int k = 0; k < size; k++) {
        const float x = pack.get(k), weight = weights(x);
        some.add(is_left(x, weight, i * size - part.window.head + k) ? weight : 0.f);
        equals += x == end;
      }
      some.move_to(mass);
    }
  }
  if (parts_equal) {
    uint32_t all;
    const uint32_t until = scan_of_block(equals, shared.count_warps, all), before = until - equals;
    if (before < equal_left && equal_left <= until) {
      uint32_t number = before;
#pragma unroll 1
      for (int i = begin * size - part.window.head; number < equal_left; i++)
        if (i >= 0 && widen(part.row[i]) == end && ++number == equal_left) found.last = i;
    }
    __syncthreads();
    last = found.last;
    const float weight = weights(end);
    if (!(weight < min_p)) mass += (min(until, equal_left) - min(before, equal_left)) * Weights::mass(weight);
  }
  Mass all;
  const Mass until_end = range.before + scan_of_block(mass, shared.warps[1], all);
  draw_of_thread(call, index, part, weights, is_left, begin, each, until_end, mass, range);
}

// Draws from a row of which part.start_batch() has been called. Returns false if the row has to go another way. All
// threads of the block call it. The arguments are copies, as what is given by reference to a function that is not
// inlined must be in memory.
template <class T>
__device__ __noinline__ bool draw_by_value(const Sampling<T>& call, int64_t index, const RowPart<T> part,
                                           const Options options, ValueCounts& counts, SampleShared& shared) {
  constexpr int size = Pack<T>::size, warps = SampleCode::warps, sections = ValueCounts::sections;
  constexpr int tables = ValueCounts::tables;
  ByValue& found = shared.by_value;
  const Keys<T> keys(call.n);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int warps_of_section = warps / sections, batch = RowPart<T>::batch;
  const int of_section = part.of_warp() * warps_of_section;  // packs
  if (threadIdx.x == 0) found.listed = 0;
  if (threadIdx.x < ByValue::sums_in_all) found.sums.clear(threadIdx.x);
  for (int i = threadIdx.x; i < sizeof(ValueCounts) / 16; i += SampleCode::threads)
    reinterpret_cast<uint4*>(&counts)[i] = {};

  const FirstPacks first_packs = look_at_first(part, shared);
  const float top = of_order(first_packs.top);
  if (first_packs.top == ~0u || !isfinite(top)) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    return false;
  }
  const float scale = options.scale(), nothing = top - (SampleCode::octaves + 1) / float(kLog2E) / scale;
  const ValueSlots slots(min(first_packs.largest, max(fabsf(top), fabsf(nothing))));

  const uint32_t table = shared_address(counts.words[ValueCounts::table(warp / warps_of_section)]);
  const uint32_t one = ValueCounts::one(warp / warps_of_section);
  Pack<T>* slot = part.own;
#pragma unroll 1
  for (int t = 0; t < part.steps; t++) {
    const int i = part.first + t * 32;
    asm volatile("cp.async.wait_group %0;" ::"n"(batch - 1) : "memory");
    if (i < part.window.packs && !count_pack(part.trimmed(*slot, i), i * size - part.window.head, table, one, slots,
                                             keys, nothing, top, found))
      break;
    part.start_into(slot, i + batch * 32, t + batch < part.steps);
    slot = slot == part.own + (batch - 1) * SampleCode::threads ? part.own : slot + SampleCode::threads;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  const uint32_t listed = found.listed;
  if (listed > ByValue::room) return false;

  // The row's largest element. Each thread has some values that follow each other.
  constexpr int own = ValueCounts::own;
  const int first = threadIdx.x * own;
  const bool turned = first >= int(ValueSlots::of_sign);  // whether slots are not in the order of descending values
  const int first_slot = turned ? ValueSlots::in_order(first + own - 1) : first;
  uint32_t numbers[own] = {};  // of the slots
#pragma unroll 1
  for (int i = 0; i < tables; i++) {
    uint32_t words[own];
    counts.read(i, first_slot, words);
#pragma unroll
    for (int j = 0; j < own; j++) numbers[j] += (words[j] & 0xffff) + (words[j] >> 16);
  }
  uint32_t own_order = threadIdx.x < listed ? order_of(keys.value(found.list[threadIdx.x].x)) : 0;
#pragma unroll
  for (int j = 0; j < own; j++)
    if (numbers[j] > 0) own_order = max(own_order, order_of(slots.value(first_slot + j)));
  own_order = __reduce_max_sync(kWholeWarp, own_order);
  if (lane == 0) shared.groups[2 * warps + warp] = own_order;
  __syncthreads();
  const float m = of_order(__reduce_max_sync(kWholeWarp, shared.groups[2 * warps + lane % warps]));
  const Weights weights{m, scale};

  // The mass of each value, and of the list.
  Mass of_list = 0;
  float listed_value = 0;
  if (listed > 0) {
    if (threadIdx.x < listed) {
      listed_value = keys.value(found.list[threadIdx.x].x);
      of_list = Weights::mass(weights(listed_value));
      found.list[threadIdx.x].y = of_list;
      found.sums.add(group_of(listed_value, slots), of_list);
    }
    __syncthreads();
  }
  Mass masses[own], mass = 0;
#pragma unroll
  for (int j = 0; j < own; j++) {
    masses[j] = numbers[j] > 0 ? Weights::mass(weights(slots.value(first_slot + j))) : 0;
    mass += masses[j] * numbers[j];
  }
  auto add_group = [&](int place, int group) {
    if (first <= place && place < first + own) mass += found.sums[group];
  };
  add_group(0, 0), add_group(ValueSlots::other, 1), add_group(ValueSlots::other + 2, 2);
  add_group(ValueCounts::slots - 1, 3);
  Mass total;
  const Mass until_own = scan_of_block(mass, shared.warps[0], total);
  const Mass enough = min(part_of_mass(options.p, total), total);

  const bool has_end = until_own - mass < enough && enough <= until_own;
  find_end(has_end, first, until_own - mass, enough, options.min_p, weights, slots, counts, found);
  __syncthreads();
  const bool ends_in_list = found.in_list >= 0;
  if (ends_in_list) {
    if (threadIdx.x < listed) {
      const Key key = found.list[threadIdx.x].x;
      const int group = group_of(listed_value, slots);
      Mass until = found.before;
#pragma unroll 1
      for (uint32_t i = 0; i < listed; i++) {
        const ulonglong2 other = found.list[i];
        if (other.x >= key && group_of(keys.value(other.x), slots) == group) until += other.y;
      }
      if (group == found.in_list && until - of_list < enough && enough <= until)
        found.end = listed_value, found.last = static_cast<int>(keys.index(key));
    }
    __syncthreads();
  }
  const float end = found.end;
  const int last_in_list = ends_in_list ? found.last : -1;

  // The mass that is left of each section.
#pragma unroll
  for (int j = 0; j < own; j++) {
    const float x = slots.value(first_slot + j);
    if (!(x > end) || weights(x) < options.min_p) masses[j] = 0;
  }
#pragma unroll 1
  for (int i = 0; i < tables; i++) {
    uint32_t words[own];
    counts.read(i, first_slot, words);
    Mass low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < own; j++) low += (words[j] & 0xffff) * masses[j], high += (words[j] >> 16) * masses[j];
    low = sum_of_warp(low), high = sum_of_warp(high);
    if (lane == 0) shared.left[i * warps + warp] = low, shared.left[(i + tables) * warps + warp] = high;
  }
  if (threadIdx.x < listed) {
    const auto i = static_cast<int>(keys.index(found.list[threadIdx.x].x));
    const bool reaches = listed_value > end || (listed_value == end && i <= last_in_list);
    if (reaches && !(weights(listed_value) < options.min_p))
      found.sums.add(ByValue::groups + (i + part.window.head) / size / of_section, of_list);
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int lanes = 32 / sections, of_lane = warps / lanes;
    const int section = lane / lanes;
    Mass mine = 0;
#pragma unroll
    for (int i = 0; i < of_lane; i++) mine += shared.left[section * warps + lane % lanes * of_lane + i];
    if (lane % lanes == 0) mine += found.sums[ByValue::groups + section] + found.equal_mass[section];
    const Mass until = scan_of_warp(mine), all = __shfl_sync(kWholeWarp, until, 31);
    const Mass target = options.target(all);
    const int with = (__ffs(__ballot_sync(kWholeWarp, until > target)) - 1) / lanes;
    const Mass before = __shfl_sync(kWholeWarp, until - mine, with * lanes);
    if (lane == 0) shared.range = {with, target, before, all};
  }
  __syncthreads();

  draw_in_section(call, index, part, weights, options.min_p, end, last_in_list, of_section, shared);
  return true;
}

}  // namespace jaxsoft::cuda
