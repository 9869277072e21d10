// The inference core's row kernels on a CUDA device: norms, gates, rotated heads, sampling. All
// enqueue on `stream` and wait for nothing; addresses are the device's. A row's bits depend on that
// row alone, and sums are taken in an order that depends on the width alone.
#pragma once

#include <cstdint>

#include "weightsync/gate.hpp"
#include "weightsync/hd.hpp"
#include "weightsync/norm.hpp"

namespace weightsync {

// As on the CPU but for the order of the squares' sum.
void cuda_norm_rows(const NormedRows& rows, std::uintptr_t stream, int device);

// states [num_rows, width] += delta, rounded to the dtype, and output = the norm of the result.
struct AddedRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t width;
    float eps;
    void* states;  // contiguous, as are delta and output
    const void* delta;
    const void* weight;
    void* output;
};
void cuda_add_norm_rows(const AddedRows& rows, std::uintptr_t stream, int device);

// The CPU's bits.
void cuda_gate_rows(const GatedRows& rows, std::uintptr_t stream, int device);

// Heads of [num_rows, num_heads + 2 * num_kv_heads, head_dim], rows `row_stride` elements apart:
// query and key are normed where there are weights, and rotated; the query stays in place, key and
// value go to the cache's slots (slot -1: nowhere).
struct HeadRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t num_heads;
    std::int64_t num_kv_heads;
    std::int64_t head_dim;
    std::int64_t row_stride;
    float eps;
    void* heads;
    const void* query_norm;  // [head_dim], or null: no norms
    const void* key_norm;
    const void* cos;  // [positions, head_dim / 2]
    const void* sin;
    const std::int64_t* positions;
    const std::int64_t* slot_mapping;
    void* cache_keys;  // [slots, num_kv_heads, head_dim]
    void* cache_values;
};
void cuda_place_heads(const HeadRows& rows, std::uintptr_t stream, int device);

// Scores that one warp looks at.
inline constexpr std::int64_t kSampleSlice = 2048;

// Logits [num_rows, vocab_size], rows `row_stride` elements apart. Row r's scores are its logits
// divided by temperatures[r]; `given[r]`, if not negative, is its token, else the largest score
// plus Gumbel noise times noise_scales[r] (0 or 1). `drawn_from`, if not null, are fp32 scores
// [num_rows, vocab_size], contiguous, to draw from instead: those of the row with -infinity where a
// token is ruled out. numbers [num_rows, 4]: the token's log-prob by logits and by scores, the
// largest logit, and the logarithm of the sum of exp(logit - largest).
struct SampledRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t vocab_size;
    std::int64_t row_stride;
    const void* logits;
    const float* drawn_from;
    const std::uint64_t* seeds;
    const std::int64_t* positions;
    const float* noise_scales;
    const float* temperatures;
    const std::int64_t* given;
    std::int64_t* tokens;  // -1 if no score of the row is a number above -infinity
    float* numbers;
    void* scratch;  // sample_scratch_bytes
};
std::int64_t sample_scratch_bytes(std::int64_t num_rows, std::int64_t vocab_size);
void cuda_sample_rows(const SampledRows& rows, std::uintptr_t stream, int device);

// Rows of a decode step: each has a request, whose newest token it computes, or none (steps 0).
struct DecodeRows {
    std::int64_t num_rows;
    std::int64_t table_width;
    std::int64_t page_size;
    std::int64_t* steps;  // 1, or 0 for a row without a request
    std::int64_t* token_ids;
    std::int64_t* positions;
    std::int64_t* next_positions;  // of the token that is drawn
    std::int64_t* slot_mapping;
    std::int32_t* context_lens;
    std::int32_t* block_tables;  // [num_rows, table_width]; -1: no page
    const std::int64_t* tokens;  // that were drawn, by advance_row
};

// Before a step: where a row's K and V go. A row whose position has no page has no request any
// more: it writes nowhere and looks at the first token of the first page.
WEIGHTSYNC_HD_INLINE void place_row(const DecodeRows& rows, std::int64_t row) {
    std::int32_t* table = rows.block_tables + row * rows.table_width;
    const std::int64_t position = rows.positions[row];
    const std::int64_t number = position / rows.page_size;
    const bool may_go_on = rows.steps[row] == 1 && number < rows.table_width;
    const std::int64_t page = may_go_on ? table[number] : -1;
    if (page >= 0) {
        rows.slot_mapping[row] = page * rows.page_size + position % rows.page_size;
        rows.context_lens[row] = static_cast<std::int32_t>(position + 1);
        return;
    }
    rows.steps[row] = rows.positions[row] = 0;
    rows.slot_mapping[row] = -1;
    rows.context_lens[row] = 1;
    table[0] = 0;
}

// After a step: the token that was drawn is the next to compute.
WEIGHTSYNC_HD_INLINE void advance_row(const DecodeRows& rows, std::int64_t row) {
    const std::int64_t token = rows.tokens[row];
    rows.token_ids[row] = token < 0 ? 0 : token;
    rows.positions[row] += rows.steps[row];
    rows.next_positions[row] += rows.steps[row];
}

void cuda_place_rows(const DecodeRows& rows, std::uintptr_t stream, int device);
void cuda_advance_rows(const DecodeRows& rows, std::uintptr_t stream, int device);
// The CPU's twins: host addresses.
void place_rows(const DecodeRows& rows);
void advance_rows(const DecodeRows& rows);

// Reads memory, in multiples of 16 bytes, and does nothing with it: a yardstick of bandwidth.
// `out_ptr` has room for four bytes.
void cuda_read_bytes(std::uint64_t source_ptr, std::uint64_t num_bytes, std::uint64_t out_ptr,
                     std::uintptr_t stream, int device);

}  // namespace weightsync
