// Compiled without fused multiply-add, so that gates have the bits of the gate kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "attention_warp.cuh"
#include "gated.cuh"
#include "memory.cuh"
#include "weightsync/gate.hpp"
#include "weightsync/grouped_product.hpp"

namespace weightsync {
namespace {

using namespace cuda;

// Weights are the side of sixteen of a matrix instruction, rows of states that of eight. A warp has
// kMTiles times sixteen weights and kPairs times two times eight rows. A stage has kPieces times
// eight elements of `inner`.
template <int kShape, int kMWarps, int kNWarps, int kMTiles, int kPairs, int kStages,
          int kPieces = 8>
struct Tiling {
    static constexpr int pieces = kPieces;
    static constexpr int elements = 8 * kPieces;
    static constexpr int row_bytes = 2 * elements;
    static constexpr int m_warps = kMWarps;
    static constexpr int m_tiles = kMTiles;
    static constexpr int pairs = kPairs;
    static constexpr int stages = kStages;
    static constexpr int threads = 32 * kMWarps * kNWarps;
    static constexpr int weight_rows = 16 * kMWarps * kMTiles;
    static constexpr int rows = 16 * kNWarps * kPairs;
    static constexpr int loaded_rows = threads / kPieces;  // by all threads at once
    static constexpr int stage_bytes = (weight_rows + rows) * row_bytes;
    static_assert(weight_rows == kTileShapes[kShape].weight_rows &&
                  rows == kTileShapes[kShape].rows);
    static_assert(kMTiles % 2 == 0);  // gate and up of an element are in one lane
    static_assert(32 % loaded_rows == 0 && rows % loaded_rows == 0);
};
using Few = Tiling<0, 2, 1, 2, 1, 6>;
using Some = Tiling<1, 4, 1, 2, 2, 4>;
using More = Tiling<2, 4, 1, 2, 4, 4>;
using Many = Tiling<3, 2, 2, 4, 4, 3>;
using Most = Tiling<4, 4, 2, 4, 4, 4>;

// Of the lists in shared memory that tell where tiles are.
int table_bytes(std::int64_t num_experts) {
    return static_cast<int>((2 * (num_experts + 1) * sizeof(std::int32_t) + 127) / 128 * 128);
}

// All tiles, as the offsets have it.
struct TileTable {
    std::int32_t* first_tiles;
    std::int32_t* starts;
    std::int32_t num_experts;
    std::int32_t num_columns;
    std::int32_t tile_rows;

    // By the first warp: sums over the experts before, 32 at a time.
    __device__ void fill(const std::int32_t* offsets) const {
        const int lane = threadIdx.x;
        if (lane >= 32) return;
        std::int32_t tiles_before = 0;
        for (std::int32_t first = 0; first < num_experts; first += 32) {
            const std::int32_t expert = first + lane;
            const bool is_there = expert < num_experts;
            const std::int32_t end = is_there ? offsets[expert] : 0;
            const std::int32_t start = is_there && expert > 0 ? offsets[expert - 1] : 0;
            const std::int32_t tiles = is_there ? (end - start + tile_rows - 1) / tile_rows : 0;
            std::int32_t sum = tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const std::int32_t before = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
                if (lane >= distance) sum += before;
            }
            if (is_there) {
                first_tiles[expert] = tiles_before + sum - tiles;
                starts[expert] = start;
                if (expert == num_experts - 1) starts[num_experts] = end;
            }
            tiles_before += __shfl_sync(0xFFFFFFFFu, sum, 31);
        }
        if (lane == 0) first_tiles[num_experts] = tiles_before;
    }

    __device__ std::int32_t size() const { return first_tiles[num_experts] * num_columns; }
    __device__ ExpertTile operator[](std::int32_t index) const {
        return expert_tile(first_tiles, starts, num_experts, num_columns, tile_rows, index);
    }
};

// Copies stages of the block's tiles, one after another, also past a tile's end: the next one's
// beginning is under way while the last is still multiplied. A thread has the same piece of 16
// bytes of every loaded_rows-th row.
template <typename Tile, bool kGated>
struct StageLoader {
    static constexpr int kWeights = Tile::weight_rows / Tile::loaded_rows;  // of a thread
    static constexpr int kRows = Tile::rows / Tile::loaded_rows;

