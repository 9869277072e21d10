// Bit streams, least significant bit first. Little-endian hosts and devices only.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "weightsync/hd.hpp"

namespace weightsync {

// Thrown for a record that cannot be what an encoder wrote, or that does not fit its base.
struct DeltaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

WEIGHTSYNC_HD_INLINE std::uint64_t delta_load64(const unsigned char* ptr) {
    std::uint64_t word;
    std::memcpy(&word, ptr, sizeof(word));
    return word;
}

// Writes up to eight bytes past its last bit.
class DeltaBitWriter {
  public:
    WEIGHTSYNC_HD_INLINE explicit DeltaBitWriter(unsigned char* ptr) : start_(ptr), ptr_(ptr) {}

    // `value` < 2^count, count <= 56.
    WEIGHTSYNC_HD_INLINE void put(std::uint64_t value, int count) {
        word_ |= value << fill_;
        fill_ += count;
        std::memcpy(ptr_, &word_, sizeof(word_));
        ptr_ += fill_ >> 3;
        word_ >>= fill_ & ~7;
        fill_ &= 7;
    }
    // `zeros` zeros, then a one.
    WEIGHTSYNC_HD_INLINE void put_unary(std::uint64_t zeros) {
        for (; zeros >= 56; zeros -= 56) put(0, 56);
        put(std::uint64_t{1} << zeros, static_cast<int>(zeros) + 1);
    }
    // Exponential Golomb code; value < 2^33.
    WEIGHTSYNC_HD_INLINE void put_golomb(std::uint64_t value, int order) {
        const std::uint64_t shifted = value + (std::uint64_t{1} << order);
        const int top = 63 - __builtin_clzll(shifted);
        put_unary(static_cast<std::uint64_t>(top - order));
        put(shifted & ((std::uint64_t{1} << top) - 1), top);
    }
    WEIGHTSYNC_HD_INLINE std::int64_t num_bytes() const {
        return ptr_ - start_ + (fill_ > 0 ? 1 : 0);
    }

  private:
    unsigned char* start_;
    unsigned char* ptr_;
    std::uint64_t word_ = 0;
    int fill_ = 0;
};

// Reads a buffer that has 16 readable bytes behind its last one; `num_bits` are its own.
struct DeltaBits {
    const unsigned char* ptr;
    std::uint64_t num_bits;

    WEIGHTSYNC_HD_INLINE void check(std::uint64_t end) const {
        if (end > num_bits) throw DeltaError("its codes run past its end");
    }
    // At least 57 bits from `bit` <= num_bits on.
    WEIGHTSYNC_HD_INLINE std::uint64_t peek(std::uint64_t bit) const {
        return delta_load64(ptr + (bit >> 3)) >> (bit & 7);
    }
    // Exactly 64.
    WEIGHTSYNC_HD_INLINE std::uint64_t peek64(std::uint64_t bit) const {
        const int shift = static_cast<int>(bit & 7);
        const std::uint64_t low = delta_load64(ptr + (bit >> 3)) >> shift;
        return shift == 0 ? low : low | delta_load64(ptr + (bit >> 3) + 8) << (64 - shift);
    }
    WEIGHTSYNC_HD_INLINE std::uint64_t take(std::uint64_t* bit, int count) const {
        check(*bit + static_cast<std::uint64_t>(count));
        const std::uint64_t value = peek(*bit) & ((std::uint64_t{1} << count) - 1);
        *bit += static_cast<std::uint64_t>(count);
        return value;
    }
    WEIGHTSYNC_HD_INLINE std::uint64_t take_golomb(std::uint64_t* bit, int order) const {
        check(*bit);
        const std::uint64_t word = peek(*bit) | (std::uint64_t{1} << 40);
        const int zeros = __builtin_ctzll(word);
        if (zeros > 34) throw DeltaError("a count or a step is too large");
        const int top = zeros + order;
        if (top > 40) throw DeltaError("a count or a step is too large");
        *bit += static_cast<std::uint64_t>(zeros) + 1;
        return (take(bit, top) | (std::uint64_t{1} << top)) - (std::uint64_t{1} << order);
    }
};

}  // namespace weightsync
