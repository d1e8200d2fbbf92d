// The kernel: a cluster of blocks, or one block, draws a token of a row.
#pragma once

#include "draw.cuh"
#include "select.cuh"
#include "values.cuh"

namespace jaxsoft::cuda {

// What a thread's elements add up to. The sums of the warp are written to the first block's tables.
struct Totals {
  Mass left = 0, above = 0, total = 0;  // see SampleShared

  // How many tables are written. If not `general`, top-p leaves what all filters leave, and the total is known.
  __device__ static int tables(bool general) { return general ? 3 : 1; }
  __device__ void write(bool general, unsigned block, int of_lane, SampleShared& shared) {
    left = sum_of_warp(left);
    if (general) above = sum_of_warp(above), total = sum_of_warp(total);
    const int lane = threadIdx.x % 32;
    if (lane >= tables(general)) return;
    const int place = SampleShared::place_of_warp(block * SampleCode::warps + threadIdx.x / 32, of_lane);
    Mass* const to = &(lane == 0 ? shared.left : lane == 1 ? shared.above : shared.total)[place];
    const Mass value = lane == 0 ? left : lane == 1 ? above : total;
    if (block == 0) *to = value;
    else send_to_block(value, to, shared.totals_sent, 0);
  }
};

// The sum of a table, for each warp.
__device__ inline Mass sum_of_table(const Mass* table, int of_lane) {
  Mass sum = 0;
#pragma unroll 4
  for (int i = 0; i < of_lane; i++) sum += table[i * 32 + threadIdx.x % 32];
  return sum_of_warp(sum);
}

// What a thread's elements add to the totals. The keys of candidates are put into the block's memory. They count even
// if there is no room for them. `min_p` is for rows of which top-k and top-p leave all, and `top_p` where there is no
// other filter.
enum class Filters { min_p, top_p, any };
template <Filters filters, class T>
__device__ Totals add_up(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys,
                         const Bracket& bracket, float min_p, SampleShared& shared) {
  constexpr uint32_t bins = SampleCode::bins;
  constexpr bool general = filters == Filters::any;
  Totals totals;
  const float begin = Weights::border(bracket.begin), end = Weights::border(bracket.end);
  const float last = bracket.in_last > 0 ? Weights::border(bracket.last) : 0.f;
  const float limit = Weights::border(min(bracket.last, bins));
  auto add = [&](const Pack<T>& pack) {
    uint32_t candidates = 0;
    // Of what top-k leaves, most packs have nothing.
    if (general && bracket.in_last > 0 && weights.place(pack.maximum()) > last) return candidates;
    Weights::Parts left, above, total;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) {
      const float x = pack.get(k), weight = weights(x);
      if constexpr (filters == Filters::min_p) {
        left.add(weight < min_p ? 0.f : weight);
        continue;
      }
      const float place = weights.place(x);
      const bool is_above = place < begin;
      if ((!is_above && place < end) || (general && place == last)) candidates |= 1u << k;
      if constexpr (general) {
        Weights::Parts one;
        one.add(weight);
        if (is_above && !(weight < min_p)) left.add(one);
        if (is_above) above.add(one);
        if (place < limit) total.add(one);
      } else {
        left.add(is_above ? weight : 0.f);
      }
    }
    left.move_to(totals.left);
    if constexpr (general) above.move_to(totals.above), total.move_to(totals.total);
    return candidates;
  };
  if constexpr (filters == Filters::min_p)
    part.template for_packs<Way::back>(add);
  else
    part.template for_chosen<Way::forward>(
        add, [&](uint32_t count) { return atomicAdd(&shared.placed, count); },
        [&](float x, uint32_t index, uint32_t place) {
          if (place < SampleCode::room) shared.keys[place] = keys(x, index);
        });
  return totals;
}

