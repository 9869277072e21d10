// The records of one tensor as a store keeps them where they are short: without what follows from
// the tensor, see docs/delta.md. Unpacked they are, byte for byte, the records that were packed.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"

namespace weightsync {

// What who packs and who unpacks know of a tensor.
struct DeltaTensorForm {
    DeltaKind kind;
    int word_bytes;             // of its digest
    std::int64_t num_elements;  // of `kind`
    std::uint64_t digest;       // of its new elements
};

// Writes the packed records to `packed` and returns their bytes; 0 if they do not fit, or are not
// such as would come back.
std::int64_t delta_pack(const DeltaTensorForm& form, const unsigned char* records,
                        std::int64_t num_bytes, unsigned char* packed, std::int64_t capacity);

// The inverse: writes exactly `records_bytes` to `records`. Throws DeltaError for what cannot be
// packed records of this tensor, or fails their checksums.
void delta_unpack(const DeltaTensorForm& form, const unsigned char* packed, std::int64_t num_bytes,
                  unsigned char* records, std::int64_t records_bytes);

}  // namespace weightsync
