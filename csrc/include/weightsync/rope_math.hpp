// Rotary position embedding of one pair of elements, for CPU and CUDA alike (arXiv 2104.09864).
#pragma once

#include "weightsync/hd.hpp"

namespace weightsync {

template <typename Type>
struct RotatedPair {
    typename Type::Memory first;
    typename Type::Memory second;
};

// Each product is rounded to the dtype, then the sum: transformers' order. Arguments are values of
// the dtype. Compile without fused multiply-add where fp32 must have the same bits everywhere.
template <typename Type>
WEIGHTSYNC_HD_INLINE RotatedPair<Type> rotate_pair(float first, float second, float cos,
                                                   float sin) {
    const float first_cos = Type::load(Type::store(first * cos));
    const float second_sin = Type::load(Type::store(second * sin));
    const float second_cos = Type::load(Type::store(second * cos));
    const float first_sin = Type::load(Type::store(first * sin));
    return {Type::store(first_cos - second_sin), Type::store(second_cos + first_sin)};
}

// RMSNorm's last step: the normed value is rounded to the dtype before it is scaled.
template <typename Type>
WEIGHTSYNC_HD_INLINE typename Type::Memory scale_normed(float value, float scale, float weight) {
    return Type::store(Type::load(Type::store(value * scale)) * weight);
}

}  // namespace weightsync
