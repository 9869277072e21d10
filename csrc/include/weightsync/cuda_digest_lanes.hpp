// One lane's part of a digest unit.
#pragma once

#include <cstdint>

#include "weightsync/cuda_copy_lanes.hpp"
#include "weightsync/cuda_lanes.hpp"
#include "weightsync/cuda_units.hpp"
#include "weightsync/digest.hpp"

namespace weightsync::lanes {

WEIGHTSYNC_HD constexpr std::uint32_t memory_word_bytes(WordKind kind) {
    return kind == WordKind::bytes ? 1 : kind == WordKind::halves ? 2 : 4;
}

// Bytes of one block of words in memory.
WEIGHTSYNC_HD constexpr std::uint32_t block_bytes(WordKind kind) {
    return memory_word_bytes(kind) * static_cast<std::uint32_t>(kDigestBlockWords);
}

template <WordKind kind>
WEIGHTSYNC_HD inline std::uint32_t load_word(const unsigned char* ptr) {
    if constexpr (kind == WordKind::bytes) return *ptr;
    if constexpr (kind == WordKind::halves) return load_bytes<std::uint16_t>(ptr);
    if constexpr (kind == WordKind::words) return load_bytes<std::uint32_t>(ptr);
    return fp32_bits_to_bf16(load_bytes<std::uint32_t>(ptr));
}

// The memory of one block, in registers.
template <WordKind kind>
struct Block {
    static constexpr std::uint32_t num_words32 = block_bytes(kind) / 4;
    std::uint32_t w[num_words32];

    template <bool IsAligned>
    WEIGHTSYNC_HD void read(const unsigned char* ptr) {
        if constexpr (kind == WordKind::bytes) {
            copy(IsAligned ? load<Vec8>(ptr) : load_unaligned<Vec8>(ptr), 0);
        } else {
            WEIGHTSYNC_UNROLL
            for (std::uint32_t i = 0; i < num_words32; i += 4) {
                const unsigned char* part = ptr + 4 * i;
                copy(IsAligned ? load<Vec16>(part) : load_unaligned<Vec16>(part), i);
            }
        }
    }

    // sum of k_j * u_j
    WEIGHTSYNC_HD std::uint64_t inner_sum() const {
        constexpr std::uint32_t k[kDigestBlockWords] = WEIGHTSYNC_DIGEST_K;
        std::uint64_t sum = 0;
        WEIGHTSYNC_UNROLL
        for (int j = 0; j < static_cast<int>(kDigestBlockWords); ++j) {
            sum += std::uint64_t{k[j]} * word(j);
        }
        return sum;
    }

  private:
    template <typename Vec>
    WEIGHTSYNC_HD void copy(const Vec& vector, std::uint32_t first) {
        WEIGHTSYNC_UNROLL
        for (std::uint32_t i = 0; i < sizeof(Vec) / 4; ++i) w[first + i] = vector.w[i];
    }

    WEIGHTSYNC_HD std::uint32_t word(int j) const {
        if constexpr (kind == WordKind::bytes) return w[j / 4] >> (8 * (j % 4)) & 0xFFu;
        if constexpr (kind == WordKind::halves) return w[j / 2] >> (16 * (j % 2)) & 0xFFFFu;
        if constexpr (kind == WordKind::words) return w[j];
        return fp32_bits_to_bf16(w[j]);
    }
};

// Words [begin, end) of a tensor, one by one; `ptr` holds word `begin`. Less than two blocks.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t digest_few(std::uint64_t seed, const unsigned char* ptr,
                                              std::uint64_t begin, std::uint64_t end) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = begin; i < end; ++i) {
        sum += digest_term(seed, i, load_word<kind>(ptr));
        ptr += memory_word_bytes(kind);
    }
    return sum;
}

// Blocks `first`, `first` + 32, ..., `unroll` of them, all loaded before the first is summed.
// Guarded groups may reach past `num_blocks`: there they load the last block again, and leave it
// out.
template <WordKind kind, bool IsAligned, bool IsGuarded, int unroll>
WEIGHTSYNC_HD inline std::uint64_t digest_group(std::uint64_t unmixed, const unsigned char* ptr,
                                                std::uint32_t first, std::uint32_t num_blocks) {
    Block<kind> blocks[unroll];
    WEIGHTSYNC_UNROLL
    for (int u = 0; u < unroll; ++u) {
        std::uint32_t i = first + u * kWarpLanes;
        if (IsGuarded && i >= num_blocks) i = num_blocks - 1;
        blocks[u].template read<IsAligned>(ptr + i * block_bytes(kind));
    }
    std::uint64_t sum = 0;
    WEIGHTSYNC_UNROLL
    for (int u = 0; u < unroll; ++u) {
        const std::uint64_t term = digest_mix(unmixed) * blocks[u].inner_sum();
        sum += IsGuarded && first + u * kWarpLanes >= num_blocks ? 0 : term;
        unmixed += kDigestGolden * kWarpLanes;
    }
    return sum;
}

