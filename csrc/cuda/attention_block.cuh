// Where entries lie, what items leave, and an item that all warps of a block share.
#pragma once

#include <cuda_runtime.h>

#include "attention_warp.cuh"

namespace weightsync::cuda {

inline constexpr int kThreads = 128;

inline __device__ int dynamic_shared_bytes() {
    int num_bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(num_bytes));
    return num_bytes;
}

// An entry's place in the query or output, in elements from its start.
struct Entries {
    std::int32_t first_row;
    std::int32_t num_rows;
    std::int32_t context;
    std::int32_t group;
    std::int32_t kv_head;

    __device__ Entries(const AttentionStep& step, std::int32_t sequence, std::int32_t head)
        : first_row(step.query_starts[sequence]),
          num_rows(step.query_starts[sequence + 1] - first_row),
          context(step.context_lens[sequence]),
          group(static_cast<std::int32_t>(step.num_heads / step.num_kv_heads)),
          kv_head(head) {}

    __device__ std::int32_t size() const { return num_rows * group; }
    __device__ std::int64_t place(std::int32_t entry, std::int64_t row_stride,
                                  std::int64_t head_dim) const {
        const std::int32_t head = kv_head * group + entry % group;
        return (first_row + entry / group) * row_stride + head * head_dim;
    }
    __device__ const std::uint16_t* query(const AttentionStep& step, std::int32_t entry) const {
        if (entry >= size()) return nullptr;
        return static_cast<const std::uint16_t*>(step.query) +
               place(entry, step.query_stride, step.head_dim);
    }
    __device__ std::uint16_t* output(const AttentionStep& step, std::int32_t entry) const {
        return static_cast<std::uint16_t*>(step.output) +
               place(entry, step.num_heads * step.head_dim, step.head_dim);
    }
};

// Writes what a lane has of one of its entries, divided by the sum.
template <typename Tensor, int kDim>
__device__ void write_entry(const WarpSums<kDim>& sums, int half, std::uint16_t* out) {
    const float share = __frcp_rn(sums.sum[half]);
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < kDim / 8; ++block) {
        // Adding to zero is what merging with nothing does: it makes -0 a 0.
        const float low = __fadd_rn(0.0f, sums.values[block][2 * half]);
        const float high = __fadd_rn(0.0f, sums.values[block][2 * half + 1]);
        *reinterpret_cast<std::uint32_t*>(out + block * 8 + column) =
            Tensor::pack(__fmul_rn(low, share), __fmul_rn(high, share));
    }
}

// What an item has found, elements from first_column on: the output itself where the item is all of
// its sequence.
template <typename Tensor, int kDim, int kColumns>
__device__ void write_item(const AttentionStep& step, const AttentionWork& work, std::int64_t index,
                           const SplitItem& item, const Entries& entries,
                           const WarpSums<kColumns>& sums, int first_column) {
    const int lane = threadIdx.x % 32;
    float* partials = work.partials + index * work.partial_entries * (kDim + 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int entry = lane / 4 + 8 * half;
        if (entry >= entries.size()) continue;
        if (item.num_chunks == 1) {
            write_entry<Tensor>(sums, half, entries.output(step, entry) + first_column);
            continue;
        }
        float* out = partials + entry * (kDim + 2);
        if (lane % 4 == 0 && first_column == 0) {
            *reinterpret_cast<float2*>(out) = {sums.max[half], sums.sum[half]};
        }
        out += 2 + first_column + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kColumns / 8; ++block) {
            *reinterpret_cast<float2*>(out + block * 8) = {sums.values[block][2 * half],
                                                           sums.values[block][2 * half + 1]};
        }
    }
}

// One item by all warps of a block, for when there are few: a quarter of its scores each, then all
// of the weights and a part of the values' elements. The order of every sum is attend_items'.
template <typename Tensor, int kDim>
struct BlockItem {
    static constexpr int kTiles = static_cast<int>(kAttentionChunk) / kTokenTile;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kPieces = kDim / 8;
    static constexpr int kColumns = kDim / kWarps < 16 ? 16 : kDim / kWarps;
    static constexpr int kScoreBytes = kTokenTile / 8 * 32 * 16;  // of a tile
    static constexpr int num_bytes = kTiles * (kTileBytes<kDim> + kScoreBytes + kTokenTile * 4);

    const AttentionStep& step;
    const AttentionWork& work;
    unsigned char* memory;
    std::int64_t index;
    SplitItem item;
    Entries entries;
    int num_tiles;

