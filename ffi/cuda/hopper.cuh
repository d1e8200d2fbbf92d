// What Hopper brought: clusters of blocks that see each other's shared memory, barriers there that count bytes, and
// bulk copies and stores that complete them. Addresses are those of the shared window.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "copies.cuh"

namespace jaxsoft::cuda {

// Whether the code is compiled for a GPU that has all this.
#if __CUDA_ARCH__ >= 900
constexpr bool kHopperCode = true;
#else
constexpr bool kHopperCode = false;
#endif

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
  // Of a warp's lanes, after what they have read or written: the first arrives for all. compute-sanitizer's racecheck
  // does not see that what the others did came before; so in code that is compiled for it each arrives itself.
  __device__ void arrive_as_warp() {
    __syncwarp();
    if (threadIdx.x % 32 < warp_arrivals) arrive();
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
  // A warp that asks again and again takes the turns of those that compute.
  __device__ void sleep_until(unsigned parity) const {
    while (!is_past(parity)) __nanosleep(40);
  }
};

// Before others use the barriers that a thread has made.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void copy_to_shared(void* to, const void* from, unsigned bytes, const Barrier& done) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(done.address())
               : "memory");
}

// Asks for what will be copied later, so that it comes from the L2 then.
__device__ inline void prefetch_to_cache(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same place in another block of the cluster.
__device__ inline uint32_t in_block(uint32_t address, unsigned block) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
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
// Relaxed: what a block has stored to device memory need not be visible to the others.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void synchronize_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

// Stores a value, in words of 4 or 8 bytes, to the same place in a block's shared memory, and completes its bytes at
// that block's barrier.
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

}  // namespace jaxsoft::cuda
