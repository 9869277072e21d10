#include "weightsync/delta_decode_batch.hpp"

#include <stdexcept>
#include <string>

#include "weightsync/delta_bits.hpp"
#include "weightsync/delta_team_decode.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {

DeltaPlace DeltaDecodeRow::place() const {
    return {static_cast<DeltaKind>(kind), start_element, static_cast<std::int64_t>(num_elements),
            seed, static_cast<int>(word_bytes)};
}

namespace {

void check_row(const DeltaDecodeRow& row, std::int64_t i) {
    if (row.kind > static_cast<std::uint64_t>(DeltaKind::float32) || row.old_ptr % 16 != 0) {
        throw std::invalid_argument(
            "delta: row " + std::to_string(i) + " has kind " + std::to_string(row.kind) +
            " and address " + std::to_string(row.old_ptr) + ", expected 0..3 and a multiple of 16");
    }
    validate_delta_place(row.place());
}

}  // namespace

DeltaDecodeBatch delta_decode_batch(const DeltaDecodeRow* rows, const DeltaDecodeInput* inputs,
                                    std::int64_t num_rows, int num_threads) {
    DeltaDecodeBatch batch;
    batch.rows.assign(rows, rows + num_rows);
    batch.first_block.push_back(0);
    const auto count = static_cast<std::size_t>(num_rows);
    batch.parameters.resize(count);
    batch.results.resize(count);
    batch.outcomes.resize(count, DeltaDecodeOutcome::done);
    for (std::int64_t i = 0; i < num_rows; ++i) {
        check_row(rows[i], i);
        batch.first_block.push_back(batch.first_block.back() + rows[i].place().num_blocks());
    }
    std::vector<std::vector<DeltaDecodeUnit>> units(count);
    for_all(num_rows, num_threads, [&](std::int64_t at) {
        const auto i = static_cast<std::size_t>(at);
        DeltaDecodeRow& row = batch.rows[i];
        std::uint32_t num_changed = 0;
        try {
            if (delta_record_units(row.place(), inputs[i], &batch.parameters[i], &units[i],
                                   &num_changed, &batch.results[i])) {
                row.num_changed = num_changed;
                return;
            }
            batch.outcomes[i] = DeltaDecodeOutcome::host_form;
        } catch (const DeltaError&) {
            batch.outcomes[i] = DeltaDecodeOutcome::host_damaged;
        }
        units[i].clear();
    });
    for (std::size_t i = 0; i < count; ++i) {
        for (DeltaDecodeUnit& unit : units[i]) unit.row = static_cast<std::uint32_t>(i);
        std::vector<DeltaDecodeUnit>& all = batch.units[batch.rows[i].kind];
        all.insert(all.end(), units[i].begin(), units[i].end());
    }
    return batch;
}

void delta_decode_settle(DeltaDecodeBatch* batch, const DeltaDecodeState* states,
                         const std::uint64_t* digests) {
    for (std::size_t i = 0; i < batch->rows.size(); ++i) {
        DeltaDecodeOutcome& outcome = batch->outcomes[i];
        if (outcome != DeltaDecodeOutcome::done) continue;
        std::uint64_t sum = 0;
        for (std::int64_t b = batch->first_block[i]; b < batch->first_block[i + 1]; ++b) {
            sum += digests[b];
        }
        const DeltaDecodeState& state = states[i];
        const bool is_whole =
            state.num_changed == batch->rows[i].num_changed && sum == batch->results[i];
        if ((state.state & lanes::kDecodeDamaged) != 0) {
            outcome = DeltaDecodeOutcome::host_damaged;
        } else if ((state.state & lanes::kDecodeCrowded) != 0) {
            outcome = DeltaDecodeOutcome::host_crowded;
        } else if (!is_whole) {
            outcome = DeltaDecodeOutcome::host_damaged;
        }
    }
}

}  // namespace weightsync