// At most 2^16 blocks.
template <WordKind kind, bool IsAligned>
WEIGHTSYNC_HD inline std::uint64_t digest_blocks(std::uint64_t seed, const unsigned char* ptr,
                                                 std::uint64_t first_block,
                                                 std::uint32_t num_blocks, std::uint32_t lane) {
    // 128 bytes of loads in flight, or 64 where each takes more registers.
    constexpr int unroll = (IsAligned && kind != WordKind::bytes ? 128 : 64) / block_bytes(kind);
    constexpr std::uint32_t group = kWarpLanes * unroll;
    std::uint64_t unmixed = seed + (first_block + lane) * kDigestGolden;
    std::uint64_t sum = 0;
    std::uint32_t first = 0;
    for (; first + group <= num_blocks; first += group) {
        sum += digest_group<kind, IsAligned, false, unroll>(unmixed, ptr, first + lane, num_blocks);
        unmixed += kDigestGolden * group;
    }
    if (first + lane < num_blocks) {
        sum += digest_group<kind, IsAligned, true, unroll>(unmixed, ptr, first + lane, num_blocks);
    }
    return sum;
}

// One lane's sum over `num_words` contiguous words; the sum over the lanes is the digest.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t digest_piece(std::uint64_t seed, const unsigned char* ptr,
                                                std::uint64_t index, std::uint32_t num_words,
                                                std::uint32_t lane) {
    constexpr auto block_words = static_cast<std::uint32_t>(kDigestBlockWords);
    const auto into_block = static_cast<std::uint32_t>(index % block_words);
    const std::uint32_t to_block = (block_words - into_block) % block_words;
    const std::uint32_t head = to_block < num_words ? to_block : num_words;
    const unsigned char* body = ptr + head * memory_word_bytes(kind);
    std::uint32_t num_blocks = (num_words - head) / block_words;
    const std::uint64_t first_block = (index + head) / block_words;
    std::uint64_t sum = 0;
    if (is_aligned(body, kind == WordKind::bytes ? 8 : 16)) {
        sum = digest_blocks<kind, true>(seed, body, first_block, num_blocks, lane);
    } else {
        // The last block must not read past the piece.
        const std::uint32_t rest = (num_words - head) % block_words;
        if (num_blocks > 0 && rest * memory_word_bytes(kind) < kOverreadBytes) --num_blocks;
        sum = digest_blocks<kind, false>(seed, body, first_block, num_blocks, lane);
    }
    const std::uint32_t done = head + num_blocks * block_words;
    if (lane == 0 && head > 0) sum += digest_few<kind>(seed, ptr, index, index + head);
    if (lane == 1 && done < num_words) {
        sum += digest_few<kind>(seed, ptr + done * memory_word_bytes(kind), index + done,
                                index + num_words);
    }
    return sum;
}

// Runs at least this long are digested block by block, shorter ones word by word.
inline constexpr std::int64_t kMinBlockwiseWords = 64;

template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t digest_grid(const DigestRow& row, const GridUnit& unit,
                                               std::uint32_t lane) {
    const GridStart start = grid_start(row, unit.first_run);
    const auto seed = static_cast<std::uint64_t>(row.seed);
    const auto num_words = static_cast<std::uint32_t>(row.num_words);
    const bool is_blockwise = row.num_words >= kMinBlockwiseWords;
    const std::uint32_t total = is_blockwise ? unit.num_runs : unit.num_runs * num_words;
    std::uint64_t sum = 0;
    for (std::uint32_t i = is_blockwise ? 0 : lane; i < total; i += is_blockwise ? 1 : kWarpLanes) {
        std::int64_t at[3];
        run_index(row, start, is_blockwise ? i : i / num_words, at);
        std::int64_t place = row.ptr;
        std::int64_t index = row.start_index;
        for (int dim = 0; dim < kDigestDims; ++dim) {
            place += at[dim] * row.dims[dim].stride_bytes;
            index += at[dim] * row.dims[dim].index_stride;
        }
        const auto* ptr = reinterpret_cast<const unsigned char*>(place);
        if (is_blockwise) {
            sum +=
                digest_piece<kind>(seed, ptr, static_cast<std::uint64_t>(index), num_words, lane);
        } else {
            const std::uint32_t within = i % num_words;
            sum += digest_term(seed, static_cast<std::uint64_t>(index) + within,
                               load_word<kind>(ptr + within * memory_word_bytes(kind)));
        }
    }
    return sum;
}

