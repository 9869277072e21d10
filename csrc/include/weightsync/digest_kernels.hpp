// The inner loop of the digest, for the CPU at hand.
#pragma once

#include <cstdint>

namespace weightsync {

// Sums `num_blocks` whole blocks that start at block `first_block`; `ptr` needs no alignment.
using DigestBlocks = std::uint64_t (*)(std::uint64_t seed, std::uint64_t first_block,
                                       const unsigned char* ptr, std::int64_t num_blocks);

struct DigestKernels {
    DigestBlocks bytes;         // 1-byte words
    DigestBlocks halves;        // 2-byte words
    DigestBlocks words;         // 4-byte words
    DigestBlocks fp32_as_bf16;  // fp32 in memory, rounded to bf16 words
    const char* name;           // for build_info
};

// Picked once.
const DigestKernels& digest_kernels();

}  // namespace weightsync
