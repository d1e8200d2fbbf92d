// The row operations of one dtype, in a file of its own so that the dtypes compile side by side.
#include "rows.cuh"

namespace jaxsoft::cuda {
JAXSOFT_DEFINE_ROWS(__half)
}