// The same where there are too many candidates to be put in order: the filters' end is found in the row itself. The
// arguments are copies, as what is given by reference to a function that is not inlined must be in memory.
struct TotalsUntil {
  Totals totals;
  Key end = 0;
};
template <class T>
__device__ __noinline__ TotalsUntil add_up_all(const RowPart<T> part, const Weights weights, const Keys<T> keys,
                                               const Bracket bracket, const Options options, unsigned blocks,
                                               SampleShared& shared) {
  TotalsUntil found;
  Key& end = found.end;
  auto mass = [&](float x) { return Weights::mass(weights(x)); };
  // First the end of top-k, where each element counts 1, and then that of top-p.
#pragma unroll 1
  for (int by_mass = bracket.in_last > 0 ? 0 : 1; by_mass < (options.p < 1 ? 2 : 1); by_mass++) {
    Mass need = options.k;
    if (by_mass) {
      Mass total = 0;
      part.for_elements([&](float x, uint32_t i) {
        if (weights.counts(x) && keys(x, i) >= end) total += mass(x);
      });
      total = sum_of_block(total, shared.warps[1]);
      if (threadIdx.x == 0) shared.found_rest = total;
      synchronize_row();
      const int lane = threadIdx.x % 32;
      total = sum_of_warp(lane < blocks ? *in_block_of_row(&shared.found_rest, lane) : Mass(0));
      synchronize_row();
      need = part_of_mass(options.p, total);
    }
    auto mass_of = [&](float x) { return by_mass ? mass(x) : Mass(1); };
    end = end_in_row(part, weights, keys, end, need, mass_of, blocks, shared);
  }
  part.for_elements([&](float x, uint32_t i) {
    if (weights.counts(x) && keys(x, i) >= end && !(weights(x) < options.min_p)) found.totals.left += mass(x);
  });
  return found;
}

// Finds the end of the filters among the candidates, and adds up the candidates that they leave. All threads of the
// first block call it, or one warp where there are few candidates.
template <bool one_warp, class T>
__device__ Key end_of_filters(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys,
                              const Bracket& bracket, const Options& options, Mass enough, bool general, int of_lane,
                              SampleShared& shared) {
  const int step = one_warp ? 32 : SampleCode::threads, count = static_cast<int>(bracket.count);
  auto one = [](Key) { return Mass(1); };
  auto mass = [&](Key key) { return Weights::mass(weights(keys.value(key))); };
  auto find = [&](Key from, uint32_t begin, uint32_t end, Mass need, auto mass_of) {
    if constexpr (one_warp) return end_among_few(shared.keys, count, from, need, mass_of);
    else return end_among_candidates(count, from, weights, keys, begin, end, need, mass_of, shared);
  };
  Key end = 0;
  if (bracket.in_last > 0) {
    const uint32_t above = count - bracket.in_last;  // candidates of bins before the last
    end = find(end, min(bracket.begin, bracket.last), bracket.last + 1, options.k - bracket.before_last + above, one);
  }
  if (options.p < 1) {
    if (enough == 0) {
      Mass total = 0;
      if (bracket.in_last > 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += step) {
          const Key key = shared.keys[i];
          if (key >= end && weights.bin(keys.value(key)) == bracket.last) total += mass(key);
        }
        total = one_warp ? sum_of_warp(total) : sum_of_block(total, shared.warps[1]);
      }
      enough = part_of_mass(options.p, sum_of_table(shared.total, of_lane) + total);
    }
    const Mass above = sum_of_table(general ? shared.above : shared.left, of_lane);
    end = find(end, bracket.begin, bracket.end, enough > above ? enough - above : 1, mass);
  }
  // The warp that has a pack is the pack's number over that of a warp's packs, of which there are 32 or more: the
  // quotient by a reciprocal that is rounded up is exact, as there are fewer than 2^21 packs.
  const uint32_t reciprocal = ~0u / part.steps + 1;
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += step) {
    const Key key = shared.keys[i];
    const float weight = weights(keys.value(key));
    if (key < end || weight < options.min_p) continue;
    const uint32_t turn = (keys.index(key) + part.window.head) / (Pack<T>::size * 32);
    const uint32_t warp = part.steps == 1 ? turn : __umulhi(turn, reciprocal);
    shared.candidates.add(SampleShared::place_of_warp(static_cast<int>(warp), of_lane), Weights::mass(weight));
  }
  return end;
}

