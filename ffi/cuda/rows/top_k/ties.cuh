// Ties: rows of few different values, of which many elements are equal to the threshold. If the k largest are some of
// these, those of the lowest indices are wanted. So where k groups before a step reach the threshold, ties are not
// wanted from there on: the groups whose maximum is the threshold are left out of those steps, for whatever comes
// after.
//
// Nothing here is inlined, as it would only be in the way of rows that do not need it.
#pragma once

#include "thresholds.cuh"

namespace jaxsoft::cuda {

// The number of a warp's groups that reach the threshold in the step that has the lane's number.
__device__ inline int reaching_of_step(float threshold, const float* maxima, int groups) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll 4
  for (int g = 0; g < groups; g++) {
    const unsigned all = __ballot_sync(kAllLanes, maxima[g * 32 + lane] >= threshold);
    if (lane == g) own = __popc(all);
  }
  return own;
}

// Leaves out ties of late steps. A lane has the number of groups that reach the threshold in the step of its number,
// and how many of them come before the warp's own.
__device__ inline void leave_out_ties(float threshold, int k, int of_step, int before, float* maxima, int groups) {
  const int lane = threadIdx.x % 32;
  const unsigned dropped = __ballot_sync(kAllLanes, scan_lanes<32>(of_step, lane) - of_step + before >= k);
#pragma unroll 4
  for (int g = 0; g < groups; g++)
    if (dropped >> g & 1 && maxima[g * 32 + lane] == threshold) maxima[g * 32 + lane] = -infinity<float>();
}

// Whether it is of no use to leave ties out: if all groups of the first tile reach the threshold, so do perhaps all
// their elements, and there is `room` for fewer than the k first groups have. The exact search is needed, and is begun
// sooner if all groups are found.
__device__ inline bool is_in_vain(int reaching_of_first, int k, int of_group, int room) {
  return reaching_of_first == 32 && (k + 31) / 32 * 32 * of_group > room;
}

// For the row of a warp. `of_group`: the elements that a group has.
static __device__ __noinline__ void leave_out_ties_of_warp(float threshold, int k, int of_group, int room,
                                                           float* maxima, int groups) {
  const int own = reaching_of_step(threshold, maxima, groups);
  if (is_in_vain(__shfl_sync(kAllLanes, own, 0), k, of_group, room)) return;
  leave_out_ties(threshold, k, own, 0, maxima, groups);
}

// For the part that a block has. All its threads call it; `maxima` are those of the warp. `reaching` is shared memory:
// the groups that reach the threshold, of a step of a warp. A step of all warps comes before the next one, and the
// tiles of a step are in the order of the warps, if a group is no more than one, as `in_turn` says.
static __device__ __noinline__ void leave_out_ties_of_block(float threshold, int k, int of_group, int room,
                                                            bool in_turn, float* maxima, int groups,
                                                            uint8_t (*reaching)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  reaching[warp][lane] = static_cast<uint8_t>(reaching_of_step(threshold, maxima, groups));
  __syncthreads();
  if (is_in_vain(reaching[0][0], k, of_group, room)) return;
  int of_step = 0, before = 0;  // of all warps, and of those before this one
  for (int w = 0; w < warps; w++) {
    if (w == warp && in_turn) before = of_step;
    of_step += reaching[w][lane];
  }
  leave_out_ties(threshold, k, of_step, before, maxima, groups);
}

}  // namespace jaxsoft::cuda
