#include <algorithm>
#include <cstring>
#include <string>

#include "weightsync/delta_decode_batch.hpp"
#include "weightsync/delta_kernels.hpp"

namespace weightsync {
namespace {

[[noreturn]] void fail(const std::string& what) { throw DeltaError(what); }

void expect(const char* field, std::uint64_t got, std::uint64_t expected) {
    if (got != expected) {
        fail(std::string(field) + " is " + std::to_string(got) + ", expected " +
             std::to_string(expected));
    }
}

int word_shift(const DeltaPlace& place) { return place.word_bytes == 4 ? 2 : place.word_bytes - 1; }

// A record whose header, sizes and checksum hold; nothing in its sections was looked at.
struct Record {
    DeltaHeader header;
    const unsigned char* parameters;
    const unsigned char* index;
    const unsigned char* sparse;
};

Record open_record(const DeltaPlace& place, const unsigned char* data, std::int64_t num_bytes) {
    Record record{};
    DeltaHeader& h = record.header;
    if (num_bytes < static_cast<std::int64_t>(sizeof(h)) || num_bytes % 8 != 0) {
        fail("a record of " + std::to_string(num_bytes) + " bytes");
    }
    std::memcpy(&h, data, sizeof(h));
    expect("magic", h.magic, kDeltaMagic);
    expect("checksum", delta_checksum(data, num_bytes), h.checksum);
    expect("kind", h.kind, static_cast<std::uint64_t>(place.kind));
    expect("start_element", h.start_element, place.start_element);
    expect("num_elements", h.num_elements, static_cast<std::uint64_t>(place.num_elements));
    expect("word_bytes", h.word_bytes, static_cast<std::uint64_t>(place.word_bytes));
    if (h.num_thresholds > kDeltaThresholds || h.num_typical > 256 || h.dense_coding > 1 ||
        h.flags > kDeltaFlagAbsolute || h.num_changed > h.num_elements ||
        h.dense_elements > h.num_elements) {
        fail("its header holds a number that cannot be");
    }
    const std::uint64_t parameter_bytes = h.num_thresholds + std::uint64_t{2} * h.num_typical;
    const std::uint64_t before_dense =
        sizeof(h) + parameter_bytes + h.index_bytes + std::uint64_t{h.sparse_bytes};
    expect("record bytes", static_cast<std::uint64_t>(num_bytes),
           (before_dense + 7) / 8 * 8 + (std::uint64_t{h.dense_bytes} + 7) / 8 * 8);
    record.parameters = data + sizeof(h);
    record.index = record.parameters + parameter_bytes;
    record.sparse = record.index + h.index_bytes;
    return record;
}

DeltaParameters read_parameters(const Record& record) {
    DeltaParameters parameters;
    const unsigned char* next = record.parameters;
    parameters.num_thresholds = record.header.num_thresholds;
    for (int t = 0; t < parameters.num_thresholds; ++t) {
        parameters.thresholds[t] = *next++;
        if (t > 0 && parameters.thresholds[t] <= parameters.thresholds[t - 1]) {
            fail("thresholds that do not rise");
        }
    }
    for (std::uint32_t i = 0; i < record.header.num_typical; ++i, next += 2) {
        if (next[1] < 1 || next[1] > kDeltaMaxTypical) fail("a typical step that cannot be");
        parameters.typical[next[0]] = next[1];
    }
    return parameters;
}

std::uint64_t block_digest(const DeltaPlace& place, const unsigned char* data, std::int64_t b);

// What the index of a record says of its blocks, one after the other.
class IndexReader {
  public:
    struct Entry {
        std::uint32_t num_bytes;
        std::uint32_t check;
    };

    IndexReader(const DeltaPlace& place, const Record& record) : modes_(record.index) {
        const std::int64_t mode_bytes = (place.num_blocks() + 1) / 2;
        if (record.header.index_bytes < mode_bytes) fail("an index shorter than its modes");
        entry_ = modes_ + mode_bytes;
        end_ = record.index + record.header.index_bytes;
    }
    int mode(std::int64_t b) const { return (modes_[b / 2] >> (b % 2 * 4)) & 15; }
    // Of the next block that changed.
    Entry take() {
        if (end_ - entry_ < kDeltaEntryBytes) fail("the index ends early");
        Entry entry{0, 0};
        std::memcpy(&entry.num_bytes, entry_, 3);
        std::memcpy(&entry.check, entry_ + 3, 4);
        entry_ += kDeltaEntryBytes;
        return entry;
    }
    bool is_over() const { return entry_ == end_; }

