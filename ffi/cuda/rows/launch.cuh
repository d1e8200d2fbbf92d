// The choice of a strategy, from the row's length and the number of rows, by a table for each architecture.
#pragma once

#include "clustered.cuh"
#include "columns.cuh"
#include "dealt.cuh"
#include "flat.cuh"

namespace jaxsoft::cuda {

// In packs of 16 bytes of each operand.
struct Choice {
  int64_t packs[4];             // a row up to here: one pack a thread, two, four, five
  int64_t extra_packs;          // four also up to here where elements of 16 bits have extras
  int64_t odd_packs[2];         // five also up to here where rows begin anywhere: of 4 bytes an element, and of 2
  int64_t resident_packs[2];    // for one operand, and for two; longer rows are not resident
  int64_t ring_packs[2];        // what a block of a cluster should have of a row at most, for one operand, and for two:
                                // half of what it holds, so that the next row is there when one is written
  int64_t few_rows;             // so many rows or fewer are few: each goes to a cluster, if it fits, or is spread
  int64_t few_packs[2];         // the least and the most that a block of such a cluster has of a row
  int64_t split_blocks;         // the least number of blocks a multiprocessor that rows are split into
  int64_t split_packs;          // more blocks are made until one has no more than so many packs of a row
  int64_t idle_packs;           // of all rows together: up to here, what does not fit a cluster of few rows is split
  int64_t spread_packs[2];      // or spread, from here on, for one operand, and for two
};
constexpr Choice kHopper = {{8, 31, 128, 160}, 1024, {320, 1280}, {4096, 2048},
                            {Ring::held_packs(1) / 2, Ring::held_packs(2) / 2},
                            64, {256, 2048}, 2, 8192, 1 << 20, {5 << 17, 1 << 18}};
constexpr Choice kOther = {{8, 31, 128, 160}, 1024, {320, 1280}, {8192, 4096}, {0, 0}, 0,
                           {0, 0},            4,            8192,         0,    {0, 0}};  // no clusters, or not measured

struct Device {
  int processors = 0, major = 0;
  cudaError_t read() {
    int device = 0;
    if (auto e = cudaGetDevice(&device)) return e;
    if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
};

template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_resident(const Arguments<T>& args, Layout layout, int64_t packs, cudaStream_t stream) {
  int64_t threads = (packs + kPacks - 1) / kPacks, rows_per_block = 1;
  if (threads <= 32) {
    int64_t lanes = 1;
    while (lanes < threads) lanes *= 2;
    threads = lanes;
    rows_per_block = 128 / lanes;
  } else {
    threads = (threads + 31) / 32 * 32;
  }
  int64_t blocks = std::min<int64_t>((args.rows + rows_per_block - 1) / rows_per_block, 0x7fffffff);
  auto kernel = resident<Op, T, Form, kPacks, Layout::any>;
  if constexpr (sizeof(T) < 8 && !Op<T>::sums)  // f64 and rare operations go without, for compile time
    if (layout == Layout::whole) kernel = resident<Op, T, Form, kPacks, Layout::whole>;
  if constexpr (!Form::extras && kPacks <= 2 && sizeof(T) == 2 && !Op<T>::sums)
    if (layout == Layout::halves) kernel = resident<Op, T, Form, kPacks, Layout::halves>;
  kernel<<<blocks, dim3(threads, rows_per_block), 0, stream>>>(args);
  return cudaGetLastError();
}

// More parts of a row than this are merged by a kernel of their own.
constexpr unsigned kFewParts = 512;

// `workspace` has room for the states of all parts and, where they are many, one more of each row.
template <template <class> class Op, class T, class Form>
cudaError_t launch_split(const Arguments<T>& args, Split split, int threads, bool overlap, void* workspace,
                         cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.rows), blocks = rows * split.parts;
  auto* states = static_cast<typename Op<T>::Part*>(workspace);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = Op<T>::reduces && overlap;
  auto shape = [&](unsigned blocks, unsigned threads) {
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
    return &config;
  };
  const typename Op<T>::Part* read = states;
  unsigned of_row = split.parts;
  if constexpr (Op<T>::reduces) {
    split_reduce<Op, T, Form><<<blocks, threads, 0, stream>>>(args, states, split);
    if (auto e = cudaGetLastError()) return e;
    if (Op<T>::writes && split.parts > kFewParts) {
      auto* merged = states + int64_t(rows) * split.parts;
      if (auto e = cudaLaunchKernelEx(shape(rows, 512), split_merge<Op, T>, read, split.parts, merged)) return e;
      read = merged, of_row = 1;
    }
  }
  if constexpr (Op<T>::writes)
    return cudaLaunchKernelEx(shape(blocks, threads), split_write<Op, T, Form>, args, read, of_row, split);
  else
    return cudaLaunchKernelEx(shape(rows, 256), split_finish<Op, T>, args, read, split.parts);
}

// Where all that is written from is read to reduce it, and registers are enough: else split rows are no slower.
template <class Op, class T, class Form>
constexpr bool can_spread = Op::reduces && Op::writes && Op::reads_a_to_reduce && !Op::keeps_apart && sizeof(T) <= 4 &&
                            !Form::extras;

// `workspace` has room for the states of all parts.
template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_spread(const Arguments<T>& args, Split split, void* workspace, cudaStream_t stream) {
  const int64_t threads = ((split.packs + kPacks - 1) / kPacks + 31) / 32 * 32;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows) * split.parts);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, spread<Op, T, Form, kPacks>, args, static_cast<typename Op<T>::Part*>(workspace),
                            split);
}

