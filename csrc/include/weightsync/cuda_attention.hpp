// Paged attention on a CUDA device: what a launch needs, and how its work is cut.
//
// Sequences with few rows (a decode has one) are *split*: each chunk of kAttentionChunk tokens and
// each KV head is work of its own, whose results are merged in index order. All others go by
// *tiles* of rows, each of which passes over the chunks in order and merges as it goes. A row's
// bits are the same either way: both run the same code over the same tokens in the same order.
#pragma once

#include <cstdint>
#include <string>

#include "weightsync/attention.hpp"
#include "weightsync/attention_math.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

// Query rows of a group's heads count together, row by row: entry e is head e % group of row
// e / group. A warp has this many entries.
inline constexpr int kWarpEntries = 16;
// Entries of a tile of rows; a thread block has all of them, or a part.
inline constexpr int kTileEntries = 256;
// Tokens that are loaded, and whose scores are exponentiated, at a time.
inline constexpr int kTokenTile = 32;
static_assert(kAttentionChunk % kTokenTile == 0);

// Tokens [begin, begin + count) of a sequence that is split into num_chunks of them.
struct alignas(16) SplitItem {
    std::int32_t sequence;
    std::int32_t begin;
    std::int32_t count;
    std::int32_t num_chunks;
};

// Entries from first_entry on, at most kTileEntries.
struct alignas(8) TileItem {
    std::int32_t sequence;
    std::int32_t first_entry;
};

struct AttentionCounts {
    std::int32_t num_split;
    std::int32_t num_tiles;
};

WEIGHTSYNC_HD_INLINE std::int32_t chunks_of(std::int32_t context) {
    return static_cast<std::int32_t>((context + kAttentionChunk - 1) / kAttentionChunk);
}

// How many items of each kind a sequence of `rows` rows is.
WEIGHTSYNC_HD_INLINE AttentionCounts items_of(std::int32_t rows, std::int32_t context,
                                              std::int32_t group) {
    const std::int32_t entries = rows * group;
    if (entries <= kWarpEntries) return {chunks_of(context), 0};
    return {0, (entries + kTileEntries - 1) / kTileEntries};
}

WEIGHTSYNC_HD_INLINE SplitItem split_item(std::int32_t sequence, std::int32_t context,
                                          std::int32_t chunk) {
    const auto begin = static_cast<std::int32_t>(chunk * kAttentionChunk);
    const std::int32_t left = context - begin;
    const auto most = static_cast<std::int32_t>(kAttentionChunk);
    return {sequence, begin, left < most ? left : most, chunks_of(context)};
}

// Tokens that an entry sees, itself included; 0 beyond the sequence's last row.
WEIGHTSYNC_HD_INLINE std::int32_t tokens_seen(std::int32_t entry, std::int32_t rows,
                                              std::int32_t context, std::int32_t group) {
    const std::int32_t row = entry / group;
    return row < rows ? context - rows + row + 1 : 0;
}

// Where 16 bytes of a token lie in a tile in shared memory, in units of 16 bytes: exclusive-or
// keeps eight tokens' same piece in eight different groups of banks. `pieces` a token is a power of
// two.
template <int kPieces>
WEIGHTSYNC_HD_INLINE int swizzled(int token, int piece) {
    constexpr int tokens_a_line = kPieces >= 8 ? 1 : 8 / kPieces;
    constexpr int mask = (kPieces >= 8 ? 8 : kPieces) - 1;
    return token * kPieces + (piece ^ ((token / tokens_a_line) & mask));
}

// Lists of a step's work, made on the device once a step, and room for what split items find. The
// room is the caller's business; items beyond it are left out, so that nothing else is overwritten.
struct AttentionWork {
    SplitItem* split;  // [max_split]
    TileItem* tiles;   // [max_tiles]
    AttentionCounts* counts;
    std::int32_t* first_split;  // [num_sequences]: place of a split sequence's first item, or -1
    float* partials;            // [max_split, num_kv_heads, partial_entries, head_dim + 2]
    std::int64_t max_split;
    std::int64_t max_tiles;
    std::int64_t partial_entries;  // the most entries of a split sequence
    // How split items are launched; 0: as suits the device. Neither changes a bit.
    int num_stages;  // 2 to 4
    int num_warps;   // of a block, up to 4; of a block of tiles 2, 4 or 8
};

// Why the tensor cores' kernels cannot do it, or empty. What they cannot, attend_general does.
std::string no_tensor_cores_reason(FloatType dtype, std::int64_t num_heads,
                                   std::int64_t num_kv_heads, std::int64_t head_dim);

// All enqueue on `stream` and wait for nothing; addresses are the device's, and nothing is checked
// against the tensors. K and V of the step's rows are in the cache already.
void cuda_plan_attention(const AttentionStep& step, const AttentionWork& work,
                         std::uintptr_t stream, int device);
// `work` is as cuda_plan_attention left it; max_tiles 0 says that every sequence is split.
void cuda_attend(const AttentionStep& step, const AttentionWork& work, std::uintptr_t stream,
                 int device);
// Any dtype, head_dim and group, with the bits of the CPU's kernel. Slow.
void cuda_attend_general(const AttentionStep& step, std::uintptr_t stream, int device);

// The lists as the CPU makes them, for tests: host addresses.
void plan_attention(const AttentionStep& step, const AttentionWork& work);

}  // namespace weightsync
