// Products of a few rows of states with a large weight, on a CUDA device: what a decode step of few
// requests is made of. Reading the weight is all that takes time.
//
// Every element is summed in fp32 by the tensor cores, sixteen of `inner` at a time from its
// beginning: the order of libraries that do not split the sum.
#pragma once

#include <cstdint>

#include "weightsync/hd.hpp"

namespace weightsync {

// With more, libraries' products are as fast.
inline constexpr std::int64_t kMostFewRows = 4;
// Weight rows of a tile, which one warp has; `inner` is a multiple of kFewRowsInner.
inline constexpr std::int64_t kFewRowsTile = 8;
inline constexpr std::int64_t kFewRowsInner = 32;

// bfloat16. output[r, n] = sum over k of states[r, k] * weight[n, k].
struct FewRowsProduct {
    std::int64_t num_rows;     // 1 to kMostFewRows
    std::int64_t weight_rows;  // a multiple of kFewRowsTile, or twice that if gated
    std::int64_t inner;
    std::int64_t row_stride;  // of states, in elements, a multiple of 8
    bool is_gated;            // weight is gate before up; the result is silu(gate) * up
    const void* states;       // at a multiple of 16 bytes, as is the weight
    const void* weight;       // [weight_rows, inner]
    void* output;             // [num_rows, weight_rows, or half of it if gated]
};

// Elements of `inner` that a warp copies at once of each row of its tile; of a gated product's it
// has twice as many rows.
WEIGHTSYNC_HD_INLINE constexpr int few_rows_chunk(bool is_gated) { return is_gated ? 256 : 512; }
// Rows in shared memory are 16 bytes longer than what they hold, so that eight of them lie in
// different banks.
WEIGHTSYNC_HD_INLINE constexpr std::int32_t few_rows_pitch(std::int64_t elements) {
    return static_cast<std::int32_t>(2 * elements + 16);
}
WEIGHTSYNC_HD_INLINE constexpr std::int32_t few_rows_stage_bytes(bool is_gated) {
    return (is_gated ? 2 : 1) * static_cast<std::int32_t>(kFewRowsTile) *
           few_rows_pitch(few_rows_chunk(is_gated));
}

// What a launch is made of: blocks of warps, each warp with a ring of stages of its own.
struct FewRowsShape {
    std::int32_t num_blocks;
    std::int32_t num_warps;
    std::int32_t num_stages;
    std::int32_t shared_bytes;  // 0: this product does not fit
};

// One block a multiprocessor; of the numbers of warps the one that leaves the fewest of them idle
// in the last round of tiles, and as many stages as there is room for.
FewRowsShape few_rows_shape(const FewRowsProduct& product, int num_multiprocessors,
                            std::int64_t most_shared_bytes);

// Whether the product's sizes are such that cuda_few_rows_product takes them on this device.
bool cuda_takes_few_rows(const FewRowsProduct& product, int device);

// Enqueues on `stream` and waits for nothing; addresses are the device's. Begins to read the weight
// while what is enqueued before it still runs: nothing there may write the weight.
void cuda_few_rows_product(const FewRowsProduct& product, std::uintptr_t stream, int device);

}  // namespace weightsync
