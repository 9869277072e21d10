#include "weightsync/delta_decode_batch.hpp"

#include <stdexcept>
#include <string>

#include "weightsync/delta_bits.hpp"
#include "weightsync/delta_team_decode.hpp"

namespace weightsync {

DeltaPlace DeltaDecodeRow::place() const {
    return {static_cast<DeltaKind>(kind), start_element, static_cast<std::int64_t>(num_elements),
            seed, static_cast<int>(word_bytes)};
}

DeltaDecodeBatch delta_decode_batch(const DeltaDecodeRow* rows, const DeltaDecodeInput* inputs,
                                    std::int64_t num_rows) {
    DeltaDecodeBatch batch;
    batch.rows.assign(rows, rows + num_rows);
    batch.first_block.push_back(0);
    const auto count = static_cast<std::size_t>(num_rows);
    batch.parameters.resize(count);
    batch.results.resize(count);
    batch.outcomes.resize(count, DeltaDecodeOutcome::done);
    std::vector<DeltaDecodeUnit> units;
    for (std::size_t i = 0; i < count; ++i) {
        DeltaDecodeRow& row = batch.rows[i];
        if (row.kind > static_cast<std::uint64_t>(DeltaKind::float32) || row.old_ptr % 16 != 0) {
            throw std::invalid_argument("delta: row " + std::to_string(i) + " has kind " +
                                        std::to_string(row.kind) + " and address " +
                                        std::to_string(row.old_ptr) +
                                        ", expected 0..3 and a multiple of 16");
        }
        const DeltaPlace place = row.place();
        validate_delta_place(place);
        batch.first_block.push_back(batch.first_block.back() + place.num_blocks());
        units.clear();
        std::uint32_t num_changed = 0;
        try {
            if (!delta_record_units(place, inputs[i], &batch.parameters[i], &units, &num_changed,
                                    &batch.results[i])) {
                batch.outcomes[i] = DeltaDecodeOutcome::host_form;
                continue;
            }
        } catch (const DeltaError&) {
            batch.outcomes[i] = DeltaDecodeOutcome::host_damaged;
            continue;
        }
        row.num_changed = num_changed;
        for (DeltaDecodeUnit& unit : units) unit.row = static_cast<std::uint32_t>(i);
        std::vector<DeltaDecodeUnit>& all = batch.units[row.kind];
        all.insert(all.end(), units.begin(), units.end());
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
