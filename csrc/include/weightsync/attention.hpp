// Causal attention of one layer over a paged KV cache.
#pragma once

#include <cstdint>

namespace weightsync {

enum class FloatType : int { fp32 = 0, bf16 = 1, fp16 = 2 };

// Strides count elements. Heads and head_dim are contiguous in query, key, value and output; K and
// V of the layer are [pages, page_size, kv_heads, head_dim], contiguous.
struct AttentionStep {
    FloatType dtype;
    std::int64_t num_rows;  // padding included
    std::int64_t num_sequences;
    std::int64_t num_heads;
    std::int64_t num_kv_heads;
    std::int64_t head_dim;
    std::int64_t num_pages;
    std::int64_t page_size;
    std::int64_t table_width;  // pages a block table has room for
    float scale;

    const void* query;  // [num_rows, num_heads, head_dim]
    std::int64_t query_stride;
    const void* key;  // [num_rows, num_kv_heads, head_dim]
    std::int64_t key_stride;
    const void* value;
    std::int64_t value_stride;
    void* output;  // [num_rows, num_heads * head_dim], contiguous

    void* cache_keys;
    void* cache_values;

    const std::int64_t* slot_mapping;  // [num_rows], -1: not written
    const std::int32_t* query_starts;  // [num_sequences + 1]
    const std::int32_t* context_lens;  // [num_sequences]
    const std::int32_t* block_tables;  // [num_sequences, table_width]
};

// Writes K and V, attends, and zeroes the padding rows of the output. Throws std::invalid_argument
// naming the sequence or row, before anything is written, if an index is out of range.
void attend_paged(const AttentionStep& step, int num_threads);

}  // namespace weightsync
