// A mixture of experts on a CUDA device, but for its products: which experts a row goes to, where
// rows lie sorted by expert, and the sum of what the experts give. All enqueue on `stream` and wait
// for nothing; addresses are the device's; bfloat16. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "weightsync/grouped_product.hpp"

namespace weightsync {

inline constexpr std::int64_t kMaxPicks = 32;  // of a row

// Each row's `num_picks` largest logits, of equal ones the first, in ascending order of expert;
// weights are the softmax over all logits in fp32, divided by the picks' sum if normalised.
struct RoutedRows {
    std::int64_t num_rows;
    std::int64_t num_experts;
    std::int64_t num_picks;
    bool is_normalised;
    const void* logits;     // [num_rows, num_experts], contiguous
    std::int32_t* experts;  // [num_rows, num_picks]
    void* weights;          // [num_rows, num_picks]
};
void cuda_route_rows(const RoutedRows& rows, std::uintptr_t stream, int device);

// Picks of experts [first_expert, first_expert + num_here) sorted by expert, those of an expert by
// row. A row has no expert twice.
struct SortedPicks {
    std::int64_t num_rows;
    std::int64_t num_picks;  // of a row
    std::int64_t first_expert;
    std::int64_t num_here;
    const std::int32_t* experts;  // [num_rows, num_picks]
    std::int32_t* offsets;        // [num_here]: where each expert's picks end
    std::int32_t* rows;           // [num_rows * num_picks]: whose each sorted pick is
    std::int32_t* places;         // [num_rows, num_picks]: where it is sorted; -1: not here
};
void cuda_sort_picks(const SortedPicks& picks, std::uintptr_t stream, int device);

// output[r] = sum over r's picks, in order, of weight * states[place]; rounded after each product
// and each sum. A pick that is not here is zero.
struct CombinedRows {
    std::int64_t num_rows;
    std::int64_t num_picks;
    std::int64_t width;  // a multiple of 8
    const void* states;  // [picks, width]
    const void* weights;
    const std::int32_t* places;
    void* output;  // [num_rows, width]
};
void cuda_combine_rows(const CombinedRows& rows, std::uintptr_t stream, int device);

}  // namespace weightsync
