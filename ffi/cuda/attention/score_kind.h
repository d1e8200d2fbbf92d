// What is done to the scores of a call, forward and backward. Kernels are compiled for each, as what a call has not
// costs time even where it is skipped.
#pragma once

namespace jaxsoft::cuda {

// Nothing; limits by position and lengths; also segments; and also a cap. Where keys end is no limit forward, and one
// backward if a block of keys is not full.
enum class ScoreKind { plain, limited, segmented, capped };
template <ScoreKind kind>
constexpr bool may_have_segments = kind >= ScoreKind::segmented;

}  // namespace jaxsoft::cuda