    const GroupedProduct& of;
    const TileTable& table;
    std::int32_t index;
    std::int32_t total;
    std::int32_t step;  // of the tile
    std::int32_t num_steps;
    std::int32_t first_weight;  // its row of this thread
    const std::uint16_t* weight;
    std::int32_t rows[kRows];  // of states; -1: none
    std::int32_t next_rows[kRows];

    __device__ StageLoader(const GroupedProduct& product, const TileTable& tiles, int steps)
        : of(product),
          table(tiles),
          index(static_cast<std::int32_t>(blockIdx.x)),
          total(tiles.size()),
          step(0),
          num_steps(steps) {
        find_rows(index);
        open();
    }

    static __device__ int row() { return static_cast<int>(threadIdx.x) / Tile::pieces; }
    static __device__ int piece() { return static_cast<int>(threadIdx.x) % Tile::pieces; }

    // Asks which states a tile has; the answer is used when it is opened.
    __device__ void find_rows(std::int32_t tile) {
#pragma unroll
        for (std::int32_t& found : next_rows) found = -1;
        if (tile >= total) return;
        const ExpertTile place = table[tile];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const std::int32_t local = row() + i * Tile::loaded_rows;
            if (local >= place.num_rows) continue;
            next_rows[i] = place.first_row + local;
            if (of.state_rows != nullptr) next_rows[i] = of.state_rows[next_rows[i]];
        }
    }

    __device__ void open() {
        if (index >= total) return;
#pragma unroll
        for (int i = 0; i < kRows; ++i) rows[i] = next_rows[i];
        find_rows(index + static_cast<std::int32_t>(gridDim.x));
        const ExpertTile place = table[index];
        weight = static_cast<const std::uint16_t*>(of.weights) +
                 place.expert * of.weight_rows * of.inner;
        first_weight = place.column * (kGated ? Tile::weight_rows / 2 : Tile::weight_rows) +
                       weight_within(row(), kGated);
    }

    __device__ void load(std::uint32_t stage) {
        if (index < total) {
            const std::int64_t k = step * Tile::elements + piece() * 8;
            const bool has_k = k < of.inner;
            copy_weights(stage, k, has_k);
            copy_rows(stage + Tile::weight_rows * Tile::row_bytes, k, has_k);
            if (++step == num_steps) {
                step = 0;
                index += static_cast<std::int32_t>(gridDim.x);
                open();
            }
        }
        commit_copies();
    }

    // What a piece adds to the thread's first row is known when this is compiled.
    __device__ void copy_weights(std::uint32_t target, std::int64_t k, bool has_k) const {
        const auto width = static_cast<std::int32_t>(of.weight_rows / (kGated ? 2 : 1));
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
            const int local = i * Tile::loaded_rows;  // and the thread's row, which is below 16
            std::int32_t of_weight = first_weight + weight_within(local, kGated);
            const bool is_there = has_k && of_weight < width;
            if (is_of_up(local, kGated) || is_of_up(row(), kGated)) of_weight += width;
            copy_async(target + swizzled<Tile::pieces>(local + row(), piece()) * 16,
                       weight + (is_there ? of_weight * of.inner + k : 0), is_there);
        }
    }

    __device__ void copy_rows(std::uint32_t target, std::int64_t k, bool has_k) const {
        const auto* states = static_cast<const std::uint16_t*>(of.states);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const bool is_there = has_k && rows[i] >= 0;
            copy_async(target + swizzled<Tile::pieces>(row() + i * Tile::loaded_rows, piece()) * 16,
                       states + (is_there ? rows[i] * of.row_stride + k : 0), is_there);
        }
    }
};

// Of an 8x8 matrix of 16-bit elements, two of a row a lane, the transposed.
__device__ std::uint32_t transposed(std::uint32_t value) {
    std::uint32_t found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(value));
    return found;
}

// A warp's part of a tile. Lane l has, of every sixteen weights by eight rows, weights l / 4 and
// l / 4 + 8 of rows 2 * (l % 4) and the next.
template <typename Tile, bool kGated>
struct WarpTile {
    float sums[Tile::m_tiles][2 * Tile::pairs][4];
    int first_weight;  // of the tile's
    int first_row;
    int num_pairs;  // that have a row

    __device__ explicit WarpTile(const ExpertTile& place) {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        first_weight = warp % Tile::m_warps * 16 * Tile::m_tiles;
        first_row = warp / Tile::m_warps * 16 * Tile::pairs;
        num_pairs = min(max(place.num_rows - first_row + 15, 0) / 16, Tile::pairs);
#pragma unroll
        for (auto& of_weights : sums) {
#pragma unroll
            for (auto& block : of_weights) block[0] = block[1] = block[2] = block[3] = 0.0f;
        }
    }

