// Heads of queries that share keys: the gradients by these keys and values are sums over the heads, whose pieces of
// work add them in the order of the heads, in f32, so that their bits are always the same. Each piece but the last
// leaves what it has to the next, as its threads have it.
#pragma once

#include "../../counter.cuh"
#include "../../warp_groups.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// Adds what the pieces before have of these gradients by 64 keys or values, which the threads of a warp group hold.
// Returns whether they are complete now. Else the next piece goes on with them. `part` says which they are, of
// BackwardPlan::added_parts. All threads of the warp group call it, and `all` is a barrier for them.
template <class Work, int count, class... Others>
__device__ bool add_to_group(const BackwardCall& call, const Work& work, int part, const NamedBarrier& all,
                             float (&numbers)[count], Others&... others) {
  constexpr int arrays = 1 + sizeof...(Others);
  if (call.group == call.heads_of_piece) return true;
  const int thread = threadIdx.x % kWarpGroup, before = work.before(call);
  const int64_t key_head = int64_t(work.batch) * call.key_heads + work.key_head;
  const int64_t place = (key_head * call.key_blocks + work.block) * Work::Plan::added_parts + part;
  unsigned* const summed = call.summed + place;
  constexpr int room = Work::Plan::keys * 2 * Work::size / Work::Plan::added_parts;
  static_assert(arrays * count * kWarpGroup <= room);
  float4* const sums = reinterpret_cast<float4*>(call.group_sums + place * room) + thread;
  float* const own[arrays] = {numbers, others...};
  if (before > 0) {
    if (thread == 0)
      while (load_acquired(summed) != static_cast<unsigned>(before)) continue;
    all.wait();
#pragma unroll
    for (int i = 0; i < arrays * count / 4; i++) {
      float* const to = own[i / (count / 4)] + i % (count / 4) * 4;
      const float4 four = __ldcg(sums + i * kWarpGroup);
      to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
    }
  }
  if (work.last_of_group(call)) return true;
#pragma unroll
  for (int i = 0; i < arrays * count / 4; i++) {
    const float* const from = own[i / (count / 4)] + i % (count / 4) * 4;
    __stcg(sums + i * kWarpGroup, make_float4(from[0], from[1], from[2], from[3]));
  }
  all.wait();
  if (thread == 0) add_released(summed, 1);
  return false;
}

}  // namespace jaxsoft::cuda
