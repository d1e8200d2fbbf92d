// What headers need that a C++ compiler without CUDA reads as well: plans, of which Python asks.
#pragma once

// Marks functions that host and device share.
#ifdef __CUDACC__
#define JAXSOFT_ANYWHERE __host__ __device__
#else
#define JAXSOFT_ANYWHERE
#endif

namespace jaxsoft::cuda {

constexpr int kWarpGroup = 128;  // threads

}  // namespace jaxsoft::cuda