  private:
    const unsigned char* modes_;
    const unsigned char* entry_;
    const unsigned char* end_;
};

class SpanDecoder {
  public:
    SpanDecoder(const DeltaPlace& place, const Record& record, const unsigned char* dense,
                std::int64_t num_dense, const unsigned char* old, DeltaOutput* out)
        : place_(place),
          record_(record),
          parameters_(read_parameters(record)),
          dense_(dense),
          dense_left_(num_dense),
          old_(old),
          out_(out),
          scratch_(delta_scratch()),
          index_(place, record) {
        expect("dense elements", static_cast<std::uint64_t>(num_dense),
               record.header.dense_elements);
        block_.place = &place_;
        block_.parameters = &parameters_;
        block_.word_shift = word_shift(place);
        block_.is_absolute = (record.header.flags & kDeltaFlagAbsolute) != 0;
        sparse_ = record.sparse;
        sparse_left_ = record.header.sparse_bytes;
    }

    // Moves the digest of block `b` from its old to its new contents; returns the old one, which is
    // taken from the elements unless it is known.
    std::uint64_t run_block(std::int64_t b, bool is_known, std::uint64_t* digest) {
        const int mode = index_.mode(b);
        std::uint64_t before = *digest;
        if (!is_known && (mode == 0 || mode == static_cast<int>(DeltaMode::dense))) {
            before = block_digest(place_, old_, b);
            is_known = true;
        }
        *digest = before;
        if (mode == 0) return before;
        try {
            block_.index = b;
            const IndexReader::Entry entry = index_.take();
            num_bytes_ = entry.num_bytes;
            const std::uint64_t added =
                run_mode(static_cast<DeltaMode>(mode), is_known ? nullptr : &before);
            *digest = before + added;
            if (delta_block_check(*digest) != entry.check) {
                fail("the result is not what was sent; the base differs from the sender's");
            }
        } catch (const DeltaError& error) {
            fail("block " + std::to_string(b) + ": " + error.what());
        }
        return before;
    }

    void finish() const {
        if (!index_.is_over() || sparse_left_ != 0 || dense_left_ != 0) {
            fail("sections longer than what they hold");
        }
        const std::int64_t expected = record_.header.num_changed;
        if (block_.is_absolute ? out_->count > expected : out_->count != expected) {
            fail("it changes " + std::to_string(out_->count) + " elements, expected " +
                 std::to_string(expected));
        }
    }

  private:
    std::uint64_t run_mode(DeltaMode mode, std::uint64_t* old_digest) {
        const int kind = static_cast<int>(place_.kind);
        const unsigned char* old = old_ + block_.first_element() * place_.element_bytes();
        if (mode == DeltaMode::dense) {
            expect("bytes of a dense block", num_bytes_, 0);
            return run_dense(old);
        }
        const bool is_absolute = mode == DeltaMode::absolute;
        if (mode > DeltaMode::absolute || is_absolute != block_.is_absolute) {
            fail("mode " + std::to_string(static_cast<int>(mode)) + " cannot be here");
        }
        if (num_bytes_ > sparse_left_ || num_bytes_ + 32 > sizeof(scratch_->coded)) {
            fail("more bytes than there are");
        }
        // A copy with zeros behind it, so that no code can make the decoder read beyond.
        std::memcpy(scratch_->coded, sparse_, num_bytes_);
        std::memset(scratch_->coded + num_bytes_, 0, 32);
        sparse_ += num_bytes_;
        sparse_left_ -= num_bytes_;
        const DeltaBits bits{scratch_->coded, std::uint64_t{num_bytes_} * 8};
        return delta_kernels().decode[kind](block_, mode, bits, old, old_digest, scratch_, out_);
    }

    // The changed ones of a dense block.
    std::uint64_t run_dense(const unsigned char* old) {
        const std::int64_t count = place_.block_elements(block_.index);
        if (count > dense_left_) fail("more dense elements than there are");
        std::uint64_t sum = 0;
        switch (place_.element_bytes()) {
            case 1:
                sum = compare_dense<1>(old, count);
                break;
            case 2:
                sum = compare_dense<2>(old, count);
                break;
            default:
                sum = compare_dense<4>(old, count);
                break;
        }
        dense_ += count * place_.element_bytes();
        dense_left_ -= count;
        return sum;
    }