// `workspace` has room for `bytes`. Everything is ordered by `stream`; nothing is allocated or waited for.
template <template <class> class Op, class T, class Form>
cudaError_t launch_form(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  Device device;
  if (auto e = device.read()) return e;
  const Choice& choice = device.major == 9 ? kHopper : kOther;
  // A row that is not a multiple of 16 bytes long begins anywhere in its first pack.
  int64_t packs = (args.n * sizeof(T) + 15) / 16;
  Layout layout = args.layout();
  if (layout == Layout::halves && (Form::extras || sizeof(T) != 2 || packs > choice.packs[1])) layout = Layout::any;
  packs += layout == Layout::any && (args.n * sizeof(T) % 16 != 0 || reinterpret_cast<uintptr_t>(args.a) % 16 != 0);
  constexpr int operands = Op<T>::operands == 1 && !Form::bias ? 1 : 2;
  constexpr int most_packs = operands == 1 ? 8 : 4;
  if constexpr (!Form::extras && !Op<T>::sums) {
    if (packs <= choice.packs[0]) return launch_resident<Op, T, Form, 1>(args, layout, packs, stream);
    if (packs <= choice.packs[1]) return launch_resident<Op, T, Form, 2>(args, layout, packs, stream);
  }
  if (packs <= choice.packs[2]) return launch_resident<Op, T, Form, 4>(args, layout, packs, stream);
  if constexpr (sizeof(T) <= 4 && Op<T>::reduces && !Op<T>::sums) {
    const bool many = packs < Clustered::most_blocks * 1024 && args.rows * Clustered::most_blocks > 512;
    int blocks = many ? Clustered::most_blocks / 2 : Clustered::most_blocks;
    while (blocks > 1 && packs < blocks * choice.few_packs[0]) blocks /= 2;
    const int64_t part = (packs + blocks - 1) / blocks;
    if (args.rows <= choice.few_rows && blocks > 1 && part <= choice.few_packs[1]) {
      if constexpr (most_packs == 8 && !Form::extras)
        if (part > 1024) return launch_clustered<Op, T, Form, 8>(args, packs, blocks, stream);
      return launch_clustered<Op, T, Form, 4>(args, packs, blocks, stream);
    }
  }
  if (Form::extras && sizeof(T) == 2 && packs <= choice.extra_packs)
    return launch_resident<Op, T, Form, 4>(args, layout, packs, stream);
  if constexpr (!Form::extras && (operands == 1 || sizeof(T) == 2) && Op<T>::reduces && Op<T>::writes)
    if (packs <= choice.packs[3] || (layout == Layout::any && packs <= choice.odd_packs[sizeof(T) == 2]))
      return launch_resident<Op, T, Form, 5>(args, layout, packs, stream);
  const int64_t resident_packs = choice.resident_packs[operands - 1];
  if constexpr (!Op<T>::sums)
    if (packs <= std::min<int64_t>(resident_packs, most_packs * most_threads<Form, most_packs>))
      return launch_resident<Op, T, Form, most_packs>(args, layout, packs, stream);
  if constexpr (can_spread<Op<T>, T, Form>) {
    const int64_t blocks = Spread::blocks * device.processors, least = choice.spread_packs[operands - 1];
    const bool has_room = bytes >= blocks * int64_t(sizeof(typename Op<T>::Part));
    // Part of a GPU may have room for fewer blocks than there are rows.
    if (args.rows <= std::min(choice.few_rows, blocks) && args.rows * packs >= least && has_room) {
      const Split split(packs, blocks / args.rows);
      if (split.packs <= Spread::threads * most_packs)
        return launch_spread<Op, T, Form, most_packs>(args, split, workspace, stream);
    }
  }
  if constexpr (!Form::bias && sizeof(T) <= 4 && Op<T>::reduces && Op<T>::writes) {
    // Extras take time for each row, so a block should have more of it.
    int64_t part = choice.ring_packs[Op<T>::operands - 1];
    if (Form::extras && Op<T>::operands == 1) part += part / 2;
    if (part && args.vector && args.rows > choice.idle_packs / packs) {
      if (ring_holds<Op<T>>(packs, Ring::most_blocks)) {
        int blocks = 1;
        while (blocks < Ring::most_blocks && packs > blocks * part) blocks *= 2;
        // Parts that fill their slots may be smaller.
        if (sizeof(T) == 4 && Op<T>::operands == 1 && blocks <= 4 && packs % (2 * blocks * Ring::slot_packs(1)) == 0)
          blocks *= 2;
        return launch_ring<Op, T, Form>(args, blocks, workspace, stream);
      }
      if constexpr (!Form::extras)
        if (can_deal<Op<T>>(args.rows, packs, device.processors, bytes))
          return launch_dealt<Op, T, Form>(args, packs, device.processors, workspace, stream);
    }
  }
  if (packs <= std::min<int64_t>(resident_packs, 4 * most_threads<Form, 4>))
    return launch_resident<Op, T, Form, 4>(args, layout, packs, stream);
  if constexpr (!Op<T>::reduces && !Form::extras && sizeof(T) <= 4)
    if (args.vector && reinterpret_cast<uintptr_t>(args.a) % 16 == 0 && args.n >= Flat::packs * Pack<T>::size &&
        args.n <= 1 << 30)
      return launch_flat<Op, T>(args, stream);
  // Split where one block a row would leave too few, or have too much. What reduces nothing is always split.
  int threads = kThreads<Op<T>>;
  int64_t parts = packs / (kInFlight<Op<T>, Form> * threads);
  if constexpr (Op<T>::reduces) {
    const int64_t all = args.rows * packs;
    int64_t blocks = choice.split_blocks * device.processors;
    // Where threads go round more than once, smaller blocks wait less for each other.
    if (all > blocks * threads * kInFlight<Op<T>, Form> && all <= blocks * choice.split_packs)
      threads /= 2, parts *= 2, blocks = std::min<int64_t>(2 * blocks, kFewParts * args.rows);
    blocks = std::max(blocks, all / choice.split_packs);
    parts = std::min({parts, bytes / int64_t(sizeof(typename Op<T>::Part)) / args.rows - 1, blocks / args.rows});
  }
  if (args.n / std::max<int64_t>(parts, 1) > 1 << 30) return cudaErrorInvalidValue;  // a part is counted in ints
  if (parts >= 2 && args.rows * parts <= 0x7fffffff)
    return launch_split<Op, T, Form>(args, Split(packs, parts), threads, device.major >= 9, workspace, stream);
  tiled<Op, T, Form><<<std::min<int64_t>(args.rows, 0x7fffffff), kThreads<Op<T>>, 0, stream>>>(args);
  return cudaGetLastError();
}

template <template <class> class Op, class T>
cudaError_t launch(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  if (args.rows == 0 || args.n == 0 || args.inner == 0) return cudaSuccess;
  if (bytes < int64_t(sizeof(unsigned long long))) workspace = nullptr;  // no room for a counter
  if constexpr (!Op<T>::sums)
    if (args.inner > 1) return launch_columns<Op>(args, workspace, stream);
  const Extras& extras = args.extras;
  if constexpr (Op<T>::a_is_scores && Op<T>::operands == 1 && !Op<T>::sums)
    if (extras.bias.data) return launch_form<Op, T, WithExtras<T, true>>(args, workspace, bytes, stream);
  if (extras.scale.data || extras.limit.data || extras.where.data || args.masked || args.cap > 0 ||
      args.result != ResultType::same)
    return launch_form<Op, T, WithExtras<T, false>>(args, workspace, bytes, stream);
  return launch_form<Op, T, Plain>(args, workspace, bytes, stream);
}

}  // namespace jaxsoft::cuda
