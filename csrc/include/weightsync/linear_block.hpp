// The inner part of the CPU's products, for the instruction set at hand.
#pragma once

#include <cstdint>
#include <vector>

#include "weightsync/linear.hpp"

namespace weightsync {

// Rows that share one conversion of the weights. Their number changes no bit of a row.
inline constexpr std::int64_t kLinearPanelRows = 64;

// Columns [column_begin, column_end) of the panel's rows.
struct LinearBlock {
    const float* states;  // [num_rows, padded_inputs] of the panel, zero beyond num_inputs
    std::int64_t padded_inputs;
    std::int64_t row_begin;
    std::int64_t num_rows;
    std::int64_t column_begin;
    std::int64_t column_end;
};

// `weights` is memory of one thread, kept between blocks.
using MultiplyBlock = void (*)(const LinearProduct&, const LinearBlock&,
                               std::vector<float>& weights);

// Rows [row_begin, row_begin + num_rows) of the states as fp32.
using WidenRows = void (*)(const LinearProduct&, std::int64_t row_begin, std::int64_t num_rows,
                           std::int64_t padded_inputs, float* target);

struct LinearKernel {
    WidenRows widen_rows;
    MultiplyBlock multiply_block;
};

// Bits are the same whichever kernel is picked.
LinearKernel linear_kernel(FloatType dtype);

}  // namespace weightsync
