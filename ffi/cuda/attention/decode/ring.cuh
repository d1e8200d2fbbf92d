// The copies of keys and values into shared memory, and what passes between the producer of a block and its consumers.
//
// Each consumer (a warp, or some) has a few slots of its own, which the producer, one warp, fills with tiles of keys
// and values by bulk copies: tiles of a unit go to the consumers in turn. Which consumer has a tile follows from the
// unit alone, as bits depend on it. Units go to all warps, through a ring of their own.
//
// Barriers: full[consumer][slot] is completed by the copies into a slot, and empty[consumer][slot] by the consumer;
// unit_full[i] by the producer when it has written a unit, and unit_empty[i] by all that read it.
#pragma once

#include "../../counter.cuh"
#include "../../warp_groups.cuh"
#include "schedule.cuh"
#include "fragments.cuh"

namespace jaxsoft::cuda::decode {

// If it has `rows`, it has room for the queries of so many, which then come with the units.
template <class Tile_, int tile_keys, int consumers, int slots_each, int rows = 0>
struct RingMemory {
  using Tile = Tile_;
  static constexpr int keys = tile_keys, count = consumers, depth = slots_each, units = 4;
  static constexpr int runs = keys / kRun;  // of keys, of which each is in one page
  struct alignas(1024) Slot {
    unsigned char key[Tile::bytes], value[Tile::bytes];
  };
  Slot slots[count][depth];
  Barrier full[count][depth], empty[count][depth], unit_full[units], unit_empty[units];
  Unit unit[units];
  // 16 bytes more than a row has let reads of a column meet no bank twice.
  static constexpr int query_rows = rows, query_step = Tile::elements + 8;
  alignas(16) uint16_t queries[units][rows > 0 ? rows : 1][query_step];
  uint8_t valid[count][depth];  // bit i says whether run i of the tile's keys is in the cache

  // A lane calls these, for the barriers of a consumer's slots, which `warps` warps release, and for those of units,
  // which all warps but the producer's read.
  __device__ void init_slots(int consumer, int warps) {
    for (int i = 0; i < depth; i++) full[consumer][i].init(1), empty[consumer][i].init(warps);
    show_barriers();
  }
  __device__ void init_units(int warps) {
    for (int i = 0; i < units; i++) unit_full[i].init(1), unit_empty[i].init(warps);
    show_barriers();
  }
};

constexpr int kNoUnit = -1;  // as a unit's batch: there are no more

// The next unit, as all warps but the producer's get it. They may `read` of its place in the ring before it is
// released.
template <class Ring, class Read>
__device__ Unit next_unit(Ring& ring, SlotPlace<Ring::units>& place, Read read) {
  ring.unit_full[place.slot].wait(place.parity);
  const Unit unit = ring.unit[place.slot];
  read(unit, place.slot);
  ring.unit_empty[place.slot].arrive_as_warp();
  place.advance();
  return unit;
}

// The producer: all lanes of one warp. The block's barriers are needed only when it has found its first unit, and so it
// waits here until they are `made`: __syncthreads would have to be at one place for all warps.
template <class Memory>
__device__ void produce(const Arguments& args, const CUtensorMap& keys, const CUtensorMap& values, Memory& memory,
                        const NamedBarrier& made) {
  using Tile = typename Memory::Tile;
  constexpr int runs = Memory::runs, tiles_looked_up = 32 / runs;
  const int lane = threadIdx.x % 32;
  // A box has the keys of one run, or of a whole tile, as pages allow. Each lane copies one box.
  const int runs_of_box = args.paged ? min(runs, (1 << args.page_shift) / kRun) : runs;
  const int box = lane % Tile::boxes, first_run = lane / Tile::boxes / 2 * runs_of_box;
  const bool copies = first_run < runs, of_values = lane / Tile::boxes % 2;
  const CUtensorMap& map = of_values ? values : keys;
  const int place_in_slot =
      (of_values ? Tile::bytes : 0) + (box * Memory::keys + first_run * kRun) * Tile::box_bytes;
  const int page_mask = args.paged ? (1 << args.page_shift) - 1 : -1;

  Scheduler scheduler(args);
  SlotPlace<Memory::units> unit_place;
  SlotPlace<Memory::depth> slot_of_lane;  // of the consumer with the number of the lane
  for (int number = blockIdx.x;;) {
    Unit unit;
    const bool found = scheduler.find(number, &unit);
    unsigned taken = 0;
    if (number == blockIdx.x) {
      made.wait();
      if (args.dynamic) wait_for_last_kernel();
    }
    if (found && args.dynamic && lane == 0) taken = take(reinterpret_cast<unsigned long long*>(args.counter));
    memory.unit_empty[unit_place.slot].wait(unit_place.parity ^ 1);
    Barrier& full = memory.unit_full[unit_place.slot];
    const int rows = found ? min(Memory::query_rows, live_rows(args, unit)) : 0;
    const unsigned row_bytes = args.call.size * 2;
    if (lane == 0) {
      if (!found) unit.batch = kNoUnit;
      memory.unit[unit_place.slot] = unit;
      full.arrive_expecting(rows * row_bytes);
    }
    __syncwarp();
    if (lane < rows)
      copy_to_shared(memory.queries[unit_place.slot][lane],
                     static_cast<const uint16_t*>(args.call.query) + RowPlace(args, unit, lane).begin(args, unit),
                     row_bytes, full);
    unit_place.advance();
    if (!found) return;

    auto look_up = [&](int tile) {  // the page of the run of keys from that tile on that has the number of the lane
      const int key = unit.begin + tile * Memory::keys + lane * kRun;
      if (key >= unit.end) return -1;
      return args.pages.table[int64_t(unit.batch) * args.pages.pages_of_sequence + (key >> args.page_shift)];
    };
    int pages = 0, next_pages = args.paged ? look_up(0) : 0;
    int consumer = 0;
    for (int tile = 0, looked_up = 0, key = unit.begin; key < unit.end; tile++, key += Memory::keys) {
      unsigned valid = ~0u;
      int page = unit.batch;
      if (args.paged) {
        if (tile == looked_up) {
          pages = next_pages, looked_up += tiles_looked_up;
          next_pages = look_up(looked_up);
        }
        const int first = (tile + tiles_looked_up - looked_up) * runs;
        valid = __ballot_sync(~0u, pages >= 0 && pages < args.pages.pages) >> first;
        page = __shfl_sync(~0u, pages, first + first_run % runs);
      }
      const int slot = __shfl_sync(~0u, slot_of_lane.slot, consumer);
      const unsigned parity = __shfl_sync(~0u, slot_of_lane.parity, consumer);
      Barrier& full = memory.full[consumer][slot];
      memory.empty[consumer][slot].wait(parity ^ 1);
      if (lane == 0) {
        memory.valid[consumer][slot] = static_cast<uint8_t>(valid);
        full.arrive_expecting(2 * Tile::bytes);
      }
      __syncwarp();
      // What lies past the end of a sequence, or in no page, becomes zeros.
      if (copies)
        copy_box(memory.slots[consumer][slot].key + place_in_slot, map,
                 {box * Tile::box_elements, unit.head, (key + first_run * kRun) & page_mask, page}, full);
      if (lane == consumer) slot_of_lane.advance();
      if (++consumer == Memory::count) consumer = 0;
    }
    number = args.dynamic ? static_cast<int>(gridDim.x + __shfl_sync(~0u, taken, 0)) : number + gridDim.x;
  }
}

}  // namespace jaxsoft::cuda::decode
