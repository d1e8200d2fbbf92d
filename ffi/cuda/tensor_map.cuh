// Tensor maps: descriptions of arrays by which single threads copy boxes of them to and from shared memory (Hopper's
// TMA). A copy reads zeros past the ends of the array, and stores nothing there.
//
// A box here is some rows of one head of an array (B, rows, heads, size), and as many columns of it as fill the rows of
// the swizzle: 128 bytes, or 64. Its rows lie one after the other in shared memory, and in each of 8 rows the units of
// 16 bytes lie in another order, so that reads of columns meet no bank twice. A box must begin at a multiple of 1024
// bytes. Tiles with more columns are several boxes, one after the other.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "hopper.cuh"

namespace jaxsoft::cuda {

enum class Swizzle { bytes64 = 64, bytes128 = 128 };

// Where an element lies in a box, in bytes from its begin.
template <Swizzle swizzle = Swizzle::bytes128>
__device__ constexpr uint32_t place_in_box(uint32_t row, uint32_t byte_of_row) {
  if constexpr (swizzle == Swizzle::bytes128) return row * 128 + (byte_of_row ^ (row % 8 * 16));
  return row * 64 + (byte_of_row ^ (row / 2 % 4 * 16));
}

// A dense array (batch, rows, heads, size) with none of them 0, of which `size` elements are a multiple of 16 bytes.
struct DenseArray {
  const void* data;
  CUtensorMapDataType type;
  int batch, rows, heads, size;
  unsigned element_bytes() const { return type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2; }
};

// Describes an array by boxes of up to 256 rows.
inline cudaError_t describe(CUtensorMap* map, const DenseArray& array, int box_rows,
                            Swizzle swizzle = Swizzle::bytes128) {
  // The driver's function is asked for, as the library is not linked with the driver.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  if (auto e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result))
    return e;
#else
  if (auto e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result)) return e;
#endif
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t bytes = array.element_bytes(), size = array.size, heads = array.heads, rows = array.rows;
  const cuuint64_t lengths[4] = {size, heads, rows, static_cast<cuuint64_t>(array.batch)};
  const cuuint64_t steps[3] = {size * bytes, heads * size * bytes, rows * heads * size * bytes};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(swizzle) / array.element_bytes(), 1,
                             static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  const CUresult status = reinterpret_cast<Encode>(found)(
      map, array.type, 4, const_cast<void*>(array.data), lengths, steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == Swizzle::bytes128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The first element of a box in its array. Rows and columns may lie before the begin or past the end.
struct BoxPlace {
  int column, head, row, batch;
};

// Fetches a map, so that the first copy does not wait for it. Kernels have maps as `__grid_constant__` parameters.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts a copy to shared memory, of which all bytes of the box count at the barrier `done`, also those of zeros.
__device__ inline void copy_box(void* to, const CUtensorMap& map, const BoxPlace& from, const Barrier& done) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(from.column), "r"(from.head), "r"(from.row), "r"(from.batch), "r"(done.address())
      : "memory");
}

// The same, to the same place of both blocks of a cluster, whose bytes count at the barrier of each.
__device__ inline void copy_box_to_both(void* to, const CUtensorMap& map, const BoxPlace& from, const Barrier& done) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(from.column), "r"(from.head), "r"(from.row), "r"(from.batch), "r"(done.address()),
      "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Fetches a box into the L2 cache, for a copy that comes later.
__device__ inline void prefetch_box(const CUtensorMap& map, const BoxPlace& from) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(from.column),
               "r"(from.head), "r"(from.row), "r"(from.batch)
               : "memory");
}

// What threads have written to shared memory, after this and a barrier is seen by copies from there and by products.
__device__ inline void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Adds f32 numbers of shared memory to as many in a row in global memory. Addresses and bytes are multiples of 16.
// Several such copies are one group, which `commit_stores` ends.
__device__ inline void add_floats(float* to, const void* from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// Stores them.
__device__ inline void store_floats(float* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
// Stores a box of shared memory.
__device__ inline void store_box(const CUtensorMap& map, const BoxPlace& to, const void* from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(to.column), "r"(to.head), "r"(to.row), "r"(to.batch), "r"(shared_address(from))
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all groups of the calling thread have read shared memory.
__device__ inline void wait_for_reads_of_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until they have written.
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace jaxsoft::cuda
