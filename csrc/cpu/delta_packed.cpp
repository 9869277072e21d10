#include "weightsync/delta_packed.hpp"

#include <cstring>
#include <memory>
#include <string>

#include "weightsync/delta_bits.hpp"
#include "weightsync/delta_record.hpp"

namespace weightsync {
namespace {

// Bits of a packed record's first byte, besides the number of thresholds.
constexpr unsigned kAbsolute = 1;
constexpr unsigned kPlanes = 2;
constexpr int kThresholdsShift = 2;
constexpr unsigned kThresholdsMask = 7;
constexpr unsigned kHasTypical = 1u << 5;
constexpr unsigned kSkipsSpans = 1u << 6;
constexpr unsigned kAllBits = (1u << 7) - 1;

constexpr std::int64_t kHeaderBytes = sizeof(DeltaHeader);

[[noreturn]] void fail(const char* what) {
    throw DeltaError(std::string("packed records: ") + what);
}

std::int64_t aligned8(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

// Of a packed record's checksum this much is kept: every bit of the record changes it.
std::uint32_t kept_checksum(std::uint64_t checksum) {
    return static_cast<std::uint32_t>(checksum >> 32);
}

// The span of a tensor that begins at `start`, as its place.
DeltaPlace span_at(const DeltaTensorForm& form, std::int64_t start) {
    const std::int64_t rest = form.num_elements - start;
    return {form.kind, static_cast<std::uint64_t>(start), rest < kDeltaSpan ? rest : kDeltaSpan, 0,
            form.word_bytes};
}

int mode_of(const unsigned char* modes, std::int64_t block) {
    return (modes[block / 2] >> (block % 2 * 4)) & 15;
}

// What the block index says of a whole span.
struct IndexSums {
    std::int64_t num_entries = 0;
    std::int64_t dense_elements = 0;
};

IndexSums index_sums(const DeltaPlace& place, const unsigned char* modes) {
    IndexSums sums;
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        const int mode = mode_of(modes, b);
        sums.num_entries += mode != 0;
        if (mode == static_cast<int>(DeltaMode::dense))
            sums.dense_elements += place.block_elements(b);
    }
    return sums;
}

// Writes what fits; who asks at the end whether all did.
class ByteWriter {
  public:
    ByteWriter(unsigned char* ptr, std::int64_t capacity)
        : start_(ptr), ptr_(ptr), end_(ptr + capacity) {}

    void put(const void* data, std::int64_t num_bytes) {
        if (num_bytes > end_ - ptr_) {
            is_full_ = true;
            return;
        }
        std::memcpy(ptr_, data, static_cast<std::size_t>(num_bytes));
        ptr_ += num_bytes;
    }
    template <typename T>
    void put_value(T value) {
        put(&value, sizeof(value));
    }
    // Seven bits a byte, the lowest first.
    void put_count(std::uint64_t value) {
        for (; value >= 0x80; value >>= 7) {
            put_value(static_cast<std::uint8_t>(value | 0x80));
        }
        put_value(static_cast<std::uint8_t>(value));
    }
    std::int64_t num_bytes() const { return is_full_ ? 0 : ptr_ - start_; }

  private:
    unsigned char* start_;
    unsigned char* ptr_;
    unsigned char* end_;
    bool is_full_ = false;
};

class ByteReader {
  public:
    ByteReader(const unsigned char* ptr, std::int64_t num_bytes)
        : ptr_(ptr), end_(ptr + num_bytes) {}

    std::int64_t left() const { return end_ - ptr_; }
    const unsigned char* take(std::int64_t num_bytes) {
        if (num_bytes > left()) fail("they end early");
        const unsigned char* const taken = ptr_;
        ptr_ += num_bytes;
        return taken;
    }
    template <typename T>
    T take_value() {
        T value;
        std::memcpy(&value, take(sizeof(T)), sizeof(T));
        return value;
    }
    // Of at most 32 bits, and in no more bytes than it needs.
    std::uint32_t take_count() {
        std::uint64_t value = 0;
        for (int shift = 0; shift < 35; shift += 7) {
            const auto byte = take_value<std::uint8_t>();
            value |= std::uint64_t{byte & 0x7Fu} << shift;
            if (byte >= 0x80) continue;
            if ((byte == 0 && shift > 0) || value > 0xFFFFFFFFu) break;
            return static_cast<std::uint32_t>(value);
        }
        fail("a count that is none");
    }