    template <int bytes>
    std::uint64_t compare_dense(const unsigned char* old, std::int64_t count) {
        const auto first = static_cast<std::uint64_t>(block_.first_element());
        std::uint64_t sum = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::uint32_t from = delta_load<bytes>(old, i);
            const std::uint32_t to = delta_load<bytes>(dense_, i);
            if (from == to) continue;
            out_->reserve(1);
            const std::uint64_t position = first + static_cast<std::uint64_t>(i);
            out_->positions[out_->count] = static_cast<std::uint32_t>(position);
            delta_store<bytes>(out_->values, out_->count, to);
            ++out_->count;
            sum += delta_digest_term(place_.seed, (place_.start_element + position) * bytes,
                                     block_.word_shift, from, to);
        }
        return sum;
    }

    DeltaPlace place_;
    const Record& record_;
    DeltaParameters parameters_;
    const unsigned char* dense_;
    std::int64_t dense_left_;
    const unsigned char* old_;
    DeltaOutput* out_;
    DeltaScratch* scratch_;
    DeltaBlock block_{};
    IndexReader index_;
    const unsigned char* sparse_;
    std::uint32_t sparse_left_;
    std::uint32_t num_bytes_ = 0;
};

std::uint64_t block_digest(const DeltaPlace& place, const unsigned char* data, std::int64_t b) {
    return delta_digest_part(place, data + b * kDeltaBlock * place.element_bytes(), b * kDeltaBlock,
                             0, place.block_elements(b));
}

}  // namespace

std::uint64_t delta_digest_part(const DeltaPlace& place, const unsigned char* data,
                                std::int64_t block_start, std::int64_t first, std::int64_t count) {
    DigestRow row{};
    row.word_bytes = place.word_bytes;
    row.seed = static_cast<std::int64_t>(place.seed);
    const auto element_bytes = static_cast<std::uint64_t>(place.element_bytes());
    const std::uint64_t start =
        (place.start_element + static_cast<std::uint64_t>(block_start + first)) * element_bytes;
    return digest_run(row, data + first * place.element_bytes(),
                      start / static_cast<std::uint64_t>(place.word_bytes),
                      count * place.element_bytes() / place.word_bytes);
}

void delta_block_digests(const DeltaPlace& place, const unsigned char* data,
                         std::uint64_t* digests) {
    validate_delta_place(place);
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) digests[b] = block_digest(place, data, b);
}

DeltaDecoded delta_decode(const DeltaPlace& place, const unsigned char* record_bytes_ptr,
                          std::int64_t record_bytes, const unsigned char* dense,
                          std::int64_t num_dense, const unsigned char* old, bool are_digests_known,
                          std::uint32_t* positions, unsigned char* values, std::int64_t capacity,
                          std::uint64_t* digests) {
    validate_delta_place(place);
    const Record record = open_record(place, record_bytes_ptr, record_bytes);
    DeltaOutput out{positions, values, 0, capacity};
    SpanDecoder decoder(place, record, dense, num_dense, old, &out);
    DeltaDecoded result{};
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        if (!are_digests_known) digests[b] = 0;
        result.old_digest += decoder.run_block(b, are_digests_known, &digests[b]);
        result.new_digest += digests[b];
    }
    decoder.finish();
    if (result.new_digest != record.header.result_digest) {
        fail("the result is not what was sent; the base differs from the sender's");
    }
    result.num_changed = out.count;
    return result;
}

bool delta_record_units(const DeltaPlace& place, const DeltaDecodeInput& input,
                        DeltaParameters* parameters, std::vector<DeltaDecodeUnit>* units,
                        std::uint32_t* num_changed, std::uint64_t* result_digest) {
    const Record record = open_record(place, input.record, input.num_bytes);
    *parameters = read_parameters(record);
    *num_changed = record.header.num_changed;
    *result_digest = record.header.result_digest;
    if ((record.header.flags & kDeltaFlagAbsolute) != 0 || record.header.dense_elements != 0) {
        return false;
    }
    IndexReader index(place, record);
    std::uint64_t used = 0;
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        const int mode = index.mode(b);
        if (mode == 0) continue;
        if (mode > static_cast<int>(DeltaMode::classes)) fail("a mode that cannot be here");
        const IndexReader::Entry entry = index.take();
        DeltaDecodeUnit unit{};
        unit.block = static_cast<std::uint32_t>(b);
        unit.offset = static_cast<std::uint32_t>(record.sparse - input.record + used);
        unit.num_bytes = entry.num_bytes;
        unit.check = entry.check;
        unit.is_gaps = mode == static_cast<int>(DeltaMode::gaps) ? 1 : 0;
        units->push_back(unit);
        used += entry.num_bytes;
    }
    if (!index.is_over() || used != record.header.sparse_bytes) {
        fail("sections longer than what they hold");
    }
    return true;
}

}  // namespace weightsync
