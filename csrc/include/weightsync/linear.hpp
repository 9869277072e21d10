// Products of rows with a weight matrix of 16-bit floats.
//
// Each output element is a sum over the inputs in a fixed order: input i goes to lane
// i % kLinearLanes, lanes are added as a tree, the bias last, all in fp32, rounded once. So an
// element's bits depend on its row and column alone, not on how many rows or threads there are. The
// product of two 16-bit floats is exact in fp32, so fused multiply-add changes nothing either.
#pragma once

#include <cstdint>

#include "weightsync/attention.hpp"

namespace weightsync {

inline constexpr int kLinearLanes = 8;

// output = states @ weight.T + bias. Matrices are row-major; strides count elements.
struct LinearProduct {
    FloatType dtype;  // bf16 or fp16, of everything
    std::int64_t num_rows;
    std::int64_t num_inputs;
    std::int64_t num_outputs;
    std::int64_t states_stride;
    const void* states;  // [num_rows, num_inputs]
    const void* weight;  // [num_outputs, num_inputs], contiguous
    const void* bias;    // [num_outputs], or null
    void* output;        // [num_rows, num_outputs], contiguous
};

// Throws std::invalid_argument for sizes or a dtype that cannot be.
void multiply_rows(const LinearProduct& product, int num_threads);

}  // namespace weightsync
