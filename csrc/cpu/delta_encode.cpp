#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "weightsync/delta_kernels.hpp"
#include "weightsync/delta_record.hpp"

namespace weightsync {
namespace {

int word_shift(const DeltaPlace& place) { return place.word_bytes == 4 ? 2 : place.word_bytes - 1; }

std::int64_t aligned8(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

// What the encoder of a span writes to.
struct Sections {
    unsigned char* modes;
    unsigned char* entries;
    unsigned char* sparse;
    unsigned char* dense;
};

class SpanEncoder {
  public:
    SpanEncoder(const DeltaPlace& place, const unsigned char* old, const unsigned char* current,
                bool is_absolute, bool is_dense_forced)
        : place_(place),
          old_(old),
          current_(current),
          is_dense_forced_(is_dense_forced),
          scratch_(delta_scratch()) {
        block_.place = &place_;
        block_.parameters = &parameters_;
        block_.word_shift = word_shift(place);
        block_.is_absolute = is_absolute;
        if (!is_absolute) parameters_ = delta_parameters(place, old, current);
    }

    const DeltaParameters& parameters() const { return parameters_; }

    void run(Sections to, std::uint64_t* digests, DeltaHeader* header) {
        const std::int64_t element_bytes = place_.element_bytes();
        const unsigned char* sparse_start = to.sparse;
        for (std::int64_t b = 0; b < place_.num_blocks(); ++b) {
            block_.index = b;
            const std::int64_t offset = block_.first_element() * element_bytes;
            const std::int64_t raw_bytes = place_.block_elements(b) * element_bytes;
            std::uint32_t changed = 0;
            std::int64_t num_bytes = 0;
            DeltaMode mode = delta_kernels().encode[static_cast<int>(place_.kind)](
                block_, old_ + offset, current_ + offset, scratch_, &digests[b], &changed,
                &num_bytes);
            header->result_digest += digests[b];
            header->num_changed += changed;
            if (mode == DeltaMode::unchanged) continue;
            if (is_dense_forced_ || num_bytes > delta_dense_limit(raw_bytes)) {
                mode = DeltaMode::dense;
                num_bytes = 0;
                std::memcpy(to.dense, current_ + offset, static_cast<std::size_t>(raw_bytes));
                to.dense += raw_bytes;
                header->dense_elements += static_cast<std::uint32_t>(place_.block_elements(b));
            } else {
                std::memcpy(to.sparse, scratch_->coded, static_cast<std::size_t>(num_bytes));
                to.sparse += num_bytes;
            }
            to.modes[b / 2] |= static_cast<unsigned char>(static_cast<int>(mode) << (b % 2 * 4));
            delta_put_entry(to.entries, num_bytes, delta_block_check(digests[b]));
            to.entries += kDeltaEntryBytes;
        }
        header->sparse_bytes = static_cast<std::uint32_t>(to.sparse - sparse_start);
    }

  private:
    DeltaPlace place_;
    const unsigned char* old_;
    const unsigned char* current_;
    bool is_dense_forced_;
    DeltaParameters parameters_;
    DeltaBlock block_{};
    DeltaScratch* scratch_;
};

}  // namespace

DeltaHeader delta_header(const DeltaPlace& place, bool is_absolute) {
    DeltaHeader header{};
    header.magic = kDeltaMagic;
    header.kind = static_cast<std::uint8_t>(place.kind);
    header.flags = is_absolute ? kDeltaFlagAbsolute : 0;
    header.start_element = place.start_element;
    header.num_elements = static_cast<std::uint32_t>(place.num_elements);
    header.word_bytes = static_cast<std::uint32_t>(place.word_bytes);
    return header;
}

std::int64_t delta_parameter_bytes(const DeltaParameters& parameters) {
    std::int64_t bytes = parameters.num_thresholds;
    for (const std::uint8_t typical : parameters.typical) bytes += typical == 1 ? 0 : 2;
    return bytes;
}

std::int64_t delta_put_parameters(const DeltaParameters& parameters, DeltaHeader* header,
                                  unsigned char* out) {
    std::memcpy(out, parameters.thresholds, static_cast<std::size_t>(parameters.num_thresholds));
    unsigned char* next = out + parameters.num_thresholds;
    for (int key = 0; key < 256; ++key) {
        if (parameters.typical[key] == 1) continue;
        *next++ = static_cast<unsigned char>(key);
        *next++ = parameters.typical[key];
        ++header->num_typical;
    }
    header->num_thresholds = static_cast<std::uint8_t>(parameters.num_thresholds);
    return next - out;
}

void delta_put_entry(unsigned char* entry, std::int64_t num_bytes, std::uint32_t check) {
    std::memcpy(entry, &num_bytes, 3);
    std::memcpy(entry + 3, &check, 4);
}

void validate_delta_place(const DeltaPlace& place) {
    if (static_cast<int>(place.kind) > 3) {
        throw std::invalid_argument("kind is " + std::to_string(static_cast<int>(place.kind)) +
                                    ", expected 0 to 3");
    }
    if (place.num_elements < 1 || place.num_elements > kDeltaSpan) {
        throw std::invalid_argument("num_elements is " + std::to_string(place.num_elements) +
                                    ", expected 1 to " + std::to_string(kDeltaSpan));
    }
    const bool is_word = place.word_bytes == 1 || place.word_bytes == 2 || place.word_bytes == 4;
    if (!is_word || place.word_bytes < place.element_bytes()) {
        throw std::invalid_argument("word_bytes is " + std::to_string(place.word_bytes) +
                                    ", expected 1, 2 or 4 and at least an element's");
    }
    if (place.start_element > (std::uint64_t{1} << 60) ||
        place.start_element % static_cast<std::uint64_t>(kDeltaBlock) != 0) {
        throw std::invalid_argument("start_element is " + std::to_string(place.start_element) +
                                    ", expected a multiple of a block's elements below 2^60");
    }
}

std::int64_t delta_record_capacity(const DeltaPlace& place) {
    const std::int64_t raw_bytes = place.num_elements * place.element_bytes();
    const std::int64_t parameters = kDeltaThresholds + 512;
    const std::int64_t index = place.num_blocks() * (kDeltaEntryBytes + 1) + 1;
    return static_cast<std::int64_t>(sizeof(DeltaHeader)) + parameters + index + raw_bytes +
           place.num_blocks() * 16 + 64;
}

std::uint64_t delta_checksum(const unsigned char* record, std::int64_t num_bytes) {
    constexpr std::int64_t field = offsetof(DeltaHeader, checksum);
    DigestRow row{};
    row.word_bytes = 4;
    row.seed = static_cast<std::int64_t>(kDeltaSeed);
    const std::int64_t after = field + 8;
    return digest_run(row, record, 0, field / 4) + digest_run(row, record + after,
                                                              static_cast<std::uint64_t>(after / 4),
                                                              (num_bytes - after) / 4);
}

DeltaEncoded delta_encode(const DeltaPlace& place, const unsigned char* old,
                          const unsigned char* current, bool is_absolute, bool is_dense_forced,
                          unsigned char* record, unsigned char* dense, std::uint64_t* digests) {
    validate_delta_place(place);
    SpanEncoder encoder(place, old, current, is_absolute, is_dense_forced);
    DeltaHeader header = delta_header(place, is_absolute);
    unsigned char* const after_header = record + sizeof(DeltaHeader);
    unsigned char* const modes =
        after_header + delta_put_parameters(encoder.parameters(), &header, after_header);
    const std::int64_t mode_bytes = (place.num_blocks() + 1) / 2;
    std::memset(modes, 0, static_cast<std::size_t>(mode_bytes));
    // Entries of unchanged blocks are left out, which is known only at the end.
    unsigned char* const entries = modes + mode_bytes;
    unsigned char* const sparse = entries + place.num_blocks() * kDeltaEntryBytes;
    encoder.run({modes, entries, sparse, dense}, digests, &header);
    std::int64_t num_entries = 0;
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        num_entries += ((modes[b / 2] >> (b % 2 * 4)) & 15) != 0;
    }
    unsigned char* const end = entries + num_entries * kDeltaEntryBytes;
    std::memmove(end, sparse, header.sparse_bytes);
    header.index_bytes = static_cast<std::uint32_t>(end - modes);
    std::memcpy(record, &header, sizeof(header));
    const std::int64_t used = end + header.sparse_bytes - record;
    std::memset(record + used, 0, static_cast<std::size_t>(aligned8(used) - used));
    return {aligned8(used), header.dense_elements};
}

}  // namespace weightsync
