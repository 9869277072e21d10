// The kernels of attention on tensor cores.
#pragma once

#include <cuda_runtime.h>

#include "attention_block.cuh"
#include "memory.cuh"

namespace weightsync::cuda {

// Which tokens a warp loads next: through all tiles of all of its items, so that loads of an item
// begin while the one before it is still computed.
template <int kDim>
struct SplitLoader {
    std::int64_t index;
    std::int64_t stride;
    std::int64_t total;
    SplitItem item;
    SplitItem next;
    std::int32_t tile;
    std::int32_t page_size;
    std::int32_t in_page;  // of this lane's token; -1: none
    std::int32_t page;

    __device__ void start(const AttentionStep& step, const AttentionWork& work, std::int64_t first,
                          std::int64_t step_by, std::int64_t end) {
        index = first;
        stride = step_by;
        total = end;
        page_size = static_cast<std::int32_t>(step.page_size);
        if (index < total) next = work.split[index / step.num_kv_heads];
        open(step, work);
    }

    __device__ void open(const AttentionStep& step, const AttentionWork& work) {
        tile = 0;
        if (index >= total) return;
        item = next;
        if (index + stride < total) next = work.split[(index + stride) / step.num_kv_heads];
        find_page(step);
    }

    // Asks for the page of this lane's token; the answer is first used by the next load.
    __device__ void find_page(const AttentionStep& step) {
        const auto token = tile * kTokenTile + static_cast<std::int32_t>(threadIdx.x % 32);
        in_page = -1;
        if (token >= item.count) return;
        const std::int32_t place = item.begin + token;
        const std::int32_t number = place / page_size;
        in_page = place - number * page_size;
        page = step.block_tables[item.sequence * step.table_width + number];
    }

    __device__ void load(const AttentionStep& step, const AttentionWork& work,
                         std::uint32_t stage) {
        if (index < total) {
            const std::int32_t own = in_page < 0 ? -1 : page * page_size + in_page;
            const auto kv_head = static_cast<std::int32_t>(index % step.num_kv_heads);
            load_tokens<kDim, 32, true>(
                step, kv_head, stage, threadIdx.x % 32,
                [&](int, int token) { return __shfl_sync(0xFFFFFFFFu, own, token); });
            ++tile;
            if (tile * kTokenTile < item.count) {
                find_page(step);
            } else {
                index += stride;
                open(step, work);
            }
        }
        commit_copies();
    }
};

// Items first, first + stride, .. by one warp, through a ring of kStages tiles of its own.
template <typename Tensor, int kDim, int kStages>
__device__ void attend_items(const AttentionStep& step, const AttentionWork& work,
                             std::uint32_t ring, std::int64_t first, std::int64_t stride,
                             std::int64_t total, float scale_log2) {
    const int lane = threadIdx.x % 32;
    SplitLoader<kDim> loader;
    loader.start(step, work, first, stride, total);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        loader.load(step, work, ring + stage * kTileBytes<kDim>);
    }
    int stage = 0;
    for (std::int64_t index = first; index < total; index += stride) {
        const SplitItem item = work.split[index / step.num_kv_heads];
        const Entries entries(step, item.sequence,
                              static_cast<std::int32_t>(index % step.num_kv_heads));
        WarpQueries<kDim> queries;
        queries.load([&](int entry) { return entries.query(step, entry); });
        int seen[1][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            seen[0][half] =
                tokens_seen(lane / 4 + 8 * half, entries.num_rows, entries.context, entries.group) -
                item.begin;
        }
        WarpSums<kDim> sums[1];
        sums[0].reset();
        for (std::int32_t token = 0; token < item.count; token += kTokenTile) {
            wait_copies<kStages - 2>();
            __syncwarp();
            // The stage that was read last is free: every lane is past it.
            loader.load(step, work, ring + (stage + kStages - 1) % kStages * kTileBytes<kDim>);
            const std::uint32_t keys = ring + stage * kTileBytes<kDim>;
            attend_tokens<Tensor, kDim, 1>(
                [&](std::uint32_t (&out)[4], int, int k) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) out[i] = queries.pieces[k][i];
                },
                keys, keys + kTileBytes<kDim> / 2, seen, scale_log2, sums);
            seen[0][0] -= kTokenTile;
            seen[0][1] -= kTokenTile;
            stage = (stage + 1) % kStages;
        }
        sums[0].sum_columns();
        write_item<Tensor, kDim, kDim>(step, work, index, item, entries, sums[0], 0);
    }
}

