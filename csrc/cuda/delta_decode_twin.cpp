// The launches of delta_decode.cu, one thread after the other.
#include <algorithm>
#include <vector>

#include "weightsync/delta_block_work.hpp"
#include "weightsync/delta_decode_work.hpp"

namespace weightsync {
namespace {

using namespace lanes;

template <DeltaKind kind>
class DecodeTwin {
  public:
    DecodeTwin(const DeltaDecodeRow& row, const DeltaParameters& parameters,
               const DeltaDecodeUnit& unit, DeltaDecodeBlock* block)
        : unit_(unit),
          parameters_(parameters),
          emit_(delta_emit_of<kind>(row, parameters, unit, block)),
          block_(*block) {}

    void run(const DeltaDecodeRow& row, DeltaDecodeState* state, std::uint64_t* digest) {
        delta_clear_maps(team_, 0, 1, &block_);
        for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) count(warp);
        if (!open()) {
            state->state |= block_.state;
            return;
        }
        if (!delta_take_output(row, block_.num_changed, state, &emit_.out)) return;
        for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) find(warp);
        if (!delta_all_found(&block_, state)) return;
        std::uint64_t sum = 0;
        for (std::uint32_t k = 0; k < block_.num_changed; ++k) sum += emit_.put(k);
        delta_end_block(unit_, sum, block_.state, state, digest);
    }

  private:
    using Vector = DeltaVector<kind>;

    bool open() {
        block_.state = delta_open_block(emit_.codes, emit_.place.size, parameters_.num_thresholds,
                                        unit_.is_gaps != 0, &block_);
        if (block_.state != 0) return false;
        const std::uint32_t end =
            delta_find_ends(team_, emit_.codes, block_.high, block_.num_codes, &block_);
        if (block_.state != 0) return false;
        for (int c = 0; c < block_.num_classes; ++c) {
            delta_map_list(team_, emit_.codes, block_.classes[c].numbers,
                           block_.classes[c].map_begin, block_.map, &block_);
        }
        std::uint32_t before = 0;
        for (std::uint32_t chunk = 0; chunk < kDeltaWarps; ++chunk) {
            block_.chunk_before[chunk] = before;
            before += delta_count_chunk(team_, chunk, &block_);
        }
        block_.state |= delta_open_exceptions(emit_.codes, end, &block_);
        if (block_.state != 0) return false;
        const std::uint32_t steps = delta_find_ends(team_, emit_.codes, block_.exception_high,
                                                    block_.num_exception_codes, &block_);
        if (block_.state != 0) return false;
        for (int c = 0; c < block_.num_classes; ++c) {
            delta_map_list(team_, emit_.codes, block_.classes[c].exception_numbers,
                           block_.classes[c].begin, block_.exception_map, &block_);
        }
        delta_count_exceptions(team_, &block_);
        block_.state |= delta_take_steps(emit_.codes, steps, &block_);
        return block_.state == 0;
    }

    // `act(first element, what a lane has, its counts, those of the lanes before)` for every lane
    // of a warp; `at_row(row, counts)` behind each row.
    template <typename Act, typename AtRow>
    void rows(std::uint32_t warp, const Act& act, const AtRow& at_row) {
        for (std::uint32_t r = 0; r < Vector::rows; ++r) {
            const std::uint32_t first = warp * kDeltaWarpElements + r * Vector::row_elements;
            if (first >= emit_.place.size) break;
            DeltaCounts before{0, 0};
            for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
                const std::uint32_t at = first + lane * Vector::elements;
                const typename Vector::Lane old =
                    Vector::read(emit_.place.old, at, emit_.place.size);
                const DeltaCounts own = delta_count_any<kind>(old, 0, emit_.cuts, parameters_);
                act(at, old, own, before);
                before.low += own.low;
                before.high += own.high;
            }
            at_row(r, before);
        }
    }

    void count(std::uint32_t warp) {
        std::uint32_t running[kDeltaThresholds + 1] = {};
        rows(
            warp,
            [](std::uint32_t, const typename Vector::Lane&, const DeltaCounts&,
               const DeltaCounts&) {},
            [&](std::uint32_t r, const DeltaCounts& row) {
                for (int t = 0; t < kDeltaThresholds; ++t) {
                    block_.starts[warp][r].reached[t] = static_cast<std::uint16_t>(running[t]);
                }
                delta_add_row(row, running);
            });
        std::copy(running, running + kDeltaThresholds, block_.totals[warp]);
    }

    void find(std::uint32_t warp) {
        rows(
            warp,
            [&](std::uint32_t at, const typename Vector::Lane& old, const DeltaCounts& own,
                const DeltaCounts& before) { emit_.find(old, at, own, before); },
            [](std::uint32_t, const DeltaCounts&) {});
    }

    SoloTeam team_;
    DeltaDecodeUnit unit_;
    const DeltaParameters& parameters_;
    DeltaEmit<kind> emit_;
    DeltaDecodeBlock& block_;
};

template <DeltaKind kind>
void run_kind(const DeltaDecodeBatch& batch, DeltaDecodeBlock* block,
              std::vector<DeltaDecodeState>* states, std::uint64_t* digests) {
    for (const DeltaDecodeUnit& unit : batch.units[static_cast<int>(kind)]) {
        const DeltaDecodeRow& row = batch.rows[unit.row];
        const std::int64_t at = batch.first_block[unit.row] + unit.block;
        DecodeTwin<kind>(row, batch.parameters[unit.row], unit, block)
            .run(row, &(*states)[unit.row], &digests[at]);
    }
}

}  // namespace

void run_delta_decode(DeltaDecodeBatch* batch, std::uint64_t* digests) {
    std::vector<DeltaDecodeState> states(batch->rows.size());
    std::vector<DeltaDecodeBlock> block(1);
    run_kind<DeltaKind::bytes>(*batch, block.data(), &states, digests);
    run_kind<DeltaKind::float8>(*batch, block.data(), &states, digests);
    run_kind<DeltaKind::float16>(*batch, block.data(), &states, digests);
    run_kind<DeltaKind::float32>(*batch, block.data(), &states, digests);
    delta_decode_settle(batch, states.data(), digests);
}

}  // namespace weightsync
