// The block codec for the CPU at hand.
#pragma once

#include "weightsync/delta_block_decode.hpp"
#include "weightsync/delta_block_encode.hpp"

namespace weightsync {

struct DeltaBlock {
    const DeltaPlace* place;
    const DeltaParameters* parameters;
    std::int64_t index;
    int word_shift;
    bool is_absolute;

    std::int64_t first_element() const { return index * kDeltaBlock; }
};

// Codes one block into s->coded and moves its digest on; the mode is never dense.
using DeltaEncodeBlock = DeltaMode (*)(const DeltaBlock& block, const unsigned char* old,
                                       const unsigned char* current, DeltaScratch* s,
                                       std::uint64_t* digest, std::uint32_t* changed,
                                       std::int64_t* num_bytes);

// Appends what a sparse block changes; returns what that adds to the digest. `old_digest`, if not
// null, grows by the digest of the block as it is.
using DeltaDecodeBlock = std::uint64_t (*)(const DeltaBlock& block, DeltaMode mode,
                                           const DeltaBits& bits, const unsigned char* old,
                                           std::uint64_t* old_digest, DeltaScratch* s,
                                           DeltaOutput* out);

struct DeltaKernels {
    DeltaEncodeBlock encode[4];  // by kind
    DeltaDecodeBlock decode[4];
    const char* name;
};

// Picked once, unless delta_use_portable was called.
const DeltaKernels& delta_kernels();
const char* delta_kernel_name();

// This thread's, some 4 MB, kept: fresh pages for every span would cost a fifth of its time.
DeltaScratch* delta_scratch();

}  // namespace weightsync
