// The launches of csrc/cuda/*.cu, one lane after the other.
#include <algorithm>

#include "weightsync/cuda_digest_lanes.hpp"
#include "weightsync/cuda_units.hpp"

namespace weightsync {
namespace {

// Calls `work(unit, share, lane)` as a launch would.
template <typename Unit, typename Work>
void run_units(const UnitList<Unit>& list, const Work& work) {
    const UnitCounts counts = list.counts();
    const std::vector<Unit> units = list.joined();
    for (std::uint32_t block = 0; block < counts.num_blocks(); ++block) {
        for (std::uint32_t warp = 0; warp < kBlockWarps; ++warp) {
            const WarpShare share = warp_share(counts, block, warp);
            if (share.unit >= counts.total()) continue;
            for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
                work(units[share.unit], share, lane);
            }
        }
    }
}

template <Convert convert>
void run_pieces(const SegmentUnits& units, std::int64_t source_base, std::int64_t target_base) {
    run_units(units.pieces[static_cast<int>(convert)],
              [&](const CopyUnit& unit, const WarpShare& share, std::uint32_t lane) {
                  lanes::copy_unit<convert>(unit, share, source_base, target_base, lane);
              });
}

template <WordKind kind>
void run_digests(const DigestUnits& units, std::uint64_t* out) {
    run_units(units.pieces[static_cast<int>(kind)],
              [&](const DigestUnit& unit, const WarpShare& share, std::uint32_t lane) {
                  const DigestOwner& row = units.rows[unit.row];
                  out[row.owner] +=
                      lanes::digest_unit<kind>(unit, row.seed, share, kDigestWarpBytes, lane);
              });
    run_units(units.grid[static_cast<int>(kind)],
              [&](const GridUnit& unit, const WarpShare&, std::uint32_t lane) {
                  out[units.grid_owners[unit.row]] +=
                      lanes::digest_grid<kind>(units.grid_rows[unit.row], unit, lane);
              });
}

template <WordKind kind>
void run_fused(const CopyDigestUnits& units, std::uint64_t* out) {
    run_units(units.fused[static_cast<int>(kind)],
              [&](const CopyDigestUnit& unit, const WarpShare& share, std::uint32_t lane) {
                  const DigestOwner& row = units.digested.rows[unit.row];
                  out[row.owner] += lanes::copy_digest_unit<kind>(unit, row.seed, share, lane);
              });
}

}  // namespace

void run_segment_units(const SegmentUnits& units, std::int64_t source_base,
                       std::int64_t target_base) {
    run_pieces<Convert::none>(units, source_base, target_base);
    run_pieces<Convert::fp32_to_bf16>(units, source_base, target_base);
    run_units(units.grid, [&](const GridUnit& unit, const WarpShare&, std::uint32_t lane) {
        lanes::copy_grid(units.grid_rows[unit.row], unit, source_base, target_base, lane);
    });
}

void run_digest_units(const DigestUnits& units, std::uint64_t* out) {
    std::fill(out, out + units.num_owners, std::uint64_t{0});
    run_digests<WordKind::bytes>(units, out);
    run_digests<WordKind::halves>(units, out);
    run_digests<WordKind::words>(units, out);
    run_digests<WordKind::fp32_as_bf16>(units, out);
}

void run_copy_digest_units(const CopyDigestUnits& units, std::uint64_t* out) {
    run_digest_units(units.digested, out);
    run_segment_units(units.copied, 0, 0);
    run_fused<WordKind::bytes>(units, out);
    run_fused<WordKind::halves>(units, out);
    run_fused<WordKind::words>(units, out);
    run_fused<WordKind::fp32_as_bf16>(units, out);
}

}  // namespace weightsync