  private:
    const unsigned char* ptr_;
    const unsigned char* end_;
};

// --- packing
// ---------------------------------------------------------------------------------------

// A record in memory; `num_bytes` 0 if it is not one of the tensor.
struct RecordParts {
    DeltaHeader header;
    const unsigned char* parameters;
    std::int64_t parameter_bytes;
    const unsigned char* modes;
    const unsigned char* entries;
    IndexSums sums;
    const unsigned char* sparse;
    const unsigned char* dense;
    std::int64_t num_bytes = 0;
};

RecordParts parts_of(const DeltaTensorForm& form, const unsigned char* record,
                     std::int64_t num_bytes) {
    RecordParts p{};
    if (num_bytes < kHeaderBytes) return p;
    std::memcpy(&p.header, record, kHeaderBytes);
    const DeltaHeader& h = p.header;
    if (h.start_element >= static_cast<std::uint64_t>(form.num_elements) ||
        h.start_element % kDeltaSpan != 0) {
        return p;
    }
    const DeltaPlace place = span_at(form, static_cast<std::int64_t>(h.start_element));
    const std::int64_t mode_bytes = (place.num_blocks() + 1) / 2;
    p.parameter_bytes = std::int64_t{h.num_thresholds} + std::int64_t{2} * h.num_typical;
    const std::int64_t front =
        kHeaderBytes + p.parameter_bytes + h.index_bytes + std::int64_t{h.sparse_bytes};
    const std::int64_t whole = aligned8(front) + aligned8(h.dense_bytes);
    if (whole > num_bytes || h.index_bytes < mode_bytes) return p;
    p.parameters = record + kHeaderBytes;
    p.modes = p.parameters + p.parameter_bytes;
    p.entries = p.modes + mode_bytes;
    p.sums = index_sums(place, p.modes);
    if (h.index_bytes != mode_bytes + p.sums.num_entries * kDeltaEntryBytes) return p;
    p.sparse = p.modes + h.index_bytes;
    p.dense = record + aligned8(front);
    p.num_bytes = whole;
    return p;
}

void pack_record(const RecordParts& p, bool is_alone, std::int64_t num_skipped, ByteWriter* out) {
    const DeltaHeader& h = p.header;
    const unsigned flags =
        (h.flags == kDeltaFlagAbsolute ? kAbsolute : 0) | (h.dense_coding != 0 ? kPlanes : 0) |
        ((h.num_thresholds & kThresholdsMask) << kThresholdsShift) |
        (h.num_typical != 0 ? kHasTypical : 0) | (num_skipped != 0 ? kSkipsSpans : 0);
    out->put_value(static_cast<std::uint8_t>(flags));
    if (num_skipped != 0) out->put_count(static_cast<std::uint64_t>(num_skipped));
    out->put_count(h.num_changed);
    if (h.num_typical != 0) out->put_count(h.num_typical);
    out->put(p.parameters, p.parameter_bytes);
    out->put(p.modes, p.entries - p.modes);
    const bool is_one_block = h.num_elements <= kDeltaBlock;
    for (std::int64_t i = 0; i < p.sums.num_entries; ++i) {
        const unsigned char* const entry = p.entries + i * kDeltaEntryBytes;
        std::uint32_t num_bytes = 0;
        std::memcpy(&num_bytes, entry, 3);
        out->put_count(num_bytes);
        if (!is_one_block) out->put(entry + 3, 4);
    }
    if (p.sums.dense_elements != 0) out->put_count(h.dense_bytes);
    if (!is_alone) out->put_value(h.result_digest);
    out->put_value(kept_checksum(h.checksum));
    out->put(p.sparse, h.sparse_bytes);
    out->put(p.dense, h.dense_bytes);
}

// --- unpacking
// -------------------------------------------------------------------------------------

// The sections of a packed record before its index, as they follow each other.
struct PackedFront {
    DeltaHeader header;
    const unsigned char* parameters;
    std::int64_t parameter_bytes;
    const unsigned char* modes;
    std::int64_t mode_bytes;
    IndexSums sums;
};

PackedFront take_front(const DeltaTensorForm& form, std::int64_t* next_span, ByteReader* in) {
    PackedFront p{};
    const unsigned flags = in->take_value<std::uint8_t>();
    if ((flags & ~kAllBits) != 0) fail("a first byte that cannot be");
    std::int64_t span = *next_span;
    if ((flags & kSkipsSpans) != 0) {
        const std::uint32_t num_skipped = in->take_count();
        if (num_skipped == 0) fail("a count that is none");
        span += num_skipped;
    }
    if (span * kDeltaSpan >= form.num_elements) fail("a span beyond the end of the tensor");
    *next_span = span + 1;
    const DeltaPlace place = span_at(form, span * kDeltaSpan);
    DeltaHeader& h = p.header;
    h = delta_header(place, (flags & kAbsolute) != 0);
    h.num_thresholds = static_cast<std::uint8_t>((flags >> kThresholdsShift) & kThresholdsMask);
    h.dense_coding = (flags & kPlanes) != 0 ? 1 : 0;
    h.num_changed = in->take_count();
    if ((flags & kHasTypical) != 0) {
        h.num_typical = in->take_count();
        if (h.num_typical == 0 || h.num_typical > 256) fail("a count that is none");
    }
    p.parameter_bytes = std::int64_t{h.num_thresholds} + std::int64_t{2} * h.num_typical;
    p.parameters = in->take(p.parameter_bytes);
    p.mode_bytes = (place.num_blocks() + 1) / 2;
    p.modes = in->take(p.mode_bytes);
    p.sums = index_sums(place, p.modes);
    h.index_bytes =
        static_cast<std::uint32_t>(p.mode_bytes + p.sums.num_entries * kDeltaEntryBytes);
    h.dense_elements = static_cast<std::uint32_t>(p.sums.dense_elements);
    return p;
}

// Writes sizes and checks of the blocks to `entries`; a single block's check follows only later.
std::int64_t take_entries(std::int64_t num_entries, bool is_one_block, ByteReader* in,
                          unsigned char* entries) {
    std::int64_t sparse_bytes = 0;
    for (std::int64_t i = 0; i < num_entries; ++i) {
        const std::uint32_t num_bytes = in->take_count();
        if (num_bytes >= 1u << 24) fail("a block of too many bytes");
        const std::uint32_t check = is_one_block ? 0 : in->take_value<std::uint32_t>();
        delta_put_entry(entries + i * kDeltaEntryBytes, num_bytes, check);
        sparse_bytes += num_bytes;
    }
    return sparse_bytes;
}

// Returns the bytes of the record that it wrote to `record`.
std::int64_t unpack_record(const DeltaTensorForm& form, std::int64_t* next_span, ByteReader* in,
                           unsigned char* record, std::int64_t capacity) {
    const PackedFront p = take_front(form, next_span, in);
    DeltaHeader h = p.header;
    const std::int64_t before_sparse = kHeaderBytes + p.parameter_bytes + h.index_bytes;
    if (before_sparse > capacity) fail("they hold more than their manifest says");
    unsigned char* const modes = record + kHeaderBytes + p.parameter_bytes;
    unsigned char* const entries = modes + p.mode_bytes;
    const bool is_one_block = h.num_elements <= kDeltaBlock;
    const std::int64_t sparse_bytes = take_entries(p.sums.num_entries, is_one_block, in, entries);
    if (h.dense_elements != 0) h.dense_bytes = in->take_count();
    const std::int64_t front = before_sparse + sparse_bytes;
    const std::int64_t whole = aligned8(front) + aligned8(h.dense_bytes);
    if (whole > capacity) fail("they hold more than their manifest says");
    h.sparse_bytes = static_cast<std::uint32_t>(sparse_bytes);
    const bool is_alone = form.num_elements <= kDeltaSpan;
    h.result_digest = is_alone ? form.digest : in->take_value<std::uint64_t>();
    const auto checksum = in->take_value<std::uint32_t>();
    std::memcpy(record, &h, kHeaderBytes);
    std::memcpy(record + kHeaderBytes, p.parameters, static_cast<std::size_t>(p.parameter_bytes));
    std::memcpy(modes, p.modes, static_cast<std::size_t>(p.mode_bytes));
    if (is_one_block && p.sums.num_entries != 0) {
        const std::uint32_t check = delta_block_check(h.result_digest);
        std::memcpy(entries + 3, &check, 4);
    }
    unsigned char* const sparse = record + before_sparse;
    std::memset(sparse, 0, static_cast<std::size_t>(whole - before_sparse));
    std::memcpy(sparse, in->take(sparse_bytes), static_cast<std::size_t>(sparse_bytes));
    std::memcpy(record + aligned8(front), in->take(h.dense_bytes), h.dense_bytes);
    h.checksum = delta_checksum(record, whole);
    if (kept_checksum(h.checksum) != checksum)
        fail("a checksum is wrong: damaged, or of another tensor than their manifest says");
    std::memcpy(record, &h, kHeaderBytes);
    return whole;
}

}  // namespace

std::int64_t delta_pack(const DeltaTensorForm& form, const unsigned char* records,
                        std::int64_t num_bytes, unsigned char* packed, std::int64_t capacity) {
    ByteWriter out(packed, capacity);
    std::int64_t next_span = 0;
    for (std::int64_t at = 0; at < num_bytes;) {
        const RecordParts parts = parts_of(form, records + at, num_bytes - at);
        if (parts.num_bytes == 0) return 0;
        const std::int64_t span =
            static_cast<std::int64_t>(parts.header.start_element) / kDeltaSpan;
        if (span < next_span) return 0;
        pack_record(parts, form.num_elements <= kDeltaSpan, span - next_span, &out);
        next_span = span + 1;
        at += parts.num_bytes;
    }
    // What is stored must be what was coded, whatever was handed in as records.
    const std::unique_ptr<unsigned char[]> back(
        new unsigned char[static_cast<std::size_t>(num_bytes)]);
    try {
        delta_unpack(form, packed, out.num_bytes(), back.get(), num_bytes);
    } catch (const DeltaError&) {
        return 0;
    }
    const bool is_same = std::memcmp(back.get(), records, static_cast<std::size_t>(num_bytes)) == 0;
    return is_same ? out.num_bytes() : 0;
}

void delta_unpack(const DeltaTensorForm& form, const unsigned char* packed, std::int64_t num_bytes,
                  unsigned char* records, std::int64_t records_bytes) {
    ByteReader in(packed, num_bytes);
    std::int64_t next_span = 0;
    std::int64_t done = 0;
    while (in.left() > 0) {
        done += unpack_record(form, &next_span, &in, records + done, records_bytes - done);
    }
    if (done != records_bytes) fail("they hold less than their manifest says");
}

}  // namespace weightsync
