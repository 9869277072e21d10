// Marks functions that the CPU code and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define WEIGHTSYNC_HD __host__ __device__
#else
#define WEIGHTSYNC_HD
#endif
