// The kernel of sequences with many rows.
#pragma once

#include <cuda_runtime.h>

#include "attention_kernels.cuh"

namespace weightsync::cuda {

// A warp has two times sixteen entries, so that what it reads of K and V serves both.
inline constexpr int kWarpTiles = 2;
inline constexpr int kWarpRows = kWarpTiles * kWarpEntries;
inline constexpr int kTileStages = 2;

// Shared memory of a block: tokens, then of each warp its queries and what it has of chunks so far.
template <int kDim>
inline constexpr int kWarpBytes = kWarpRows * kDim * 2 + kWarpRows * kDim * 4;
template <int kDim>
inline constexpr int tile_shared_bytes(int num_warps) {
    return kTileStages * kTileBytes<kDim> + num_warps * kWarpBytes<kDim>;
}

// What a warp has of the chunks before: values lie in shared memory, 16 bytes a lane at a time.
template <int kDim>
struct TileTotals {
    float4* values;  // [kDim / 8][32]
    float max[2];
    float sum[2];

    __device__ void reset(float4* memory) {
        values = memory + threadIdx.x % 32;
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int block = 0; block < kDim / 8; ++block) values[block * 32] = {};
    }

    // As WarpSums::fold_in.
    __device__ void fold_in(const WarpSums<kDim>& chunk, float scale_log2) {
        Fold folds[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            folds[half] = fold_of(max[half], chunk.max[half], scale_log2);
            max[half] = folds[half].max;
            sum[half] = folded(sum[half], chunk.sum[half], folds[half]);
        }
#pragma unroll
        for (int block = 0; block < kDim / 8; ++block) {
            const float4 before = values[block * 32];
            const float (&now)[4] = chunk.values[block];
            values[block * 32] = {
                folded(before.x, now[0], folds[0]), folded(before.y, now[1], folds[0]),
                folded(before.z, now[2], folds[1]), folded(before.w, now[3], folds[1])};
        }
    }

    // Writes what the lane has of one of its entries, divided by the sum.
    template <typename Tensor>
    __device__ void write(int half, std::uint16_t* out) const {
        const float share = __frcp_rn(sum[half]);
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int block = 0; block < kDim / 8; ++block) {
            const float4 found = values[block * 32];
            const float low = half == 0 ? found.x : found.z;
            const float high = half == 0 ? found.y : found.w;
            *reinterpret_cast<std::uint32_t*>(out + block * 8 + column) =
                Tensor::pack(__fmul_rn(low, share), __fmul_rn(high, share));
        }
    }
};

// Of a power of two its exponent, of others -1.
inline __device__ int shift_of(int value) {
    return (value & (value - 1)) == 0 ? __ffs(value) - 1 : -1;
}

// Copies tiles of a sequence's tokens by all threads of a block. Places in the cache are looked up
// a tile ahead.
template <int kDim, int kWarps>
struct TileLoader {
    static constexpr int kPieces = kDim / 8;
    static constexpr int kLoaders =
        kWarps * 32 < kTokenTile * kPieces ? kWarps * 32 : kTokenTile * kPieces;
    static constexpr int kTokens = kTokenTile * kPieces / kLoaders;  // of a thread

    const std::int32_t* table;
    std::int32_t context;
    std::int32_t page_size;
    int page_shift;
    std::int32_t slots[kTokens];

    __device__ TileLoader(const AttentionStep& step, std::int32_t sequence, std::int32_t num_tokens)
        : table(step.block_tables + sequence * step.table_width),
          context(num_tokens),
          page_size(static_cast<std::int32_t>(step.page_size)),
          page_shift(shift_of(page_size)) {
        find(0);
    }

    __device__ void find(int tile) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const auto token = static_cast<std::int32_t>(
                tile * kTokenTile + i * (kLoaders / kPieces) + threadIdx.x / kPieces);
            slots[i] = -1;
            if (token >= context) continue;
            const std::int32_t number = page_shift >= 0 ? token >> page_shift : token / page_size;
            slots[i] = table[number] * page_size + (token - number * page_size);
        }
    }

    __device__ void load(const AttentionStep& step, std::int32_t kv_head, int tile,
                         std::uint32_t ring) {
        if (threadIdx.x >= kLoaders) return;
        load_tokens<kDim, kLoaders, false>(step, kv_head,
                                           ring + tile % kTileStages * kTileBytes<kDim>,
                                           threadIdx.x, [&](int i, int) { return slots[i]; });
        find(tile + 1);
    }
};

