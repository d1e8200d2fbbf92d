// What Hopper added to the hardware: clusters of blocks that see each other's shared memory, barriers in shared memory
// that count bytes, bulk copies and stores that complete such barriers, and launches that overlap the launch before.
// What is called an address here is an address within shared memory, as PTX takes it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "copies.cuh"

namespace jaxsoft::cuda {

// Whether the code is being compiled for a GPU that has all this.
#if __CUDA_ARCH__ >= 900
constexpr bool kHopperCode = true;
#else
constexpr bool kHopperCode = false;
#endif

// A barrier in shared memory. It alternates between two phases, and `parity` is that of the phase that is waited for.
struct Barrier {
#ifdef JAXSOFT_RACECHECK
  static constexpr unsigned warp_arrivals = 32;
#else
  static constexpr unsigned warp_arrivals = 1;
#endif
  uint64_t word;
  __device__ uint32_t address() const { return shared_address(&word); }
  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"); }
  // All lanes of a warp call this after their reads or writes, and the first lane arrives for all. compute-sanitizer's
  // racecheck does not see that the accesses of the other lanes came before. So every lane arrives in code that is
  // compiled for racecheck.
  __device__ void arrive_as_warp() {
    __syncwarp();
    if (threadIdx.x % 32 < warp_arrivals) arrive();
  }
  // The same at the barrier in this place in the shared memory of a block of the cluster.
  __device__ void arrive_in(unsigned block) {
    asm volatile(
        "{\n"
        ".reg .b32 mapped;\n"
        "mapa.shared::cluster.u32 mapped, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [mapped];\n"
        "}\n" ::"r"(address()), "r"(block) : "memory");
  }
  __device__ void arrive_as_warp_in(unsigned block) {
    __syncwarp();
    if (threadIdx.x % 32 < warp_arrivals) arrive_in(block);
  }
  __device__ void arrive_expecting(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  __device__ bool is_past(unsigned parity) const {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done) : "r"(address()), "r"(parity) : "memory");
    return done;
  }
  __device__ void wait(unsigned parity) const {
    while (!is_past(parity)) continue;
  }
  // Waits with pauses. A warp that polls without a pause takes issue slots from the warps that compute.
  __device__ void sleep_until(unsigned parity) const {
    while (!is_past(parity)) __nanosleep(40);
  }
};

// A place in a ring of slots, and the parity of the phase in which its barrier says that it is full.
template <int slots>
struct SlotPlace {
  unsigned slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// Makes the barriers that the calling thread has initialised visible to the cluster and to bulk copies.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Starts a bulk copy to shared memory, whose bytes count at the barrier `done`. The addresses and the size must be
// multiples of 16.
__device__ inline void copy_to_shared(void* to, const void* from, unsigned bytes, const Barrier& done) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(done.address())
               : "memory");
}

// Fetches bytes into the L2 cache, for a copy that comes later. With `keep` they stay there until it does: else the
// results that a kernel writes meanwhile may push out what it has just asked for. The copy makes them ordinary again.
__device__ inline void prefetch_to_cache(const void* from, unsigned bytes, bool keep = false) {
  if (!keep) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
    return;
  }
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(policy)
               : "memory");
}

// The address of the same place in the shared memory of another block of the cluster.
__device__ inline uint32_t in_block(uint32_t address, unsigned block) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}
template <class V>
__device__ V* in_block(V* variable, unsigned block) {
  V* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(variable), "r"(block));
  return mapped;
}
__device__ inline unsigned block_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline unsigned blocks_of_cluster() {
  unsigned blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
// The arrival is relaxed: it does not make the block's stores to device memory visible to the other blocks, for which
// it would have to wait.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// This arrival makes the block's stores to shared memory, also that of other blocks, visible to all that wait.
__device__ inline void publish_to_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void synchronize_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

// Stores a value, in words of 4 or 8 bytes or as 16 bytes at once, to the place `to` in the shared memory of another
// block of the cluster. The bytes count at that block's barrier `done`. The cluster must have at least two blocks.
__device__ inline void send(const uint4& value, const void* to, const Barrier& done, unsigned block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   in_block(shared_address(to), block)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(in_block(done.address(), block))
               : "memory");
}
template <class V>
__device__ void send(const V& value, const void* to, const Barrier& done, unsigned block) {
  using Word = std::conditional_t<sizeof(V) % 8 == 0, uint64_t, uint32_t>;
  constexpr unsigned count = sizeof(V) / sizeof(Word);
  if constexpr (count > 0) {
    Word words[count];
    memcpy(words, &value, sizeof words);
    const uint32_t address = in_block(shared_address(to), block), barrier = in_block(done.address(), block);
#pragma unroll
    for (unsigned i = 0; i < count; i++) {
      if constexpr (sizeof(Word) == 8)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address + 8 * i),
                     "l"(words[i]), "r"(barrier)
                     : "memory");
      else
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address + 4 * i),
                     "r"(words[i]), "r"(barrier)
                     : "memory");
    }
  }
}

// Starts a bulk copy of the block's shared memory to the place `to` in that of another block of the cluster. The bytes
// count at that block's barrier `done`.
__device__ inline void copy_to_block(const void* to, const void* from, unsigned bytes, const Barrier& done,
                                     unsigned block) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   in_block(shared_address(to), block)),
               "r"(shared_address(from)), "r"(bytes), "r"(in_block(done.address(), block))
               : "memory");
}

// The two ends of a launch that overlaps the launch before it: the earlier kernel allows the later one to start, and
// the later one waits until the earlier one has ended. Both do nothing before Hopper.
//
// Only a kernel that is followed by one of the same call may allow it. XLA's own kernels overlap the ones before them,
// too, and begin with a wait, but the compiler puts their loads of operands, which it takes for constant, before that.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jaxsoft::cuda