    template <bool kAll>
    __device__ void multiply(std::uint32_t stage) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const std::uint32_t weights = stage + (first_weight + lane % 16) * Tile::row_bytes;
        const std::uint32_t rows =
            stage + (Tile::weight_rows + first_row + lane % 8 + lane / 16 * 8) * Tile::row_bytes;
#pragma unroll
        for (int k = 0; k < Tile::pieces; k += 2) {
            std::uint32_t a[Tile::m_tiles][4];
#pragma unroll
            for (int m = 0; m < Tile::m_tiles; ++m) {
                load_matrices(
                    a[m], weights + m * 16 * Tile::row_bytes + ((k + lane / 16) ^ (lane % 8)) * 16);
            }
#pragma unroll
            for (int pair = 0; pair < Tile::pairs; ++pair) {
                if (!kAll && pair >= num_pairs) continue;
                std::uint32_t b[4];
                load_matrices(
                    b, rows + pair * 16 * Tile::row_bytes + ((k + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
                for (int m = 0; m < Tile::m_tiles; ++m) {
                    TensorBf16::multiply(sums[m][2 * pair], a[m], b[0], b[1]);
                    TensorBf16::multiply(sums[m][2 * pair + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ void multiply(std::uint32_t stage) {
        if (num_pairs == Tile::pairs) {
            multiply<true>(stage);
        } else if (num_pairs > 0) {
            multiply<false>(stage);
        }
    }

    // Sixteen weights of eight rows, of which each lane has two of the first eight and two of the
    // others: neighbours exchange, so that a lane has four of its row side by side. `out` is where
    // the row's sixteen begin, of which `left` are there.
    static __device__ void write(std::uint16_t* out, std::int64_t left, bool is_there,
                                 std::uint32_t low, std::uint32_t high) {
        low = transposed(low);  // by all lanes
        high = transposed(high);
        const int place = static_cast<int>(threadIdx.x) % 4;
        const bool is_even = place % 2 == 0;
        const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, is_even ? high : low, 1);
        const int column = is_even ? 2 * place : 6 + 2 * place;
        if (!is_there || column >= left) return;
        *reinterpret_cast<uint2*>(out + column) =
            is_even ? make_uint2(low, other) : make_uint2(other, high);
    }

    __device__ void write(const GroupedProduct& of, const ExpertTile& place) const {
        constexpr int share = kGated ? 2 : 1;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const std::int64_t width = of.weight_rows / share;
        const std::int64_t first =
            (static_cast<std::int64_t>(place.column) * Tile::weight_rows + first_weight) / share;
#pragma unroll
        for (int block = 0; block < 2 * Tile::pairs; ++block) {
            const int row = first_row + block * 8 + lane / 4;
            const bool is_there = row < place.num_rows;
            auto* out = static_cast<std::uint16_t*>(of.output) + (place.first_row + row) * width;
#pragma unroll
            for (int m = 0; m < Tile::m_tiles; m += share) {
                const float (&a)[4] = sums[m][block];
                const float (&b)[4] = sums[m + share - 1][block];
                const std::int64_t column = first + m / share * 16;
                if constexpr (kGated) {
                    write(out + column, width - column, is_there, gated(a[0], a[1], b[0], b[1]),
                          gated(a[2], a[3], b[2], b[3]));
                } else {
                    write(out + column, width - column, is_there, TensorBf16::pack(a[0], a[1]),
                          TensorBf16::pack(a[2], a[3]));
                }
            }
        }
    }
};

// Each block has every gridDim-th tile; grids may be of any size.
template <typename Tile, bool kGated>
__global__ __launch_bounds__(Tile::threads, 256 / Tile::threads < 2 ? 1 : 2) void grouped_kernel(
    GroupedProduct of, int num_table_bytes) {
    extern __shared__ __align__(128) unsigned char memory[];
    let_next_begin();
    wait_for_previous();
    auto* lists = reinterpret_cast<std::int32_t*>(memory);
    const auto num_experts = static_cast<std::int32_t>(of.num_experts);
    const TileTable table{
        lists, lists + num_experts + 1, num_experts,
        columns_of(of.weight_rows / (kGated ? 2 : 1), Tile::weight_rows / (kGated ? 2 : 1)),
        Tile::rows};
    table.fill(of.offsets);
    __syncthreads();
    const std::int32_t total = table.size();
    const auto num_steps = static_cast<int>((of.inner + Tile::elements - 1) / Tile::elements);
    const std::uint32_t ring = shared_address(memory + num_table_bytes);
    StageLoader<Tile, kGated> loader(of, table, num_steps);
#pragma unroll
    for (int stage = 0; stage < Tile::stages - 1; ++stage) {
        loader.load(ring + stage * Tile::stage_bytes);
    }
    int stage = 0;
    for (auto index = static_cast<std::int32_t>(blockIdx.x); index < total; index += gridDim.x) {
        const ExpertTile place = table[index];
        WarpTile<Tile, kGated> tile(place);
        for (int step = 0; step < num_steps; ++step) {
            wait_copies<Tile::stages - 2>();
            __syncthreads();
            // The stage that was read last is free: every warp is past it.
            loader.load(ring + (stage + Tile::stages - 1) % Tile::stages * Tile::stage_bytes);
            tile.multiply(ring + stage * Tile::stage_bytes);
            stage = (stage + 1) % Tile::stages;
        }
        tile.write(of, place);
    }
    wait_copies<0>();
}

// As many blocks as the device holds at once, but no more than there can be tiles.
template <typename Tile, bool kGated>
void launch(const GroupedProduct& of, cudaStream_t stream, int device) {
    const int num_table_bytes = table_bytes(of.num_experts);
    const int shared_bytes = num_table_bytes + Tile::stages * Tile::stage_bytes;
    const auto kernel = grouped_kernel<Tile, kGated>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute", device);
    int blocks = 0;
    check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Tile::threads, shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor", device);
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute", device);
    const std::int64_t most_tiles =
        std::min(of.num_rows, of.num_experts + of.num_rows / Tile::rows) *
        columns_of(of.weight_rows, Tile::weight_rows);
    const auto grid = std::min<std::int64_t>(
        most_tiles, static_cast<std::int64_t>(std::max(blocks, 1)) * multiprocessors);
    launch_behind(kernel, dim3(static_cast<unsigned>(grid)), Tile::threads, shared_bytes, stream,
                  device, "launch of grouped_kernel", of, num_table_bytes);
}

template <typename Tile>
void launch(const GroupedProduct& of, cudaStream_t stream, int device) {
    if (of.is_gated) return launch<Tile, true>(of, stream, device);
    launch<Tile, false>(of, stream, device);
}

// A shape that needs more shared memory than a block may have gives way to the one before it.
int shape_within(int shape, std::int64_t num_experts, int device) {
    constexpr int ring_bytes[kNumTileShapes] = {
        Few::stages * Few::stage_bytes, Some::stages * Some::stage_bytes,
        More::stages * More::stage_bytes, Many::stages * Many::stage_bytes,
        Most::stages * Most::stage_bytes};
    int limit = 0;
    check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute", device);
    while (shape > 0 && table_bytes(num_experts) + ring_bytes[shape] > limit) --shape;
    return shape;
}

}  // namespace

void cuda_grouped_product(const GroupedProduct& product, std::uintptr_t stream, int device) {
    if (product.num_experts < 1 || product.num_experts > kMaxExperts) {
        throw std::invalid_argument("grouped product: 1 to 512 experts");
    }
    if (product.inner % 8 != 0 || product.row_stride % 8 != 0 ||
        product.weight_rows % (product.is_gated ? 16 : 8) != 0) {
        throw std::invalid_argument("grouped product: sizes are no multiples of 8");
    }
    if (product.num_rows == 0 || product.weight_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    const cudaStream_t on = as_stream(stream);
    const std::int64_t shape =
        product.shape == 0 ? shape_for(product.num_rows, product.num_experts) : product.shape - 1;
    if (shape < 0 || shape >= kNumTileShapes) {
        throw std::invalid_argument("grouped product: unknown shape");
    }
    switch (shape_within(static_cast<int>(shape), product.num_experts, device)) {
        case 0:
            return launch<Few>(product, on, device);
        case 1:
            return launch<Some>(product, on, device);
        case 2:
            return launch<More>(product, on, device);
        case 3:
            return launch<Many>(product, on, device);
        default:
            return launch<Most>(product, on, device);
    }
}

}  // namespace weightsync
