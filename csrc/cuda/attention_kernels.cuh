// The kernels of attention on tensor cores.
#pragma once

#include <cuda_runtime.h>

#include "attention_warp.cuh"

namespace weightsync::cuda {

inline constexpr int kThreads = 128;
static_assert(kTileWarps * 32 == kThreads);

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
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < kDim / 8; ++block) {
        // Adding to zero is what merging with nothing does: it makes -0 a 0.
        const float low = __fadd_rn(0.0f, sums.values[block][2 * half]);
        const float high = __fadd_rn(0.0f, sums.values[block][2 * half + 1]);
        *reinterpret_cast<std::uint32_t*>(out + block * 8 + column) =
            Tensor::pack(__fdiv_rn(low, sums.sum[half]), __fdiv_rn(high, sums.sum[half]));
    }
}

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
            load_tokens<kDim, 32>(step, kv_head, stage, threadIdx.x % 32,
                                  [&](int token) { return __shfl_sync(0xFFFFFFFFu, own, token); });
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

// One warp an item (a chunk of a sequence and a KV head); warps share nothing.
template <typename Tensor, int kDim, int kStages>
__global__ __launch_bounds__(kThreads) void split_kernel(AttentionStep step, AttentionWork work,
                                                         float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const std::uint32_t ring = shared_address(memory) + warp * kStages * kTileBytes<kDim>;
    const std::int64_t total = work.counts->num_split * step.num_kv_heads;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
    const std::int64_t first = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x;
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
        int seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            seen[half] =
                tokens_seen(lane / 4 + 8 * half, entries.num_rows, entries.context, entries.group) -
                item.begin;
        }
        WarpSums<kDim> sums;
        sums.reset();
        for (std::int32_t token = 0; token < item.count; token += kTokenTile) {
            wait_copies<kStages - 2>();
            __syncwarp();
            // The stage that was read last is free: every lane is past it.
            loader.load(step, work, ring + (stage + kStages - 1) % kStages * kTileBytes<kDim>);
            const std::uint32_t keys = ring + stage * kTileBytes<kDim>;
            attend_tokens<Tensor, kDim>(queries, keys, keys + kTileBytes<kDim> / 2, seen,
                                        scale_log2, sums);
            seen[0] -= kTokenTile;
            seen[1] -= kTokenTile;
            stage = (stage + 1) % kStages;
        }
        sums.sum_columns();
        float* partials = work.partials + index * work.partial_entries * (kDim + 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int entry = lane / 4 + 8 * half;
            if (entry >= entries.size()) continue;
            if (item.num_chunks == 1) {
                write_entry<Tensor>(sums, half, entries.output(step, entry));
                continue;
            }
            float* out = partials + entry * (kDim + 2);
            if (lane % 4 == 0) {
                *reinterpret_cast<float2*>(out) = {sums.max[half], sums.sum[half]};
            }
#pragma unroll
            for (int block = 0; block < kDim / 8; ++block) {
                *reinterpret_cast<float2*>(out + 2 + block * 8 + lane % 4 * 2) = {
                    sums.values[block][2 * half], sums.values[block][2 * half + 1]};
            }
        }
    }
}

// Merges the chunks of split sequences, in order: a block has a sequence and a KV head, a thread
// two elements of an entry.
template <typename Tensor, int kDim>
__global__ __launch_bounds__(kThreads) void combine_kernel(AttentionStep step, AttentionWork work,
                                                           float scale_log2) {
    const auto sequence = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t first = work.first_split[sequence];
    const std::int32_t num_chunks = chunks_of(step.context_lens[sequence]);
    if (first < 0 || num_chunks == 1) return;
    const Entries entries(step, sequence, static_cast<std::int32_t>(blockIdx.y));
    const std::int64_t item_floats = work.partial_entries * (kDim + 2);
    const float* items = work.partials + (first * step.num_kv_heads + blockIdx.y) * item_floats;
    const std::int64_t chunk_floats = item_floats * step.num_kv_heads;
    for (int i = threadIdx.x; i < entries.size() * (kDim / 2); i += kThreads) {
        const int entry = i / (kDim / 2);
        const int column = i % (kDim / 2) * 2;
        const float* partial = items + entry * (kDim + 2);
        float max = -INFINITY;
        float sum = 0.0f;
        float values[2] = {0.0f, 0.0f};
#pragma unroll 4
        for (std::int32_t chunk = 0; chunk < num_chunks; ++chunk) {
            const float2 state = *reinterpret_cast<const float2*>(partial);
            const float2 found = *reinterpret_cast<const float2*>(partial + 2 + column);
            const Fold fold = fold_of(max, state.x, scale_log2);
            max = fold.max;
            sum = folded(sum, state.y, fold);
            values[0] = folded(values[0], found.x, fold);
            values[1] = folded(values[1], found.y, fold);
            partial += chunk_floats;
        }
        *reinterpret_cast<std::uint32_t*>(entries.output(step, entry) + column) =
            Tensor::pack(__fdiv_rn(values[0], sum), __fdiv_rn(values[1], sum));
    }
}