// A warp copies its entries' queries, swizzled; zeros for none.
template <int kDim>
__device__ void copy_queries(const AttentionStep& step, const Entries& entries, int first_entry,
                             std::uint32_t target) {
    constexpr int kPieces = kDim / 8;
    constexpr int kRowsAtOnce = 32 / kPieces;
    const int lane = threadIdx.x % 32;
    const int piece = lane % kPieces;
    const std::int64_t group_elements = entries.group * step.head_dim;
    // Of the lane's entry: its row of the sequence, and its head among the group's.
    std::int32_t row = (first_entry + lane / kPieces) / entries.group;
    std::int32_t head = (first_entry + lane / kPieces) % entries.group;
    const auto* first = static_cast<const std::uint16_t*>(step.query) +
                        entries.first_row * step.query_stride + entries.kv_head * group_elements +
                        piece * 8;
#pragma unroll 4
    for (int i = lane / kPieces; i < kWarpRows; i += kRowsAtOnce) {
        const bool is_there = row < entries.num_rows;
        const std::int64_t place = is_there ? row * step.query_stride + head * step.head_dim : 0;
        copy_async(target + swizzled<kPieces>(i, piece) * 16, first + place, is_there);
        for (head += kRowsAtOnce; head >= entries.group; head -= entries.group) ++row;
    }
}

// A block has kWarps * kWarpRows entries of a tile and a KV head; its warps share the tokens and
// nothing else.
template <typename Tensor, int kDim, int kWarps>
__global__ __launch_bounds__(kWarps * 32, 1) void tile_kernel(AttentionStep step,
                                                              AttentionWork work,
                                                              float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    // The last tiles of a sequence see most: they go first, of all heads.
    const std::int32_t place = work.counts->num_tiles - 1 - static_cast<std::int32_t>(blockIdx.y);
    if (place < 0) return;
    const TileItem item = work.tiles[place];
    const Entries entries(step, item.sequence, static_cast<std::int32_t>(blockIdx.x));
    const int block_first = item.first_entry + static_cast<int>(blockIdx.z) * kWarps * kWarpRows;
    if (block_first >= entries.size()) return;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_entry = block_first + warp * kWarpRows;
    const auto sees = [&](int entry) {
        return tokens_seen(entry, entries.num_rows, entries.context, entries.group);
    };
    const int block_sees = sees(min(block_first + kWarps * kWarpRows, entries.size()) - 1);
    const int warp_sees =
        first_entry < entries.size() ? sees(min(first_entry + kWarpRows, entries.size()) - 1) : 0;
    const std::uint32_t ring = shared_address(memory);
    unsigned char* own = memory + kTileStages * kTileBytes<kDim> + warp * kWarpBytes<kDim>;
    const std::uint32_t queries = shared_address(own);
    TileLoader<kDim, kWarps> loader(step, item.sequence, entries.context);
    copy_queries<kDim>(step, entries, first_entry, queries);
    loader.load(step, entries.kv_head, 0, ring);
    commit_copies();
    int seen[kWarpTiles][2];
    WarpSums<kDim> chunk[kWarpTiles];
    TileTotals<kDim> totals[kWarpTiles];
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
        const int row = first_entry + tile * kWarpEntries + lane / 4;
        seen[tile][0] = sees(row);
        seen[tile][1] = sees(row + 8);
        chunk[tile].reset();
        totals[tile].reset(reinterpret_cast<float4*>(own + kWarpRows * kDim * 2) +
                           tile * kDim / 8 * 32);
    }
    constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kTokenTile;
    const int num_tiles = (block_sees + kTokenTile - 1) / kTokenTile;
    for (int token_tile = 0; token_tile < num_tiles; ++token_tile) {
        wait_copies<0>();
        __syncthreads();
        if (token_tile + 1 < num_tiles) loader.load(step, entries.kv_head, token_tile + 1, ring);
        commit_copies();
        if (token_tile * kTokenTile >= warp_sees) continue;
        const std::uint32_t keys = ring + token_tile % kTileStages * kTileBytes<kDim>;
        attend_tokens<Tensor, kDim, kWarpTiles>(
            [&](std::uint32_t (&out)[4], int tile, int k) {
                load_queries<kDim>(out, queries + tile * kWarpEntries * kDim * 2, k);
            },
            keys, keys + kTileBytes<kDim> / 2, seen, scale_log2, chunk);
        const bool ends_chunk = token_tile % kChunkTiles == kChunkTiles - 1;
        const bool is_last = (token_tile + 1) * kTokenTile >= warp_sees;
#pragma unroll
        for (int tile = 0; tile < kWarpTiles; ++tile) {
            seen[tile][0] -= kTokenTile;
            seen[tile][1] -= kTokenTile;
            if (!ends_chunk && !is_last) continue;
            chunk[tile].sum_columns();
            totals[tile].fold_in(chunk[tile], scale_log2);
            chunk[tile].reset();
        }
    }
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int entry = first_entry + tile * kWarpEntries + lane / 4 + 8 * half;
            if (entry >= entries.size()) continue;
            totals[tile].template write<Tensor>(half, entries.output(step, entry));
        }
    }
}

}  // namespace weightsync::cuda
