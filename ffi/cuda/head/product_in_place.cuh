// The gradient of a linear layer's weight, in the place of the gradients of its scores: the interface of
// product_in_place.cu.
#pragma once

namespace jaxsoft::cuda {

// The operation in the list of those that a library has. There is no kernel for a CPU.
constexpr const char* kProductText = "product_in_place(hidden,gradients)->(gradients)\n";

}  // namespace jaxsoft::cuda
