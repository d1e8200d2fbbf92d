// The sizes of the kernel of product_in_place.cu, which arrays it takes, its workspace, and its plan in words. Nothing
// here needs CUDA, so Python can ask without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../anywhere.h"

namespace jaxsoft::cuda {

// The operation in the list of those that a library has. There is no kernel for a CPU.
constexpr const char* kProductText = "product_in_place(hidden,gradients)->(gradients)\n";

struct ProductCode {
  static constexpr int rows = 128, columns = 256, depth = 64;  // of a block's tile, and what is summed in a step
  static constexpr int box = 64;                               // columns of a box, which has `depth` rows
  static constexpr int slots = 4;                              // steps that are in shared memory at the same time
  static constexpr int groups = 2, threads = (1 + groups) * kWarpGroup;  // warp groups that multiply
  static constexpr int blocks = 2;                                       // of a cluster
  static constexpr int copy_registers = 24, registers = 240;
  static constexpr int most_groups = 128;  // of blocks; there is one for each two multiprocessors at most
};

// What hidden (rows, width) and gradients (width, classes) may be.
struct ProductLimits {
  static constexpr int64_t width_multiple = ProductCode::blocks * ProductCode::rows, most_width = 1 << 20;
  static constexpr int64_t class_multiple = 8, most_classes = 1 << 30;
  static constexpr bool take_hidden(int64_t rows, int64_t width) {
    return width % width_multiple == 0 && width <= most_width && rows >= 1 && rows <= width;
  }
  static constexpr bool take_classes(int64_t classes) {
    return classes % class_multiple == 0 && classes >= class_multiple && classes <= most_classes;
  }
};

constexpr int64_t product_panels(int64_t classes) {
  return (classes + ProductCode::columns - 1) / ProductCode::columns;
}
constexpr int64_t blocks_of_group(int64_t width) { return width / ProductCode::rows; }
// Groups that run at once, where all multiprocessors are free.
constexpr int64_t product_groups(int64_t width, int64_t classes, int64_t multiprocessors) {
  return std::min({multiprocessors / blocks_of_group(width), product_panels(classes),
                   int64_t(ProductCode::most_groups)});
}

// The workspace has the counters of all groups and what they have taken, or a panel.
constexpr int64_t counted_words(int64_t groups, int64_t panels) { return 1 + groups * (panels + 2); }
constexpr int64_t product_workspace(int64_t rows, int64_t classes, int64_t element) {
  return std::max(4 * counted_words(ProductCode::most_groups, product_panels(classes)),
                  rows * ProductCode::columns * element);
}

// For example "product_in_place: 4 groups of 32 blocks".
inline std::string product_plan(int64_t width, int64_t classes, int64_t multiprocessors) {
  const int64_t groups = product_groups(width, classes, multiprocessors);
  return "product_in_place: " + std::to_string(groups) + " groups of " + std::to_string(blocks_of_group(width)) +
         " blocks";
}

}  // namespace jaxsoft::cuda
