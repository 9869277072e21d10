// QK-norm and rotary embedding of a step's heads on the CPU.
#pragma once

#include <cstdint>

#include "weightsync/attention.hpp"

namespace weightsync {

// heads [num_rows, num_heads + 2 * num_kv_heads, head_dim], rows `row_stride` elements apart: the
// query's and the key's are normed where there are weights, and rotated, in place; values stay.
// Norms have the bits of `norm_rows`, rotations those of each product rounded, then the sum.
struct RotatedRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t num_heads;
    std::int64_t num_kv_heads;
    std::int64_t head_dim;
    std::int64_t row_stride;
    std::int64_t num_positions;  // of the tables
    float eps;
    void* heads;
    const void* query_norm;  // [head_dim], or null: no norm
    const void* key_norm;
    const void* cos;  // [num_positions, head_dim / 2]
    const void* sin;
    const std::int64_t* positions;  // [num_rows]
};

// Throws std::invalid_argument naming the row, before anything is written, if a position is beyond
// the tables.
void rotate_rows(const RotatedRows& rows, int num_threads);

}  // namespace weightsync
