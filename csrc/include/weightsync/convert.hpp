// Element conversions that may happen while bytes are copied or digested.
#pragma once

#include <cstdint>

#include "weightsync/hd.hpp"

namespace weightsync {

enum class Convert : std::int64_t { none = 0, fp32_to_bf16 = 1 };

// One fp32, given as bits, to bf16 bits: nearest, ties to even. Overflow rounds to infinity and
// subnormals are kept. Every NaN becomes 0x7FC0, which is torch's scalar cast; torch's vector code
// answers 0xFFFF or 0x7FFF by machine, and weights must not depend on the machine.
WEIGHTSYNC_HD inline std::uint16_t fp32_bits_to_bf16(std::uint32_t bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
    return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

WEIGHTSYNC_HD inline std::int64_t converted_bytes(std::int64_t source_bytes, Convert convert) {
    return convert == Convert::fp32_to_bf16 ? source_bytes / 2 : source_bytes;
}

}  // namespace weightsync
