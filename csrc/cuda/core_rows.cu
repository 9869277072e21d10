// Compiled without fused multiply-add, so that an element has the bits that the CPU gives it.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "memory.cuh"
#include "row_parts.cuh"
#include "weightsync/cuda_core.hpp"
#include "weightsync/float_codecs.hpp"
#include "weightsync/rope_math.hpp"

namespace weightsync {
namespace {

using cuda::as_stream;
using cuda::blocks_for;
using cuda::checked_device;
using cuda::DeviceScope;
using cuda::is_aligned;
using cuda::kEight;
using cuda::load_eight;
using cuda::norm_scale;
using cuda::warp_total;
using cuda::with_type;

constexpr int kMaxThreads = 512;
constexpr int kGateThreads = 256;
constexpr unsigned kMaxGridRows = 65535;

template <typename Type>
__device__ void store_eight(typename Type::Memory* target, int count,
                            const typename Type::Memory (&values)[kEight]) {
    if (count >= kEight && is_aligned(target)) {
        alignas(16) typename Type::Memory raw[kEight];
#pragma unroll
        for (int i = 0; i < kEight; ++i) raw[i] = values[i];
#pragma unroll
        for (unsigned i = 0; i < sizeof(raw) / 16; ++i) {
            reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(raw)[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
        if (i < count) target[i] = values[i];
    }
}

// The same on every thread; warps in order.
__device__ float block_total(float value) {
    __shared__ float totals[kMaxThreads / 32];
    value = warp_total(value);
    const int num_warps = static_cast<int>(blockDim.x) / 32;
    if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < num_warps; ++warp) total += totals[warp];
    return total;
}

// Threads of a block that norms rows of a width: it decides the order of the sum.
int norm_threads(std::int64_t width) {
    const std::int64_t wanted = (width + kEight - 1) / kEight;
    return static_cast<int>(std::clamp<std::int64_t>((wanted + 31) / 32 * 32, 32, kMaxThreads));
}

// Norms one row. `at(i, count, values)` gives elements from i on, and is called twice for each.
template <typename Type, typename At>
__device__ void norm_row(std::int64_t width, float eps, const typename Type::Memory* weight,
                         typename Type::Memory* out, At&& at) {
    const std::int64_t stride = static_cast<std::int64_t>(blockDim.x) * kEight;
    float squares = 0.0f;
    for (std::int64_t i = threadIdx.x * kEight; i < width; i += stride) {
        float values[kEight];
        at(i, static_cast<int>(min(width - i, static_cast<std::int64_t>(kEight))), true, values);
#pragma unroll
        for (float value : values) squares += value * value;
    }
    const float scale = norm_scale(block_total(squares), width, eps);
    for (std::int64_t i = threadIdx.x * kEight; i < width; i += stride) {
        const int count = static_cast<int>(min(width - i, static_cast<std::int64_t>(kEight)));
        float values[kEight];
        float weights[kEight];
        typename Type::Memory normed[kEight];
        at(i, count, false, values);
        load_eight<Type>(weight + i, count, weights);
#pragma unroll
        for (int j = 0; j < kEight; ++j) {
            normed[j] = scale_normed<Type>(values[j], scale, weights[j]);
        }
        store_eight<Type>(out + i, count, normed);
    }
}

template <typename Type>
__global__ __launch_bounds__(kMaxThreads) void norm_kernel(NormedRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    using Memory = typename Type::Memory;
    const std::int64_t row = blockIdx.x / rows.num_groups;
    const std::int64_t group = blockIdx.x % rows.num_groups;
    const auto* input =
        static_cast<const Memory*>(rows.input) + row * rows.row_stride + group * rows.group_stride;
    norm_row<Type>(rows.width, rows.eps, static_cast<const Memory*>(rows.weight),
                   static_cast<Memory*>(rows.output) + blockIdx.x * rows.width,
                   [&](std::int64_t i, int count, bool, float (&values)[kEight]) {
                       load_eight<Type>(input + i, count, values);
                   });
}

template <typename Type>
__global__ __launch_bounds__(kMaxThreads) void add_norm_kernel(AddedRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    using Memory = typename Type::Memory;
    const std::int64_t start = blockIdx.x * rows.width;
    auto* states = static_cast<Memory*>(rows.states) + start;
    const auto* delta = static_cast<const Memory*>(rows.delta) + start;
    norm_row<Type>(rows.width, rows.eps, static_cast<const Memory*>(rows.weight),
                   static_cast<Memory*>(rows.output) + start,
                   [&](std::int64_t i, int count, bool is_first, float (&values)[kEight]) {
                       load_eight<Type>(states + i, count, values);
                       if (!is_first) return;
                       float added[kEight];
                       Memory sums[kEight];
                       load_eight<Type>(delta + i, count, added);
#pragma unroll
                       for (int j = 0; j < kEight; ++j) {
                           sums[j] = Type::store(values[j] + added[j]);
                           values[j] = Type::load(sums[j]);
                       }
                       store_eight<Type>(states + i, count, sums);
                   });
}

template <typename Type>
__global__ __launch_bounds__(kGateThreads) void gate_kernel(GatedRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    using Memory = typename Type::Memory;
    const std::int64_t i =
        (static_cast<std::int64_t>(blockIdx.x) * kGateThreads + threadIdx.x) * kEight;
    if (i >= rows.width) return;
    const int count = static_cast<int>(min(rows.width - i, static_cast<std::int64_t>(kEight)));
    for (std::int64_t row = blockIdx.y; row < rows.num_rows; row += gridDim.y) {
        const auto* gate = static_cast<const Memory*>(rows.gate_up) + row * rows.row_stride + i;
        float gates[kEight];
        float ups[kEight];
        Memory out[kEight];
        load_eight<Type>(gate, count, gates);
        load_eight<Type>(gate + rows.width, count, ups);
#pragma unroll
        for (int j = 0; j < kEight; ++j) {
            out[j] = Type::store(Type::load(Type::store(silu(gates[j]))) * ups[j]);
        }
        store_eight<Type>(static_cast<Memory*>(rows.output) + row * rows.width + i, count, out);
    }
}

}  // namespace

void cuda_norm_rows(const NormedRows& rows, std::uintptr_t stream, int device) {
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    with_type(rows.dtype, [&](auto type) {
        cuda::launch_behind(
            norm_kernel<decltype(type)>, dim3(blocks_for(rows.num_rows * rows.num_groups, 1)),
            norm_threads(rows.width), 0, as_stream(stream), device, "launch of norm_kernel", rows);
    });
}

void cuda_add_norm_rows(const AddedRows& rows, std::uintptr_t stream, int device) {
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    with_type(rows.dtype, [&](auto type) {
        cuda::launch_behind(add_norm_kernel<decltype(type)>, dim3(blocks_for(rows.num_rows, 1)),
                            norm_threads(rows.width), 0, as_stream(stream), device,
                            "launch of add_norm_kernel", rows);
    });
}

void cuda_gate_rows(const GatedRows& rows, std::uintptr_t stream, int device) {
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    const auto grid_rows =
        static_cast<unsigned>(std::min<std::int64_t>(rows.num_rows, kMaxGridRows));
    const dim3 grid(blocks_for(rows.width, kGateThreads * kEight), grid_rows);
    with_type(rows.dtype, [&](auto type) {
        cuda::launch_behind(gate_kernel<decltype(type)>, grid, kGateThreads, 0, as_stream(stream),
                            device, "launch of gate_kernel", rows);
    });
}

}  // namespace weightsync