// One warp an item (a chunk of a sequence and a KV head), or a block where there are few.
template <typename Tensor, int kDim, int kStages>
__global__ __launch_bounds__(kThreads) void split_kernel(AttentionStep step, AttentionWork work,
                                                         float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    wait_for_previous();
    const int warp = threadIdx.x / 32;
    const std::uint32_t ring = shared_address(memory);
    const std::int64_t total = work.counts->num_split * step.num_kv_heads;
    if (total <= gridDim.x && blockDim.x == kThreads &&
        dynamic_shared_bytes() >= BlockItem<Tensor, kDim>::num_bytes) {
        let_next_begin();
        if (blockIdx.x < total) {
            BlockItem<Tensor, kDim>(step, work, memory, blockIdx.x).attend(scale_log2);
        }
        return;
    }
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
    const std::int64_t first = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x;
    attend_items<Tensor, kDim, kStages>(step, work, ring + warp * kStages * kTileBytes<kDim>, first,
                                        stride, total, scale_log2);
}

// Entries that a thread block of combine_kernel has.
template <int kDim>
inline constexpr int kCombinedEntries = kThreads / (kDim / 2);

// Merges the chunks of split sequences, in order: a block has a sequence, a KV head and some of its
// entries, a thread two elements of one of them. What is to be merged is asked for well ahead.
template <typename Tensor, int kDim>
__global__ __launch_bounds__(kThreads, 8) void combine_kernel(AttentionStep step,
                                                              AttentionWork work,
                                                              float scale_log2) {
    constexpr int kAhead = 8;
    let_next_begin();
    wait_for_previous();
    const auto sequence = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t first = work.first_split[sequence];
    const std::int32_t num_chunks = chunks_of(step.context_lens[sequence]);
    if (first < 0 || num_chunks == 1) return;
    const Entries entries(step, sequence, static_cast<std::int32_t>(blockIdx.y));
    const auto entry =
        static_cast<std::int32_t>(blockIdx.z * kCombinedEntries<kDim> + threadIdx.x / (kDim / 2));
    if (entry >= entries.size()) return;
    const int column = threadIdx.x % (kDim / 2) * 2;
    const std::int64_t item_floats = work.partial_entries * (kDim + 2);
    const float* partial =
        work.partials + (first * step.num_kv_heads + blockIdx.y) * item_floats + entry * (kDim + 2);
    const std::int64_t chunk_floats = item_floats * step.num_kv_heads;
    float max = -INFINITY;
    float sum = 0.0f;
    float values[2] = {0.0f, 0.0f};
    for (std::int32_t chunk = 0; chunk < num_chunks; chunk += kAhead) {
        float2 states[kAhead];
        float2 found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (chunk + i >= num_chunks) continue;
            const float* from = partial + (chunk + i) * chunk_floats;
            states[i] = *reinterpret_cast<const float2*>(from);
            found[i] = *reinterpret_cast<const float2*>(from + 2 + column);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (chunk + i >= num_chunks) continue;
            const Fold fold = fold_of(max, states[i].x, scale_log2);
            max = fold.max;
            sum = folded(sum, states[i].y, fold);
            values[0] = folded(values[0], found[i].x, fold);
            values[1] = folded(values[1], found[i].y, fold);
        }
    }
    const float share = __frcp_rn(sum);
    *reinterpret_cast<std::uint32_t*>(entries.output(step, entry) + column) =
        Tensor::pack(__fmul_rn(values[0], share), __fmul_rn(values[1], share));
}

}  // namespace weightsync::cuda
