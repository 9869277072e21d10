// Products of many experts' weights with rows that lie sorted by expert, on a CUDA device.
//
// The work is tiles: some rows of an expert times some rows of its weight. How large tiles are
// follows from how many rows an expert has on average, but every element is summed in fp32 by the
// same instructions over `inner` from its beginning, so that its bits depend on the tile in no way.
#pragma once

#include <cstdint>

#include "weightsync/hd.hpp"

namespace weightsync {

inline constexpr std::int64_t kMaxExperts = 512;

// bfloat16. Rows from offsets[e - 1] up to offsets[e] are expert e's; what is behind the last is
// not looked at. Row r is states[state_rows[r]], or states[r] without.
struct GroupedProduct {
    std::int64_t num_rows;  // room of the output; what the offsets count is at most this
    std::int64_t num_experts;
    std::int64_t weight_rows;  // of an expert, a multiple of 8, or of 16 if gated
    std::int64_t inner;        // a multiple of 8
    std::int64_t row_stride;   // of states, in elements, a multiple of 8
    std::int64_t shape;        // at most; 1 to kNumTileShapes, or 0: as suits the number of rows
    bool is_gated;             // weights are gate before up; the result is silu(gate) * up
    const void* states;
    const std::int32_t* state_rows;  // or null
    const void* weights;             // [num_experts, weight_rows, inner]
    const std::int32_t* offsets;     // [num_experts], ascending
    void* output;                    // [num_rows, weight_rows, or half of it if gated]
};

// Rows of a tile: of the expert's, and of its weight.
struct TileShape {
    std::int32_t rows;
    std::int32_t weight_rows;
};
inline constexpr int kNumTileShapes = 5;
inline constexpr TileShape kTileShapes[kNumTileShapes] = {
    {16, 64}, {32, 128}, {64, 128}, {128, 128}, {128, 256}};

// Place of the shape for so many rows in all. Expert's rows spread around their mean: the tile is
// twice of it where reading weights is what takes the time.
WEIGHTSYNC_HD_INLINE int shape_for(std::int64_t num_rows, std::int64_t num_experts) {
    if (num_rows <= 2 * num_experts) return 0;
    if (num_rows <= 26 * num_experts) return 1;
    if (num_rows <= 48 * num_experts) return 2;
    return num_rows <= 96 * num_experts ? 4 : 3;
}

// Tiles side by side over an expert's weight.
WEIGHTSYNC_HD_INLINE std::int32_t columns_of(std::int64_t weight_rows, std::int32_t tile_rows) {
    return static_cast<std::int32_t>((weight_rows + tile_rows - 1) / tile_rows);
}

// Where a tile is: rows [first_row, first_row + num_rows), all of one expert.
struct ExpertTile {
    std::int32_t expert;
    std::int32_t column;
    std::int32_t first_row;
    std::int32_t num_rows;
};

// Tile `index` of all. `first_tiles` [num_experts + 1] counts tiles of rows of the experts before,
// `starts` [num_experts + 1] their rows. Tiles of the same weight follow each other.
WEIGHTSYNC_HD_INLINE ExpertTile expert_tile(const std::int32_t* first_tiles,
                                            const std::int32_t* starts, std::int32_t num_experts,
                                            std::int32_t num_columns, std::int32_t tile_rows,
                                            std::int32_t index) {
    const std::int32_t among = index / num_columns;
    std::int32_t low = 0;
    std::int32_t high = num_experts;  // first_tiles[low] <= among < first_tiles[high]
    while (high - low > 1) {
        const std::int32_t middle = (low + high) / 2;
        if (first_tiles[middle] <= among) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const std::int32_t tiles = first_tiles[low + 1] - first_tiles[low];
    const std::int32_t within = index - first_tiles[low] * num_columns;
    const std::int32_t first_row = starts[low] + within % tiles * tile_rows;
    const std::int32_t left = starts[low + 1] - first_row;
    return {low, within / tiles, first_row, left < tile_rows ? left : tile_rows};
}

// Rows of an expert's weight lie in a tile as they are, or, if gated, sixteen of gate and then the
// sixteen of up that they meet. What lies at `local` is row weight_within(local) of the tile's
// share of gate, or of up. For r below a power of two up to 32 that divides `local`, both can be
// had from local and r alone: local + r is at weight_within(local) + weight_within(r), and of up if
// either is.
WEIGHTSYNC_HD_INLINE std::int32_t weight_within(std::int32_t local, bool is_gated) {
    return is_gated ? local / 32 * 16 + local % 16 : local;
}
WEIGHTSYNC_HD_INLINE bool is_of_up(std::int32_t local, bool is_gated) {
    return is_gated && local / 16 % 2 == 1;
}

// Enqueues on `stream` and waits for nothing; addresses are the device's. At most kMaxExperts.
void cuda_grouped_product(const GroupedProduct& product, std::uintptr_t stream, int device);

}  // namespace weightsync
