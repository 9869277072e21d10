// Spans of tensors to records and back; see delta.hpp and docs/delta.md.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"
#include "weightsync/delta_scan.hpp"
#include "weightsync/digest.hpp"

namespace weightsync {

// What a record says of all its blocks.
struct DeltaParameters {
    std::uint8_t thresholds[kDeltaThresholds] = {};
    int num_thresholds = 0;
    std::uint8_t typical[256];  // step by key, 1 .. kDeltaMaxTypical

    DeltaParameters() {
        for (std::uint8_t& step : typical) step = 1;
    }
};

// A span of a dense tensor: where its elements stand in the digest of the whole.
struct DeltaPlace {
    DeltaKind kind;
    std::uint64_t start_element;
    std::int64_t num_elements;  // 1 .. kDeltaSpan
    std::uint64_t seed;
    int word_bytes;  // 1, 2 or 4 and at least an element's

    int element_bytes() const { return delta_element_bytes(kind); }
    std::int64_t num_blocks() const { return (num_elements + kDeltaBlock - 1) / kDeltaBlock; }
    std::int64_t block_elements(std::int64_t block) const {
        const std::int64_t rest = num_elements - block * kDeltaBlock;
        return rest < kDeltaBlock ? rest : kDeltaBlock;
    }
};

// Throws std::invalid_argument for a place that cannot be.
void validate_delta_place(const DeltaPlace& place);

// What one word adds to a digest when an element changes within it.
WEIGHTSYNC_HD_INLINE std::uint64_t delta_digest_term(std::uint64_t seed, std::uint64_t byte,
                                                     int word_shift, std::uint32_t old,
                                                     std::uint32_t current) {
    const std::uint64_t word = byte >> word_shift;
    const int shift = static_cast<int>(byte & ((std::uint64_t{1} << word_shift) - 1)) * 8;
    const std::uint64_t change = (std::uint64_t{current} - std::uint64_t{old}) << shift;
    return digest_block_factor(seed, word / kDigestBlockWords) *
           (digest_word_factor(word) * change);
}

// What elements [first, first + count) of a block add to the tensor's digest; the block is at
// `data` and begins at element `block_start` of the span.
std::uint64_t delta_digest_part(const DeltaPlace& place, const unsigned char* data,
                                std::int64_t block_start, std::int64_t first, std::int64_t count);

// From a sample of both versions: 1,024 elements in every 32,768 (a 16,384-element span or less is
// looked at whole). Host maths on integer counts, so every encoder finds the same.
DeltaParameters delta_parameters(const DeltaPlace& place, const unsigned char* old,
                                 const unsigned char* current);

struct DeltaEncoded {
    std::int64_t
        record_bytes;  // header, parameters, index and sparse blocks, before the dense ones
    std::int64_t dense_elements;
};

// The capacity of `record` that suffices.
std::int64_t delta_record_capacity(const DeltaPlace& place);

// Writes all of a record but its dense section and its seal to `record`; the elements of dense
// blocks to `dense`, which must hold all of the span. `digests` are those of the old blocks (their
// parts of the tensor's digest) and become those of the new ones.
DeltaEncoded delta_encode(const DeltaPlace& place, const unsigned char* old,
                          const unsigned char* current, bool is_absolute, bool is_dense_forced,
                          unsigned char* record, unsigned char* dense, std::uint64_t* digests);

// The checksum over a whole record, the field apart; `num_bytes` is a multiple of 8.
std::uint64_t delta_checksum(const unsigned char* record, std::int64_t num_bytes);

struct DeltaDecoded {
    std::int64_t num_changed;
    std::uint64_t old_digest;
    std::uint64_t new_digest;
};

// What a record changes, as positions in the span and new elements; nothing is applied. `dense` are
// the elements of dense blocks. `digests` of the old blocks become those of the new ones; where
// `are_digests_known` is false they are taken from `old` first. Throws DeltaError for a record that
// is damaged, is of another place, or does not turn `old` into what it promises.
DeltaDecoded delta_decode(const DeltaPlace& place, const unsigned char* record,
                          std::int64_t record_bytes, const unsigned char* dense,
                          std::int64_t num_dense, const unsigned char* old, bool are_digests_known,
                          std::uint32_t* positions, unsigned char* values, std::int64_t capacity,
                          std::uint64_t* digests);

// Parts of the tensor's digest, one a block.
void delta_block_digests(const DeltaPlace& place, const unsigned char* data,
                         std::uint64_t* digests);

// Writes values to positions < num_elements; throws DeltaError before the first write if one is
// not.
void delta_scatter(int element_bytes, unsigned char* target, std::int64_t num_elements,
                   const std::uint32_t* positions, const unsigned char* values, std::int64_t count);

// The same, and what was there goes to `former`.
void delta_exchange(int element_bytes, unsigned char* target, std::int64_t num_elements,
                    const std::uint32_t* positions, const unsigned char* values,
                    unsigned char* former, std::int64_t count);

// How many of those elements do not hold these values.
std::int64_t delta_count_different(int element_bytes, const unsigned char* target,
                                   std::int64_t num_elements, const std::uint32_t* positions,
                                   const unsigned char* values, std::int64_t count);

// For tests: the kernels that delta_encode and delta_decode use from now on in this thread.
void delta_use_portable(bool is_portable);

}  // namespace weightsync
