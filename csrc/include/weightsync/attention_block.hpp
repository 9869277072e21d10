// The inner part of the CPU's attention, for the instruction set at hand.
#pragma once

#include <cstdint>
#include <vector>

#include "weightsync/attention.hpp"

namespace weightsync {

// Query rows that share one pass over K and V. Their number changes no bit of a row.
inline constexpr std::int64_t kAttentionRowBlock = 16;

// Rows [row_begin, row_end) of one sequence, for one KV head; row numbers count within the step.
struct AttentionBlock {
    std::int64_t sequence;
    std::int64_t kv_head;
    std::int64_t row_begin;
    std::int64_t row_end;
};

// Memory of one thread, kept between blocks.
struct AttentionScratch {
    explicit AttentionScratch(const AttentionStep& step);

    std::int64_t padded_dim;     // head_dim, up to a multiple of kAttentionLanes
    std::vector<float> keys;     // [kAttentionChunk, padded_dim]
    std::vector<float> values;   // same
    std::vector<float> queries;  // [kAttentionRowBlock * group, padded_dim]
    std::vector<float> sums;     // same: weighted sums of V so far
    std::vector<float> states;   // [kAttentionRowBlock * group, 2]: maximum and sum
};

// Bits are the same whichever kernel is picked.
using AttendBlock = void (*)(const AttentionStep&, const AttentionBlock&, AttentionScratch&);

AttendBlock attend_block_kernel(FloatType dtype);

}  // namespace weightsync