// `counts_values` is for rows that may be drawn from as in values.cuh. Each has one block, and its packs do not stay.
// It is a kernel of its own, so that it takes no time from the other rows.
template <class T, bool counts_values = false>
__global__ void __launch_bounds__(SampleCode::threads, SampleCode::blocks)
    sample_rows(const __grid_constant__ Sampling<T> call, const ThresholdRanks ranks, int slots) {
  extern __shared__ uint4 memory[];  // the slots, and after them what is shared
  SampleShared& shared = *reinterpret_cast<SampleShared*>(memory + slots * SampleCode::threads);
  const unsigned block = block_of_row(), blocks = counts_values ? 1 : blocks_of_row();
  const int64_t index = blocks > 1 ? small_quotient(blockIdx.x, blocks) : blockIdx.x;
  Options options(call, index);
  const RowPart<T> part(call.logits + index * call.n, call.n, block, blocks, memory,
                        counts_values ? SampleCode::ring : slots);
  bool started = counts_values;
  if constexpr (counts_values) {
    part.template start_batch<Way::forward>();
    part.bring_batch();
  }
  if (blocks > 1) start_exchanges(block, blocks, shared);
  for (int i = threadIdx.x; i < SampleCode::bins; i += SampleCode::threads) shared.counts[i] = 0;
  const int of_lane = (blocks * SampleCode::warps + 31) / 32;  // warps of the cluster for each lane of one
  if (threadIdx.x < SampleShared::most_warps) shared.candidates.clear(threadIdx.x);
  // Places of warps and blocks that there are not. In the others, what is sent may lie already.
  if (threadIdx.x < 32 * of_lane && threadIdx.x % 32 * of_lane + threadIdx.x / 32 >= SampleCode::warps * blocks)
    shared.left[threadIdx.x] = shared.above[threadIdx.x] = shared.total[threadIdx.x] = 0;
  if (threadIdx.x >= blocks && threadIdx.x < SampleCode::most_blocks)
    shared.tops[threadIdx.x] = shared.thresholds[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.placed_few = shared.placed = 0;
  if constexpr (counts_values) {
    options.wait();
    if (options.p < 1 && options.temperature > 0) {
      auto& counts = *reinterpret_cast<ValueCounts*>(memory + SampleCode::value_ring * SampleCode::threads);
      if (draw_by_value(call, index, part, options, counts, shared)) return;
      started = false;
    }
  }
  const uint32_t of_thread = part.top_order(started);
  options.wait();

  const bool takes_k = options.k < call.n, by_mass = !takes_k && options.p < 1;  // whether top-p is of all mass
  const ThresholdRank sought = by_mass          ? ranks.of_mass
                               : !takes_k       ? ThresholdRank{}
                               : options.k == 1 ? ranks.of_one
                                                : ranks.of_k;
  const auto [top, threshold] = find_top(of_thread, sought, block, blocks, shared);
  const Weights weights{of_order(top), options.scale()};
  if (top == ~0u || !isfinite(weights.m) || isnan(weights.scale)) {  // there is no distribution
    if (block == 0 && threadIdx.x == 0) call.token[index] = 0, call.probability[index] = nanf("");
    return;
  }
  const Keys<T> keys(call.n);
  const FewPlaces places{block, blocks};
  Survey survey;
  if (by_mass) {
    const float lowest = sought.rank > 0 ? of_order(threshold) : nanf("");  // without a threshold, nothing is gathered
    survey = count_and_weigh(part, weights, keys, lowest, places, shared);
  } else if (sought.rank > 0) {
    gather_few(part, weights, keys, of_order(threshold), places, shared);
  }
  Mass total = 0;  // of all elements, where top-p is of that, and what it leaves of that
  Mass enough = 0;
  if (by_mass || sought.rank > 0) {
    // The counts are on their way meanwhile.
    const bool shares_counts = by_mass && blocks > 1;
    send_few(survey.above, survey.total, by_mass, places, shared);
    if (shares_counts) send_counts(block, blocks, shared), send_sums(block, blocks, shared);
    const FewOfBlock few = wait_for_few(places, shared);
    if (by_mass) total = sum_of_warp(few.total), enough = part_of_mass(options.p, total);
    if (shares_counts) wait_for_sent(shared.sums_sent);
    if (few_suffice(few, by_mass, enough, places)) {
      if (block == 0)
        draw_from_few(call, index, weights, keys, options, few, by_mass, total, places, shared);
      return;
    }
  }
  Bracket bracket{SampleCode::bins, SampleCode::bins, Bracket::no_bin};
  if (takes_k || by_mass) {
    if (!by_mass) {
      count_by_bins(part, weights, shared);
      __syncthreads();
      if (blocks > 1) {
        send_counts(block, blocks, shared), send_sums(block, blocks, shared);
        wait_for_sent(shared.sums_sent);
      }
    }
    bracket = find_bracket(options.k, options.p, call.n, by_mass, enough, total,
                           blocks > 1 ? shared.row.all : shared.counts, shared);
    // Sends the other blocks how many candidates there are here, and that this block no longer needs what lies where
    // the first block gathers the keys.
    if (blocks > 1 && threadIdx.x < blocks)
      send_to_block(bracket.own, &shared.candidates_of_block[block], shared.candidates_sent, threadIdx.x);
  }
  const bool too_many = bracket.count > SampleCode::room, general = takes_k || (by_mass && options.min_p > 0);
  Totals totals;
  Key end = 0;
  if (too_many) {
    if (blocks > 1) wait_for_sent(shared.candidates_sent);
    const auto found = add_up_all(part, weights, keys, bracket, options, blocks, shared);
    totals = found.totals, end = found.end;
  } else if (general) {
    totals = add_up<Filters::any>(part, weights, keys, bracket, options.min_p, shared);
  } else if (by_mass) {
    totals = add_up<Filters::top_p>(part, weights, keys, bracket, options.min_p, shared);
  } else {
    totals = add_up<Filters::min_p>(part, weights, keys, bracket, options.min_p, shared);
  }
  totals.write(general, block, of_lane, shared);
  const bool has_candidates = bracket.count > 0 && !too_many;
  __syncthreads();
  if (blocks > 1 && (takes_k || by_mass)) wait_for_sent(shared.candidates_sent);
  if (block != 0) {  // its candidates go to the first block
    const unsigned lane = threadIdx.x % 32;
    if (!has_candidates) return;
    const uint32_t before = __reduce_add_sync(kWholeWarp, lane < block ? shared.candidates_of_block[lane] : 0);
    for (uint32_t i = threadIdx.x; i < shared.placed; i += SampleCode::threads)
      send_to_block(shared.keys[i], &shared.keys[before + i], shared.totals_sent, 0);
    return;
  }
  if (blocks > 1) {
    const uint32_t masses = (blocks - 1) * SampleCode::warps * Totals::tables(general);
    const uint32_t candidates = has_candidates ? bracket.count - bracket.own : 0;
    if (threadIdx.x == 0)
      shared.totals_sent.arrive_expecting(masses * sizeof(Mass) + candidates * sizeof(Key));
    wait_for_sent(shared.totals_sent);
  }

  if (has_candidates) {
    if (bracket.count > SampleCode::few) {
      end = end_of_filters<false>(part, weights, keys, bracket, options, enough, general, of_lane, shared);
      __syncthreads();
    } else {
      if (threadIdx.x < 32) {
        end = end_of_filters<true>(part, weights, keys, bracket, options, enough, general, of_lane, shared);
        if (threadIdx.x == 0) shared.found = end;
      }
      __syncthreads();
      end = shared.found;
    }
  }
  draw(call, index, part, weights, keys, options, end, of_lane, shared);
}

}  // namespace jaxsoft::cuda
