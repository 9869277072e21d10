// The CPU's RMSNorm of one group: its scale, in an order of sums that depends on the width alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "weightsync/hd.hpp"

namespace weightsync {

// Sums that are kept beside each other and added in order at the end.
inline constexpr int kNormLanes = 16;

template <typename Type>
WEIGHTSYNC_HD_INLINE float rms_scale(const typename Type::Memory* input, std::int64_t width,
                                     float eps) {
    float lanes[kNormLanes] = {};
    const std::int64_t whole = width / kNormLanes * kNormLanes;
    for (std::int64_t i = 0; i < whole; i += kNormLanes) {
        for (int lane = 0; lane < kNormLanes; ++lane) {
            const float value = Type::load(input[i + lane]);
            lanes[lane] += value * value;
        }
    }
    for (std::int64_t i = whole; i < width; ++i) {
        const float value = Type::load(input[i]);
        lanes[i - whole] += value * value;
    }
    float sum = 0.0f;
    for (int lane = 0; lane < kNormLanes; ++lane) sum += lanes[lane];
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
}

}  // namespace weightsync
