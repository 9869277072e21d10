// SwiGLU's product, element by element: silu(gate) * up.
#pragma once

#include <cstdint>

#include "weightsync/attention.hpp"
#include "weightsync/attention_math.hpp"

namespace weightsync {

// x * sigmoid(x). An element's bits depend on itself alone, which library functions do not promise:
// they compute the end of a range, wherever it lies, by another path than its middle.
WEIGHTSYNC_HD_INLINE float silu(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    const float decay = exp_nonpositive(-magnitude);
    const float numerator = x < 0.0f ? x * decay : x;
    return numerator / (1.0f + decay);
}

// gate_up [num_rows, 2 * width], rows `row_stride` elements apart -> output [num_rows, width],
// contiguous. silu is rounded to the dtype before the product, as torch does.
struct GatedRows {
    FloatType dtype;
    std::int64_t num_rows;
    std::int64_t width;
    std::int64_t row_stride;
    const void* gate_up;
    void* output;
};

void gate_rows(const GatedRows& rows, int num_threads);

}  // namespace weightsync
