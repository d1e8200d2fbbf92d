// How long rows are distributed to all blocks of a grid (grid_ring.cuh), and the packets by which these blocks publish
// states.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../window.cuh"
#include "sizes.cuh"

namespace jaxsoft::cuda {

// A state as it is published to other blocks in device memory, which is cleared before. The packet has arrived when the
// upper half of its last word is not 0.
struct alignas(16) Packet {
  uint64_t words[2];
};
template <class Part>
__device__ void publish(Packet* to, const Part& part) {
  static_assert(sizeof(Part) <= 12);
  Packet packet{};
  memcpy(&packet, &part, sizeof part);
  packet.words[1] |= uint64_t(1) << 32;
  asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(to),
               "l"(packet.words[0]), "l"(packet.words[1]) : "memory");
}
__device__ inline Packet look(const Packet* at) {
  Packet packet;
  asm volatile("{\n.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
               : "=l"(packet.words[0]), "=l"(packet.words[1]) : "l"(at) : "memory");
  return packet;
}
__device__ inline bool is_published(const Packet& packet) { return packet.words[1] >> 32; }

// How rows are distributed in chunks. Chunk c of row r belongs to block (r * chunks + c) % blocks.
struct GridSchedule {
  int64_t rows;
  int chunks;                           // of a row
  int packs;                            // of a chunk
  unsigned rows_a_turn, chunks_a_turn;  // the number of blocks, as whole rows and the chunks beyond them
  int pollers;
  // The number of packets that are published for each row.
  __host__ __device__ int parts(int blocks) const { return chunks < blocks ? chunks : blocks; }
};

// A block's chunks, one after the other.
struct ChunkIterator {
  const GridSchedule* schedule;
  int64_t row = blockIdx.x / static_cast<unsigned>(schedule->chunks);
  int chunk = blockIdx.x % static_cast<unsigned>(schedule->chunks);
  int turn = 0;
  unsigned slot = 0, round = 0;  // `round` says how often all slots have been filled before
  __device__ bool ended() const { return row >= schedule->rows; }
  __device__ void advance() {
    turn++;
    if (++slot == GridRing::slots) slot = 0, round++;
    row += schedule->rows_a_turn;
    chunk += schedule->chunks_a_turn;
    if (chunk >= schedule->chunks) chunk -= schedule->chunks, row++;
  }
  __device__ unsigned barrier() const { return slot + round % 2 * GridRing::slots; }
  __device__ unsigned parity() const { return round / 2 % 2; }
  // Whether the block's next chunk is of the same row.
  __device__ bool continues() const {
    return schedule->rows_a_turn == 0 && chunk + schedule->chunks_a_turn < schedule->chunks;
  }
};

// How rows of `packs` packs are distributed to at most one block on each multiprocessor.
template <class Op>
GridSchedule make_grid_schedule(int64_t rows, int64_t packs, int processors) {
  constexpr int most = GridRing::slot_packs(Op::operands);
  GridSchedule schedule;
  schedule.rows = rows;
  schedule.chunks = static_cast<int>((packs + most - 1) / most);
  schedule.packs = static_cast<int>((packs + schedule.chunks - 1) / schedule.chunks + kLine - 1) / kLine * kLine;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(processors, rows * schedule.chunks));
  schedule.rows_a_turn = blocks / schedule.chunks, schedule.chunks_a_turn = blocks % schedule.chunks;
  schedule.pollers = schedule.chunks > 3 * processors ? 1 : GridRing::pollers;
  return schedule;
}

}  // namespace jaxsoft::cuda
