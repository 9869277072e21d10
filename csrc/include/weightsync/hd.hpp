// Marks functions that the CPU code and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define WEIGHTSYNC_HD __host__ __device__
#else
#define WEIGHTSYNC_HD
#endif

// For bodies that are compiled once for each instruction set: they must not become calls.
#ifdef __CUDACC__
#define WEIGHTSYNC_HD_INLINE __host__ __device__ __forceinline__
#else
#define WEIGHTSYNC_HD_INLINE inline __attribute__((always_inline))
#endif
