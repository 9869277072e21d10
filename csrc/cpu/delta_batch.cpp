#include "weightsync/delta_batch.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "weightsync/delta_record.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

std::int64_t aligned8(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

struct SpanSizes {
    std::int64_t record_bytes;
    DeltaOutcome outcome;
};

SpanSizes sizes_of(const DeltaBatch& batch, std::size_t row) {
    const DeltaPlace place = batch.rows[row].place();
    std::int64_t bytes = static_cast<std::int64_t>(sizeof(DeltaHeader)) +
                         delta_parameter_bytes(batch.parameters[row]) +
                         (place.num_blocks() + 1) / 2;
    bool is_changed = false;
    const DeltaBlockResult* results = batch.results + batch.first_block[row];
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        const DeltaBlockResult& result = results[b];
        if (result.status != DeltaBlockStatus::done) return {0, DeltaOutcome::dense_block};
        if (result.num_changed == 0) continue;
        is_changed = true;
        bytes += kDeltaEntryBytes + result.num_bytes;
    }
    if (!is_changed) return {0, DeltaOutcome::unchanged};
    bytes = aligned8(bytes);
    if (bytes > place.num_elements * place.element_bytes() / 4) {
        return {0, DeltaOutcome::dense_span};
    }
    return {bytes, DeltaOutcome::coded};
}

void write_record(const DeltaBatch& batch, std::size_t row, unsigned char* record,
                  std::uint64_t* digests) {
    const DeltaPlace place = batch.rows[row].place();
    const auto first = static_cast<std::size_t>(batch.first_block[row]);
    DeltaHeader header = delta_header(place, false);
    unsigned char* const after_header = record + sizeof(DeltaHeader);
    unsigned char* const modes =
        after_header + delta_put_parameters(batch.parameters[row], &header, after_header);
    const std::int64_t mode_bytes = (place.num_blocks() + 1) / 2;
    std::memset(modes, 0, static_cast<std::size_t>(mode_bytes));
    unsigned char* next = modes + mode_bytes;
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        const DeltaBlockResult& result = batch.results[first + static_cast<std::size_t>(b)];
        header.result_digest += result.digest;
        header.num_changed += result.num_changed;
        digests[first + static_cast<std::size_t>(b)] = result.digest;
        if (result.num_changed == 0) continue;
        modes[b / 2] |= static_cast<unsigned char>(result.mode << (b % 2 * 4));
        delta_put_entry(next, result.num_bytes, delta_block_check(result.digest));
        next += kDeltaEntryBytes;
    }
    header.index_bytes = static_cast<std::uint32_t>(next - modes);
    const unsigned char* const sparse = next;
    for (std::int64_t b = 0; b < place.num_blocks(); ++b) {
        const DeltaBlockResult& result = batch.results[first + static_cast<std::size_t>(b)];
        if (result.num_changed == 0) continue;
        std::memcpy(next, batch.arena + result.offset, result.num_bytes);
        next += result.num_bytes;
    }
    header.sparse_bytes = static_cast<std::uint32_t>(next - sparse);
    const std::int64_t used = next - record;
    std::memset(next, 0, static_cast<std::size_t>(aligned8(used) - used));
    std::memcpy(record, &header, sizeof(header));
    header.checksum = delta_checksum(record, aligned8(used));
    std::memcpy(record, &header, sizeof(header));
}

}  // namespace

DeltaPlace DeltaSpanRow::place() const {
    return {static_cast<DeltaKind>(kind), start_element, static_cast<std::int64_t>(num_elements),
            seed, static_cast<int>(word_bytes)};
}

DeltaBatch delta_batch(const DeltaSpanRow* rows, std::int64_t num_rows) {
    DeltaBatch batch;
    batch.rows.assign(rows, rows + num_rows);
    std::int64_t blocks = 0;
    for (const DeltaSpanRow& row : batch.rows) {
        if (row.kind > 3 || row.word_bytes > 4) {
            throw std::invalid_argument("a span of kind " + std::to_string(row.kind) +
                                        " with words of " + std::to_string(row.word_bytes));
        }
        validate_delta_place(row.place());
        if (row.old_ptr == 0 || row.new_ptr == 0 || (row.old_ptr | row.new_ptr) % 16 != 0) {
            throw std::invalid_argument("a span's address is null or no multiple of 16");
        }
        batch.first_block.push_back(blocks);
        blocks += row.place().num_blocks();
    }
    batch.first_block.push_back(blocks);
    batch.parameters.resize(batch.rows.size());
    return batch;
}

std::vector<DeltaBlockUnit> delta_units(const DeltaBatch& batch, DeltaKind kind) {
    std::vector<DeltaBlockUnit> units;
    for (std::size_t row = 0; row < batch.rows.size(); ++row) {
        if (batch.rows[row].kind != static_cast<std::uint64_t>(kind)) continue;
        const auto blocks = static_cast<std::uint32_t>(batch.rows[row].place().num_blocks());
        for (std::uint32_t b = 0; b < blocks; ++b) {
            units.push_back({static_cast<std::uint32_t>(row), b});
        }
    }
    return units;
}

void delta_batch_choose(DeltaBatch* batch, const DeltaSampleCounts* counts, int num_threads) {
    for_all(static_cast<std::int64_t>(batch->rows.size()), num_threads, [&](std::int64_t i) {
        const auto row = static_cast<std::size_t>(i);
        batch->parameters[row] = delta_parameters_of(
            static_cast<std::int64_t>(batch->rows[row].num_elements), counts[row]);
    });
}

std::int64_t delta_batch_layout(DeltaBatch* batch, int num_threads) {
    const std::size_t rows = batch->rows.size();
    std::vector<SpanSizes> sizes(rows);
    for_all(static_cast<std::int64_t>(rows), num_threads, [&](std::int64_t i) {
        sizes[static_cast<std::size_t>(i)] = sizes_of(*batch, static_cast<std::size_t>(i));
    });
    batch->outcomes.clear();
    batch->offsets.clear();
    std::int64_t total = 0;
    for (const SpanSizes& size : sizes) {
        batch->outcomes.push_back(size.outcome);
        batch->offsets.push_back(total);
        total += size.record_bytes;
    }
    batch->offsets.push_back(total);
    return total;
}

void delta_batch_write(const DeltaBatch& batch, unsigned char* payload, std::uint64_t* digests,
                       int num_threads) {
    for_all(static_cast<std::int64_t>(batch.rows.size()), num_threads, [&](std::int64_t i) {
        const auto row = static_cast<std::size_t>(i);
        if (batch.outcomes[row] != DeltaOutcome::coded) return;
        write_record(batch, row, payload + batch.offsets[row], digests);
    });
}

}  // namespace weightsync
