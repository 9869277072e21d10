// Sums over the ranks of an engine whose GPUs read and write each other's memory.
//
// Every rank has a mailbox that all map. A sum's kernel writes this rank's part into everybody's
// mailbox, block by block with a flag behind each, waits for the flags of the others, and adds the
// parts in rank order, in fp32, rounding once. Sums are numbered; parts of two in a row lie apart,
// and a rank that begins a sum knows that everybody has ended the one before the last.
#pragma once

#include <cstdint>

#include "weightsync/half.hpp"
#include "weightsync/norm.hpp"

namespace weightsync {

inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxPeerBlocks = 64;
// What a mailbox begins with: flags [kMaxPeerBlocks][kMaxPeers], then the three words below.
inline constexpr std::int64_t kMailboxHeadBytes = 4096;
inline constexpr std::int64_t kMailboxNumber = 2048;  // of the last sum
inline constexpr std::int64_t kMailboxEnded = 2052;   // blocks that ended in this one
inline constexpr std::int64_t kMailboxFailed = 2056;  // a rank was waited for in vain

struct PeerSum {
    FloatType dtype;
    std::int64_t num_bytes;   // of a part: a multiple of 16, at most slot_bytes
    std::int64_t slot_bytes;  // a multiple of 16
    std::int64_t limit_ns;    // how long a kernel waits for a rank
    int rank;
    int size;
    const void* part;
    void* sum;
    std::uint64_t mailboxes[kMaxPeers];  // as this rank maps them
};

WEIGHTSYNC_HD_INLINE std::int64_t mailbox_bytes(int size, std::int64_t slot_bytes) {
    return kMailboxHeadBytes + 2 * size * slot_bytes;
}

// Where in a mailbox `rank` leaves its part of sum `number`.
WEIGHTSYNC_HD_INLINE std::int64_t mailbox_slot(const PeerSum& sum, std::uint32_t number, int rank) {
    return kMailboxHeadBytes + ((number & 1) * sum.size + rank) * sum.slot_bytes;
}

struct alignas(16) Words4 {
    std::uint32_t w[4];
};

// Begins at -0, which leaves the sign of a zero that is added to it.
struct Sums8 {
    float values[8] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
};

// Adds 16 bytes of a part to what came before it.
template <FloatType Type>
WEIGHTSYNC_HD_INLINE void add_part(Sums8& sums, const Words4& part) {
    for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = part.w[i];
        if (Type == FloatType::fp32) {
            sums.values[i] += float_from_bits(word);
        } else {
            const auto low = static_cast<std::uint16_t>(word);
            const auto high = static_cast<std::uint16_t>(word >> 16);
            const bool is_bf16 = Type == FloatType::bf16;
            sums.values[2 * i] += is_bf16 ? bf16_to_fp32(low) : fp16_to_fp32(low);
            sums.values[2 * i + 1] += is_bf16 ? bf16_to_fp32(high) : fp16_to_fp32(high);
        }
    }
}

template <FloatType Type>
WEIGHTSYNC_HD_INLINE Words4 rounded_sums(const Sums8& sums) {
    Words4 found{};
    for (int i = 0; i < 4; ++i) {
        if (Type == FloatType::fp32) {
            found.w[i] = bits_from_float(sums.values[i]);
        } else {
            const bool is_bf16 = Type == FloatType::bf16;
            const float low = sums.values[2 * i], high = sums.values[2 * i + 1];
            const std::uint32_t bits = is_bf16 ? fp32_to_bf16(low) : fp32_to_fp16(low);
            const std::uint32_t upper = is_bf16 ? fp32_to_bf16(high) : fp32_to_fp16(high);
            found.w[i] = bits | upper << 16;
        }
    }
    return found;
}

// Enqueues a sum; every rank enqueues the same ones in the same order. If a rank does not come
// within `limit_ns`, this sum and all later ones are NaN, on all ranks.
void cuda_peer_sum(const PeerSum& sum, std::uintptr_t stream, int device);

// The CPU's twin: the sum of parts that lie one behind the other.
void add_parts(FloatType dtype, std::int64_t num_bytes, int size, const void* parts, void* sum);

}  // namespace weightsync
