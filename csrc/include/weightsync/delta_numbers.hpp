// How a list of numbers is coded; both sides know it from its length alone.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"

namespace weightsync {

// A rising list of numbers below `size`, as gaps; of those not in it if that is shorter.
struct DeltaNumbers {
    std::uint32_t count;
    int rice;

    WEIGHTSYNC_HD_INLINE DeltaNumbers(std::uint32_t listed, std::uint32_t size)
        : count(is_inverted(listed, size) ? size - listed : listed),
          rice(count == 0 ? 0 : delta_rice_parameter(count, size)) {}
    WEIGHTSYNC_HD_INLINE static bool is_inverted(std::uint32_t listed, std::uint32_t size) {
        return 2 * listed > size;
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t bits(std::uint32_t listed, std::uint32_t size) {
        const DeltaNumbers numbers(listed, size);
        return numbers.count == 0 ? 0 : delta_rice_bits(numbers.count, size, numbers.rice);
    }
};

}  // namespace weightsync