// A block has a tile of entries and a KV head; its warps share the tokens and nothing else.
template <typename Tensor, int kDim, int kStages>
__global__ __launch_bounds__(kThreads, 2) void tile_kernel(AttentionStep step, AttentionWork work,
                                                           float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    // The last tiles of a sequence see most: they go first.
    const std::int32_t place = work.counts->num_tiles - 1 - static_cast<std::int32_t>(blockIdx.x);
    if (place < 0) return;
    const TileItem item = work.tiles[place];
    const Entries entries(step, item.sequence, static_cast<std::int32_t>(blockIdx.y));
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_entry = item.first_entry + warp * kWarpEntries;
    WarpQueries<kDim> queries;
    queries.load([&](int entry) { return entries.query(step, first_entry + entry); });
    const auto most_seen = [&](int last_entry) {
        return tokens_seen(min(last_entry, entries.size() - 1), entries.num_rows, entries.context,
                           entries.group);
    };
    const int block_sees = most_seen(item.first_entry + kTileEntries - 1);
    const int warp_sees =
        first_entry < entries.size() ? most_seen(first_entry + kWarpEntries - 1) : 0;
    int seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        seen[half] = tokens_seen(first_entry + lane / 4 + 8 * half, entries.num_rows,
                                 entries.context, entries.group);
    }
    const std::uint32_t ring = shared_address(memory);
    const auto page_size = static_cast<std::int32_t>(step.page_size);
    const int page_shift = (page_size & (page_size - 1)) == 0 ? __ffs(page_size) - 1 : -1;
    const std::int32_t* table = step.block_tables + item.sequence * step.table_width;
    const auto load = [&](int tile) {
        if (tile * kTokenTile < block_sees) {
            load_tokens<kDim, kThreads>(
                step, entries.kv_head, ring + tile % kStages * kTileBytes<kDim>, threadIdx.x,
                [&](int i) -> std::int32_t {
                    const std::int32_t token = tile * kTokenTile + i;
                    if (token >= entries.context) return -1;
                    const std::int32_t number =
                        page_shift >= 0 ? token >> page_shift : token / page_size;
                    return table[number] * page_size + (token - number * page_size);
                });
        }
        commit_copies();
    };
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
    WarpSums<kDim> total;
    WarpSums<kDim> chunk;
    total.reset();
    chunk.reset();
    constexpr int kChunkTiles = static_cast<int>(kAttentionChunk) / kTokenTile;
    const int num_tiles = (block_sees + kTokenTile - 1) / kTokenTile;
    for (int tile = 0; tile < num_tiles; ++tile) {
        wait_copies<kStages - 2>();
        __syncthreads();
        load(tile + kStages - 1);
        if (tile * kTokenTile >= warp_sees) continue;
        const std::uint32_t keys = ring + tile % kStages * kTileBytes<kDim>;
        const int still_seen[2] = {seen[0] - tile * kTokenTile, seen[1] - tile * kTokenTile};
        attend_tokens<Tensor, kDim>(queries, keys, keys + kTileBytes<kDim> / 2, still_seen,
                                    scale_log2, chunk);
        if (tile % kChunkTiles == kChunkTiles - 1 || (tile + 1) * kTokenTile >= warp_sees) {
            chunk.sum_columns();
            total.fold_in(chunk, scale_log2);
            chunk.reset();
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int entry = first_entry + lane / 4 + 8 * half;
        if (entry < entries.size()) {
            write_entry<Tensor>(total, half, entries.output(step, entry));
        }
    }
}

}  // namespace weightsync::cuda
