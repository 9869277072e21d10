#include <cuda_runtime.h>

#include "memory.cuh"
#include "weightsync/cuda_core.hpp"

namespace weightsync {
namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void place_rows_kernel(DecodeRows rows) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < rows.num_rows) place_row(rows, row);
}

__global__ __launch_bounds__(kThreads) void advance_rows_kernel(DecodeRows rows) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < rows.num_rows) advance_row(rows, row);
}

unsigned blocks_of(const DecodeRows& rows) {
    return static_cast<unsigned>((rows.num_rows + kThreads - 1) / kThreads);
}

}  // namespace

void cuda_place_rows(const DecodeRows& rows, std::uintptr_t stream, int device) {
    const cuda::DeviceScope scope(cuda::checked_device(device));
    place_rows_kernel<<<blocks_of(rows), kThreads, 0, cuda::as_stream(stream)>>>(rows);
    cuda::check(cudaGetLastError(), "launch of place_rows_kernel", device);
}

void cuda_advance_rows(const DecodeRows& rows, std::uintptr_t stream, int device) {
    const cuda::DeviceScope scope(cuda::checked_device(device));
    advance_rows_kernel<<<blocks_of(rows), kThreads, 0, cuda::as_stream(stream)>>>(rows);
    cuda::check(cudaGetLastError(), "launch of advance_rows_kernel", device);
}

}  // namespace weightsync
