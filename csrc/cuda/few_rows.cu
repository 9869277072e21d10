// Compiled without fused multiply-add, so that gates have the bits of the gate kernel.
#include <cuda_runtime.h>

#include <stdexcept>

#include "attention_warp.cuh"
#include "gated.cuh"
#include "memory.cuh"
#include "weightsync/few_rows.hpp"

namespace weightsync {
namespace {

using namespace cuda;

constexpr int kTile = static_cast<int>(kFewRowsTile);
constexpr int kStateThreads = 64;
constexpr int kMostThreads = 12 * 32 + kStateThreads;

// The stages of one warp, in the order in which its tiles' chunks come; tile after tile, so that a
// tile's beginning is on its way while the end of the one before is multiplied.
template <int kParts>
struct Loader {
    static constexpr int kChunk = few_rows_chunk(kParts == 2);
    static constexpr int kPitch = few_rows_pitch(kChunk);
    static constexpr int kPieces = kChunk / 8 < 32 ? kChunk / 8 : 32;  // of 16 bytes, at once
    static constexpr int kRows = 32 / kPieces;                         // likewise

    const FewRowsProduct& of;
    std::int64_t tile;
    std::int64_t tile_step;
    std::int64_t num_tiles;
    std::int32_t k = 0;
    const std::uint16_t* source = nullptr;  // this lane's first, of the tile

    static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

    __device__ void open() {
        source = static_cast<const std::uint16_t*>(of.weight) +
                 (tile * kTile + lane() / kPieces) * of.inner + lane() % kPieces * 8;
    }

    // The next chunk of each of the tile's rows.
    __device__ void load(std::uint32_t stage) {
        if (tile < num_tiles) {
            const std::uint32_t target = stage + lane() / kPieces * kPitch + lane() % kPieces * 16;
#pragma unroll
            for (int row = 0; row < kParts * kTile; row += kRows) {
                const std::int64_t up = row / kTile * (of.weight_rows / 2 - kTile);
#pragma unroll
                for (int first = 0; first < kChunk; first += 8 * kPieces) {
                    const bool is_there = k + first + lane() % kPieces * 8 < of.inner;
                    copy_async_once(target + row * kPitch + 2 * first,
                                    source + (is_there ? (row + up) * of.inner + k + first : 0),
                                    is_there);
                }
            }
            k += kChunk;
            if (k >= of.inner) {
                k = 0;
                tile += tile_step;
                open();
            }
        }
        commit_copies();
    }
};

// What a warp multiplies of 32 elements of `inner`: rows of states and the tile's rows of the
// weight. Addresses are this lane's for load_matrices.
template <int kParts>
struct Fragments {
    std::uint32_t states[4];
    std::uint32_t weights[kParts][4];

    __device__ void load(std::uint32_t of_states, std::uint32_t of_weight) {
        load_matrices(states, of_states);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            load_matrices(weights[part], of_weight + part * kTile * Loader<kParts>::kPitch);
        }
    }
};

// Rows of states by eight of the weight; of sixteen that the tensor cores have, half are none. Lane
// l has elements 2 * (l % 4) and the next of row l / 4.
template <int kParts>
struct Sums {
    float values[kParts][4];

    __device__ void reset() {
#pragma unroll
        for (auto& part : values) part[0] = part[1] = part[2] = part[3] = 0.0f;
    }

    __device__ void add(const Fragments<kParts>& of) {
        const std::uint32_t (&a)[4] = of.states;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const std::uint32_t (&b)[4] = of.weights[part];
            TensorBf16::multiply(values[part], {a[0], 0, a[1], 0}, b[0], b[1]);
            TensorBf16::multiply(values[part], {a[2], 0, a[3], 0}, b[2], b[3]);
        }
    }

    __device__ void write(const FewRowsProduct& of, std::int64_t tile) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const std::int64_t row = lane / 4;
        if (row >= of.num_rows) return;
        const float (&a)[4] = values[0];
        const float (&b)[4] = values[kParts - 1];
        const std::uint32_t both =
            kParts == 2 ? gated(a[0], a[1], b[0], b[1]) : TensorBf16::pack(a[0], a[1]);
        *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(of.output) +
                                          row * (of.weight_rows / kParts) + tile * kTile +
                                          lane % 4 * 2) = both;
    }
};

// All rows of states, to shared memory, by the warps that copy nothing else: they wait for no copy
// of the weight.
__device__ void load_states(const FewRowsProduct& of, std::uint32_t target) {
    const auto pieces = static_cast<std::int32_t>(of.inner / 8);
    const std::int32_t pitch = few_rows_pitch(of.inner);
    for (std::int32_t row = 0; row < of.num_rows; ++row) {
        const auto* source = static_cast<const std::uint16_t*>(of.states) + row * of.row_stride;
        for (auto i = static_cast<std::int32_t>(threadIdx.x % kStateThreads); i < pieces;
             i += kStateThreads) {
            copy_async(target + row * pitch + 16 * i, source + 8 * i, true);
        }
    }
    commit_copies();
    wait_copies<0>();
}

