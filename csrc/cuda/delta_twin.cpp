// The launches of delta_encode.cu, one thread after the other.
#include <algorithm>
#include <cstring>

#include "weightsync/delta_block_work.hpp"

namespace weightsync {
namespace {

using namespace lanes;

template <DeltaKind kind>
class BlockTwin {
  public:
    BlockTwin(const DeltaBlockPlace& block, const DeltaParameters& parameters,
              std::uint32_t capacity, std::uint32_t bit_words)
        : block_(block), parameters_(parameters), cuts_(delta_cuts<kind>(parameters)) {
        memory_.resize(delta_stage_at(nullptr, capacity, bit_words, &stage_) + 16);
        const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
        delta_stage_at(memory_.data() + (16 - address % 16), capacity, bit_words, &stage_);
    }

    void run(std::uint64_t old_digest, DeltaBlockResult* result,
             std::vector<unsigned char>* arena) {
        *result = {old_digest, 0, 0, 0, DeltaBlockStatus::done, 0};
        for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) look(warp);
        for (int column = 0; column <= kDeltaThresholds; ++column) {
            delta_add_warps(stage_, column, &counts_);
        }
        result->num_changed = counts_.num_changed;
        if (!counts_.is_fitting) result->status = DeltaBlockStatus::crowded;
        if (!counts_.is_fitting || counts_.num_changed == 0) return;
        for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) turn(warp, result);
        for (int c = 0; c <= kDeltaClasses; ++c) {
            delta_measure_class(block_.size, parameters_, c, &counts_);
        }
        delta_choose_mode(block_.size, parameters_, &counts_);
        const bool is_gaps = counts_.mode == DeltaMode::gaps;
        result->mode = static_cast<std::uint32_t>(counts_.mode);
        for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) {
            for (int c = 0; c < counts_.num_classes; ++c) delta_begin_places(warp, c, &counts_);
            delta_place(team_, stage_, warp, counts_.staged[warp], is_gaps, counts_.places[warp],
                        counts_.numbers[warp]);
        }
        for (int c = 0; c < counts_.num_classes; ++c) {
            delta_measure(team_, stage_, &counts_.classes[c]);
        }
        write(result, arena);
    }

  private:
    using Vector = DeltaVector<kind>;

    void look(std::uint32_t warp) {
        std::uint32_t running[kDeltaThresholds + 1] = {};
        for (std::uint32_t r = 0; r < Vector::rows; ++r) {
            const std::uint32_t first = warp * kDeltaWarpElements + r * Vector::row_elements;
            if (first >= block_.size) break;
            for (int t = 0; t <= kDeltaThresholds; ++t) {
                counts_.starts[warp][r].reached[t] = static_cast<std::uint16_t>(running[t]);
            }
            DeltaCounts before{0, 0};
            for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
                const std::uint32_t at = first + lane * Vector::elements;
                const typename Vector::Lane old = Vector::read(block_.old, at, block_.size);
                const typename Vector::Lane current = Vector::read(block_.current, at, block_.size);
                const std::uint32_t changed = Vector::changed_mask(old, current);
                delta_stage_lane(stage_, warp, at, changed, before, running[kDeltaThresholds]);
                const DeltaCounts own = delta_count_any<kind>(old, changed, cuts_, parameters_);
                before.low += own.low;
                before.high += own.high;
            }
            delta_add_row(before, running);
        }
        std::copy(running, running + kDeltaThresholds + 1, counts_.totals[warp]);
    }

    void turn(std::uint32_t warp, DeltaBlockResult* result) {
        for (std::uint32_t i = 0; i < counts_.staged[warp]; ++i) {
            result->digest +=
                delta_turn<kind>(stage_, block_, parameters_, counts_.starts[warp], warp, i);
            ++counts_.places[warp][stage_.label[warp * stage_.capacity + i] & 7];
        }
    }

    void write(DeltaBlockResult* result, std::vector<unsigned char>* arena) {
        std::uint32_t total = 0;
        delta_planes(counts_.classes, counts_.num_classes, 0, &total);
        result->num_bytes = static_cast<std::uint32_t>((total + 7) / 8);
        const auto words = static_cast<std::uint32_t>((total + 31) / 32);
        if (result->num_bytes > delta_dense_limit(std::int64_t{block_.size} * bytes)) {
            result->status = DeltaBlockStatus::dense;
            return;
        }
        if (words > stage_.bit_words) {
            result->status = DeltaBlockStatus::crowded;
            return;
        }
        std::fill(stage_.high, stage_.high + words, 0u);
        delta_put_counts(counts_.classes, counts_.num_classes, stage_.high);
        for (int c = 0; c < counts_.num_classes; ++c) {
            const DeltaPlanes planes =
                delta_planes(counts_.classes, counts_.num_classes, c, &total);
            delta_put_class(team_, stage_, counts_.classes[c], planes, stage_.high);
        }
        result->offset = arena->size();
        arena->resize(arena->size() + (result->num_bytes + 15) / 16 * 16);
        std::memcpy(arena->data() + result->offset, stage_.high, result->num_bytes);
    }

    static constexpr std::int64_t bytes = DeltaElement<kind>::bytes;
    SoloTeam team_;
    DeltaBlockPlace block_;
    const DeltaParameters& parameters_;
    DeltaCuts cuts_;
    DeltaStage stage_{};
    DeltaBlockCounts counts_{};
    std::vector<unsigned char> memory_;
};

template <DeltaKind kind>
void run_kind(DeltaBatch* batch, const std::uint64_t* digests, std::uint32_t capacity,
              std::vector<unsigned char>* arena) {
    for (const DeltaBlockUnit& unit : delta_units(*batch, kind)) {
        const DeltaSpanRow& row = batch->rows[unit.row];
        const DeltaBlockPlace block = delta_place_of<kind>(row, row.new_ptr, unit.block);
        const auto at = static_cast<std::size_t>(batch->first_block[unit.row]) + unit.block;
        DeltaBlockResult* result = &batch->results[at];
        const DeltaParameters& parameters = batch->parameters[unit.row];
        BlockTwin<kind>(block, parameters, capacity, 0).run(digests[at], result, arena);
        if (result->status != DeltaBlockStatus::crowded) continue;
        BlockTwin<kind>(block, parameters, kDeltaWarpElements, kDeltaCrowdedWords)
            .run(digests[at], result, arena);
    }
}

}  // namespace

void run_delta_batch(DeltaBatch* batch, const std::uint64_t* digests, std::uint32_t capacity,
                     std::vector<DeltaBlockResult>* results, std::vector<unsigned char>* arena) {
    results->resize(static_cast<std::size_t>(batch->num_blocks()));
    batch->results = results->data();
    for (std::size_t row = 0; row < batch->rows.size(); ++row) {
        const DeltaSpanRow& span = batch->rows[row];
        batch->parameters[row] =
            delta_parameters(span.place(), reinterpret_cast<const unsigned char*>(span.old_ptr),
                             reinterpret_cast<const unsigned char*>(span.new_ptr));
    }
    run_kind<DeltaKind::bytes>(batch, digests, capacity, arena);
    run_kind<DeltaKind::float8>(batch, digests, capacity, arena);
    run_kind<DeltaKind::float16>(batch, digests, capacity, arena);
    run_kind<DeltaKind::float32>(batch, digests, capacity, arena);
    batch->arena = arena->data();
}

}  // namespace weightsync
