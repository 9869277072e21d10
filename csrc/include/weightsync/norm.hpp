// RMSNorm of rows (arXiv 1910.07467).
#pragma once

#include <cstdint>

#include "weightsync/attention.hpp"

namespace weightsync {

// input [num_rows, num_groups, width], rows `row_stride` and groups `group_stride` elements apart
// -> output of the same shape, contiguous. Squares are added in fp32 in an order that depends on
// the width alone; the normed value is rounded to the dtype before it is scaled, as transformers
// does.
struct NormedRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t num_groups;
    std::int64_t width;
    std::int64_t row_stride;
    std::int64_t group_stride;
    float eps;
    const void* input;
    const void* weight;  // [width]
    void* output;
};

void norm_rows(const NormedRows& rows, int num_threads);

}  // namespace weightsync
