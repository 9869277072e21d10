#include <cuda_runtime.h>

#include "memory.cuh"
#include "weightsync/cuda_core.hpp"

namespace weightsync {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 4;  // of sixteen bytes, in flight in a thread

__global__ __launch_bounds__(kThreads) void read_kernel(const uint4* source, std::uint64_t size,
                                                        std::uint32_t* out) {
    const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * kThreads * kLoads;
    std::uint32_t all = 0;
    for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * kThreads * kLoads + threadIdx.x;
         i < size; i += stride) {
        uint4 values[kLoads] = {};
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            if (i + load * kThreads < size) values[load] = source[i + load * kThreads];
        }
#pragma unroll
        for (const uint4& value : values) all ^= value.x ^ value.y ^ value.z ^ value.w;
    }
    if (all == 0x5EED5EEDu) *out = all;  // or nothing would be read
}

}  // namespace

void cuda_read_bytes(std::uint64_t source_ptr, std::uint64_t num_bytes, std::uint64_t out_ptr,
                     std::uintptr_t stream, int device) {
    const cuda::DeviceScope scope(cuda::checked_device(device));
    int num_sms = 0;
    cuda::check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
                "cudaDeviceGetAttribute", device);
    read_kernel<<<num_sms * 4, kThreads, 0, cuda::as_stream(stream)>>>(
        reinterpret_cast<const uint4*>(source_ptr), num_bytes / sizeof(uint4),
        reinterpret_cast<std::uint32_t*>(out_ptr));
    cuda::check(cudaGetLastError(), "launch of read_kernel", device);
}

}  // namespace weightsync