template <int kParts, int kStages>
__global__ __launch_bounds__(kMostThreads, 1) void few_rows_kernel(FewRowsProduct of) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int kChunk = Loader<kParts>::kChunk;
    constexpr std::uint32_t kStageBytes = few_rows_stage_bytes(kParts == 2);
    constexpr int kBlock = 128;  // elements whose fragments are loaded ahead of their products
    let_next_begin();
    const auto num_warps = static_cast<std::int32_t>(blockDim.x - kStateThreads) / 32;
    const auto warp = static_cast<std::int32_t>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t states = shared_address(memory) + num_warps * kStages * kStageBytes;
    if (warp >= num_warps) {
        wait_for_previous();
        load_states(of, states);
        __syncthreads();
        return;
    }
    const std::uint32_t ring = shared_address(memory) + warp * kStages * kStageBytes;
    Loader<kParts> loader{of, static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x,
                          static_cast<std::int64_t>(num_warps) * gridDim.x,
                          of.weight_rows / (kParts * kTile)};
    std::int64_t tile = loader.tile;
    loader.open();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) loader.load(ring + stage * kStageBytes);
    wait_for_previous();  // also before results are written over what it reads
    __syncthreads();

    const std::uint32_t row = min(lane % 8, static_cast<int>(of.num_rows) - 1);
    const std::uint32_t of_states = states + row * few_rows_pitch(of.inner) + lane / 8 * 16;
    const std::uint32_t of_weight = ring + lane % 8 * Loader<kParts>::kPitch + lane / 8 * 16;
    Sums<kParts> sums;
    int stage = 0;
    for (; tile < loader.num_tiles; tile += loader.tile_step) {
        sums.reset();
        for (std::int32_t k = 0; k < of.inner; k += kChunk) {
            wait_copies<kStages - 2>();
            __syncwarp();
            // The stage that was read last is free: every lane is past it.
            loader.load(ring + (stage + kStages - 1) % kStages * kStageBytes);
            const std::uint32_t from = of_weight + stage * kStageBytes;
            stage = stage + 1 == kStages ? 0 : stage + 1;
            const std::int32_t end = min(static_cast<std::int32_t>(of.inner) - k, kChunk);
            std::int32_t at = 0;
            for (; at + kBlock <= end; at += kBlock) {
                Fragments<kParts> all[kBlock / 32];
#pragma unroll
                for (int i = 0; i < kBlock / 32; ++i) {
                    all[i].load(of_states + 2 * (k + at) + 64 * i, from + 2 * at + 64 * i);
                }
#pragma unroll
                for (int i = 0; i < kBlock / 32; ++i) sums.add(all[i]);
            }
            for (; at < end; at += 32) {
                Fragments<kParts> some;
                some.load(of_states + 2 * (k + at), from + 2 * at);
                sums.add(some);
            }
        }
        sums.write(of, tile);
    }
    wait_copies<0>();
}

using Kernel = void (*)(FewRowsProduct);

template <int kParts>
Kernel kernel_of(std::int32_t num_stages) {
    switch (num_stages) {
        case 2:
            return few_rows_kernel<kParts, 2>;
        case 3:
            return few_rows_kernel<kParts, 3>;
        case 4:
            return few_rows_kernel<kParts, 4>;
        case 6:
            return few_rows_kernel<kParts, 6>;
        case 8:
            return few_rows_kernel<kParts, 8>;
        default:
            return few_rows_kernel<kParts, 12>;
    }
}

int attribute_of(cudaDeviceAttr attribute, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute", device);
    return value;
}

FewRowsShape shape_on(const FewRowsProduct& of, int device) {
    return few_rows_shape(of, attribute_of(cudaDevAttrMultiProcessorCount, device),
                          attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

constexpr std::int64_t kMostInner = 1 << 20;  // far above what shared memory has room for

bool has_sizes(const FewRowsProduct& of) {
    const std::int64_t rows = of.is_gated ? 2 * kFewRowsTile : kFewRowsTile;
    return of.num_rows >= 1 && of.num_rows <= kMostFewRows && of.inner > 0 &&
           of.inner < kMostInner && of.inner % kFewRowsInner == 0 && of.row_stride % 8 == 0 &&
           of.weight_rows > 0 && of.weight_rows % rows == 0;
}

}  // namespace

bool cuda_takes_few_rows(const FewRowsProduct& product, int device) {
    device = checked_device(device);
    return has_sizes(product) && shape_on(product, device).shared_bytes > 0;
}

void cuda_few_rows_product(const FewRowsProduct& product, std::uintptr_t stream, int device) {
    if (!cuda_takes_few_rows(product, device)) {
        throw std::invalid_argument("few rows: this device or kernel does not take these sizes");
    }
    const DeviceScope scope(device);
    const FewRowsShape shape = shape_on(product, device);
    const Kernel kernel =
        product.is_gated ? kernel_of<2>(shape.num_stages) : kernel_of<1>(shape.num_stages);
    // The most that there is: another thread may launch the same kernel with another size.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)),
          "cudaFuncSetAttribute", device);
    launch_behind(kernel, dim3(static_cast<unsigned>(shape.num_blocks)),
                  32 * shape.num_warps + kStateThreads, shape.shared_bytes, as_stream(stream),
                  device, "launch of few_rows_kernel", product);
}

}  // namespace weightsync