// The part of a warp in a digest unit whose shares are of `share_bytes`.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t digest_unit(const DigestUnit& unit, std::uint64_t seed,
                                               const WarpShare& share, std::int64_t share_bytes,
                                               std::uint32_t lane) {
    const auto share_words = static_cast<std::uint32_t>(share_bytes / memory_word_bytes(kind));
    const auto* ptr = reinterpret_cast<const unsigned char*>(unit.ptr) + share.share * share_bytes;
    return digest_piece<kind>(seed, ptr,
                              static_cast<std::uint64_t>(unit.index) + share.share * share_words,
                              share.is_shared ? share_words : unit.num_words, lane);
}

// What a fused unit reads, as a digest unit.
template <WordKind kind>
WEIGHTSYNC_HD inline DigestUnit digest_part(const CopyDigestUnit& unit) {
    return {unit.copy.source_ptr, unit.index, unit.copy.num_bytes / memory_word_bytes(kind),
            unit.row};
}

// What the 16 bytes at an even multiple of 16 into a block-aligned run add: whole blocks of them,
// or (4-byte words) half of one; a digest is linear in its words. `unmixed` is the argument of the
// mix of their first block.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t digest_vector(const Vec16& vector, std::uint64_t unmixed,
                                                 bool is_second_half) {
    if constexpr (kind == WordKind::bytes) {
        const Block<kind> low{{vector.w[0], vector.w[1]}};
        const Block<kind> high{{vector.w[2], vector.w[3]}};
        return digest_mix(unmixed) * low.inner_sum() +
               digest_mix(unmixed + kDigestGolden) * high.inner_sum();
    } else if constexpr (kind == WordKind::halves) {
        const Block<kind> block{{vector.w[0], vector.w[1], vector.w[2], vector.w[3]}};
        return digest_mix(unmixed) * block.inner_sum();
    } else {
        constexpr std::uint32_t k[kDigestBlockWords] = WEIGHTSYNC_DIGEST_K;
        std::uint64_t sum = 0;
        WEIGHTSYNC_UNROLL
        for (int j = 0; j < 4; ++j) {
            sum += std::uint64_t{is_second_half ? k[4 + j] : k[j]} * vector.w[j];
        }
        return digest_mix(unmixed) * sum;
    }
}

// Copies vectors lane, lane + 32, ... and returns what they add; each is read once, into registers.
// `first_block` is that of the first vector, which begins it.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t copy_digest_vectors(
    unsigned char* target, const unsigned char* source, std::uint32_t num_vectors,
    std::uint64_t seed, std::uint64_t first_block, std::uint32_t lane) {
    constexpr int unroll = 8;
    std::uint64_t sum = 0;
    for (std::uint32_t first = lane; first < num_vectors; first += kWarpLanes * unroll) {
        Vec16 vectors[unroll];
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            if (i < num_vectors) vectors[u] = load<Vec16>(source + 16 * i);
        }
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            if (i < num_vectors) store(target + 16 * i, vectors[u]);
        }
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            const std::uint64_t block = first_block + 16 * i / block_bytes(kind);
            if (i < num_vectors) {
                sum += digest_vector<kind>(vectors[u], seed + block * kDigestGolden, i % 2 == 1);
            }
        }
    }
    return sum;
}

WEIGHTSYNC_HD constexpr Convert convert_of(WordKind kind) {
    return kind == WordKind::fp32_as_bf16 ? Convert::fp32_to_bf16 : Convert::none;
}

// The part of a warp in a fused unit: copies it, and returns what its words add to the digest. What
// is aligned on both sides is read once; for the rest the second look finds it in the cache.
template <WordKind kind>
WEIGHTSYNC_HD inline std::uint64_t copy_digest_unit(const CopyDigestUnit& unit, std::uint64_t seed,
                                                    const WarpShare& share, std::uint32_t lane) {
    if constexpr (kind != WordKind::fp32_as_bf16) {
        const std::int64_t begin = share.share * kCopyWarpBytes;
        const auto* source = reinterpret_cast<const unsigned char*>(unit.copy.source_ptr) + begin;
        auto* target = reinterpret_cast<unsigned char*>(unit.copy.target_ptr) + begin;
        const std::uint32_t num_bytes =
            share.is_shared ? static_cast<std::uint32_t>(kCopyWarpBytes) : unit.copy.num_bytes;
        const auto index = static_cast<std::uint64_t>(unit.index + begin / memory_word_bytes(kind));
        if (is_aligned(source, 16) && is_aligned(target, 16) && num_bytes % 16 == 0 &&
            index % kDigestBlockWords == 0) {
            return copy_digest_vectors<kind>(target, source, num_bytes / 16, seed,
                                             index / kDigestBlockWords, lane);
        }
    }
    copy_unit<convert_of(kind)>(unit.copy, share, 0, 0, lane);
    return digest_unit<kind>(digest_part<kind>(unit), seed, share, kCopyWarpBytes, lane);
}

}  // namespace weightsync::lanes
