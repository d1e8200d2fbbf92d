// The sizes of the kernel of weight_gradient.cu, which arrays it takes, its workspace, and its plan in words. Nothing
// here needs CUDA, so Python can ask without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../anywhere.h"

namespace jaxsoft::cuda {

// The operation in the list of those that a library has. There is no kernel for a CPU.
constexpr const char* kWeightGradientText = "weight_gradient_in_place(hidden,gradients)->(gradients)\n";

struct WeightCode {
  static constexpr int rows = 128, columns = 256, depth = 64;  // of a block's tile, and what is summed in a step
  static constexpr int box = 64;                               // columns of a box, which has `depth` rows
  static constexpr int slots = 4;                              // steps that are in shared memory at the same time
  static constexpr int groups = 2, threads = (1 + groups) * kWarpGroup;  // warp groups that multiply
  static constexpr int blocks = 2;                                       // of a cluster
  static constexpr int copy_registers = 24, registers = 240;
  static constexpr int most_groups = 128;  // of blocks; there is one for each two multiprocessors at most
};

// What hidden (rows, width) and gradients (width, classes) may be.
struct WeightLimits {
  static constexpr int64_t width_multiple = WeightCode::blocks * WeightCode::rows, most_width = 1 << 20;
  static constexpr int64_t class_multiple = 8, most_classes = 1 << 30;
  static constexpr bool take_hidden(int64_t rows, int64_t width) {
    return width % width_multiple == 0 && width <= most_width && rows >= 1 && rows <= width;
  }
  static constexpr bool take_classes(int64_t classes) {
    return classes % class_multiple == 0 && classes >= class_multiple && classes <= most_classes;
  }
};

constexpr int64_t weight_gradient_panels(int64_t classes) {
  return (classes + WeightCode::columns - 1) / WeightCode::columns;
}
constexpr int64_t blocks_of_group(int64_t width) { return width / WeightCode::rows; }
// Groups that run at once, where all multiprocessors are free.
constexpr int64_t weight_gradient_groups(int64_t width, int64_t classes, int64_t multiprocessors) {
  return std::min({multiprocessors / blocks_of_group(width), weight_gradient_panels(classes),
                   int64_t(WeightCode::most_groups)});
}

// The workspace has the counters of all groups and what they have taken, or a panel.
constexpr int64_t counted_words(int64_t groups, int64_t panels) { return 1 + groups * (panels + 2); }
constexpr int64_t weight_gradient_workspace(int64_t rows, int64_t classes, int64_t element) {
  return std::max(4 * counted_words(WeightCode::most_groups, weight_gradient_panels(classes)),
                  rows * WeightCode::columns * element);
}

// For example "weight_gradient_in_place: 4 groups of 32 blocks".
inline std::string weight_gradient_plan(int64_t width, int64_t classes, int64_t multiprocessors) {
  const int64_t groups = weight_gradient_groups(width, classes, multiprocessors);
  const int64_t blocks = blocks_of_group(width);
  return "weight_gradient_in_place: " + std::to_string(groups) + " groups of " + std::to_string(blocks) + " blocks";
}

}  // namespace jaxsoft::cuda