    __device__ BlockItem(const AttentionStep& of, const AttentionWork& by, unsigned char* shared,
                         std::int64_t number)
        : step(of),
          work(by),
          memory(shared),
          index(number),
          item(by.split[number / of.num_kv_heads]),
          entries(of, item.sequence, static_cast<std::int32_t>(number % of.num_kv_heads)),
          num_tiles((item.count + kTokenTile - 1) / kTokenTile) {}

    __device__ std::int32_t* slots() const {
        return reinterpret_cast<std::int32_t*>(memory + kTiles * (kTileBytes<kDim> + kScoreBytes));
    }
    __device__ float4* scores(int tile) const {
        return reinterpret_cast<float4*>(memory + kTiles * kTileBytes<kDim> + tile * kScoreBytes) +
               threadIdx.x % 32;
    }
    __device__ std::uint32_t tokens(int tile) const {
        return shared_address(memory) + tile * kTileBytes<kDim>;
    }

    __device__ void find_slots() const {
        const auto page_size = static_cast<std::int32_t>(step.page_size);
        const std::int32_t* table = step.block_tables + item.sequence * step.table_width;
        for (int i = threadIdx.x; i < num_tiles * kTokenTile; i += kThreads) {
            const std::int32_t place = item.begin + i;
            const std::int32_t number = place / page_size;
            slots()[i] = i < item.count ? table[number] * page_size + place % page_size : -1;
        }
    }

    // Keys or values of all tokens, as one group of copies.
    __device__ void copy_tokens(const void* cache, int offset_bytes) const {
        const int piece = threadIdx.x % kPieces;
        const auto* source =
            static_cast<const std::uint16_t*>(cache) + entries.kv_head * kDim + piece * 8;
#pragma unroll 8
        for (int i = threadIdx.x / kPieces; i < num_tiles * kTokenTile; i += kThreads / kPieces) {
            const std::int32_t slot = slots()[i];
            const std::int64_t place = slot < 0 ? 0 : slot * step.num_kv_heads * kDim;
            const int token = i % kTokenTile;
            copy_async(tokens(i / kTokenTile) + offset_bytes + swizzled<kPieces>(token, piece) * 16,
                       source + place, slot >= 0);
        }
        commit_copies();
    }

    __device__ void score(int tile, const WarpQueries<kDim>& queries) const {
        float found[1][kTokenTile / 8][4] = {};
        score_tokens<Tensor, kDim, 1>(
            [&](std::uint32_t (&out)[4], int, int k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[i] = queries.pieces[k][i];
            },
            tokens(tile), found);
        const int lane = threadIdx.x % 32;
        int seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            seen[half] =
                tokens_seen(lane / 4 + 8 * half, entries.num_rows, entries.context, entries.group) -
                item.begin - tile * kTokenTile;
        }
        mask_scores(seen, found[0]);
#pragma unroll
        for (int block = 0; block < kTokenTile / 8; ++block) {
            const float (&of)[4] = found[0][block];
            scores(tile)[block * 32] = {of[0], of[1], of[2], of[3]};
        }
    }

    __device__ void attend(float scale_log2) const {
        const int warp = threadIdx.x / 32;
        find_slots();
        __syncthreads();
        copy_tokens(step.cache_keys, 0);
        copy_tokens(step.cache_values, kTileBytes<kDim> / 2);
        WarpQueries<kDim> queries;
        queries.load([&](int entry) { return entries.query(step, entry); });
        wait_copies<1>();
        __syncthreads();
        for (int tile = warp; tile < num_tiles; tile += kWarps) score(tile, queries);
        wait_copies<0>();
        __syncthreads();
        if (warp * kColumns >= kDim) return;
        WarpSums<kColumns> sums[1];
        sums[0].reset();
#pragma unroll 2
        for (int tile = 0; tile < num_tiles; ++tile) {
            float weights[1][kTokenTile / 8][4];
#pragma unroll
            for (int block = 0; block < kTokenTile / 8; ++block) {
                const float4 of = scores(tile)[block * 32];
                weights[0][block][0] = of.x;
                weights[0][block][1] = of.y;
                weights[0][block][2] = of.z;
                weights[0][block][3] = of.w;
            }
            weigh_scores<kColumns>(weights[0], scale_log2, sums[0]);
            add_values<Tensor, kDim, 1, kColumns>(weights, tokens(tile) + kTileBytes<kDim> / 2,
                                                  warp * kColumns / 8, sums);
        }
        sums[0].sum_columns();
        write_item<Tensor, kDim, kColumns>(step, work, index, item, entries, sums[0],
                                           warp * kColumns);
    }
};

}  // namespace weightsync::cuda
