// Tables cut into units of work: what one warp, or one block of warps, does in a launch.
//
// All of it is host code, built with or without a toolkit, so that it can be tested anywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "weightsync/digest.hpp"
#include "weightsync/hd.hpp"
#include "weightsync/segments.hpp"

namespace weightsync {

inline constexpr std::uint32_t kWarpLanes = 32;
inline constexpr std::uint32_t kBlockWarps = 8;

// A contiguous piece is cut into block units of exactly this size, shared evenly by the warps of
// one block, and the rest into warp units of at most an eighth of it. 4 KiB a warp is eight 16-byte
// loads in flight for each lane. A unit costs 24 bytes of device memory.
inline constexpr std::int64_t kCopyWarpBytes = 4096;
// Reading only, longer units save atomic additions.
inline constexpr std::int64_t kDigestWarpBytes = 8192;
// Runs shorter than this stay together in grid units, which know their row.
inline constexpr std::int64_t kGridRunBytes = 4096;

// `num_block` block units, then `num_warp` warp units. Launched as num_blocks() blocks.
struct UnitCounts {
    std::uint32_t num_block = 0;
    std::uint32_t num_warp = 0;

    WEIGHTSYNC_HD std::uint32_t num_blocks() const {
        return num_block + (num_warp + kBlockWarps - 1) / kBlockWarps;
    }
    WEIGHTSYNC_HD std::uint32_t total() const { return num_block + num_warp; }
};

// The unit of one warp of one block, and which of the block's equal shares of it.
struct WarpShare {
    std::uint32_t unit;
    std::uint32_t share;
    bool is_shared;  // a block unit
};

WEIGHTSYNC_HD inline WarpShare warp_share(const UnitCounts& counts, std::uint32_t block,
                                          std::uint32_t warp) {
    if (block < counts.num_block) return {block, warp, true};
    return {counts.num_block + (block - counts.num_block) * kBlockWarps + warp, 0, false};
}

struct CopyUnit {
    std::int64_t source_ptr;
    std::int64_t target_ptr;
    std::uint32_t num_bytes;  // of the source
    std::uint32_t unused;
};

struct DigestUnit {
    std::int64_t ptr;
    std::int64_t index;
    std::uint32_t num_words;
    std::uint32_t row;
};

// Runs [first_run, first_run + num_runs) of a row of small runs.
struct GridUnit {
    std::int64_t first_run;
    std::uint32_t row;
    std::uint32_t num_runs;
};

// Units of one kind; block units come first.
template <typename Unit>
struct UnitList {
    std::vector<Unit> block_units;
    std::vector<Unit> warp_units;

    UnitCounts counts() const {
        return {static_cast<std::uint32_t>(block_units.size()),
                static_cast<std::uint32_t>(warp_units.size())};
    }
    bool is_empty() const { return block_units.empty() && warp_units.empty(); }
    // All of them in the order of a launch.
    std::vector<Unit> joined() const {
        std::vector<Unit> units = block_units;
        units.insert(units.end(), warp_units.begin(), warp_units.end());
        return units;
    }
};

inline constexpr int kNumConverts = 2;

struct SegmentUnits {
    UnitList<CopyUnit> pieces[kNumConverts];  // by Convert
    std::vector<Segment> grid_rows;           // coalesced
    UnitList<GridUnit> grid;                  // warp units only
    std::int64_t num_bytes = 0;               // of the sources
    std::int64_t lowest_source = INT64_MAX;   // pointers of rows that are not empty
    std::int64_t lowest_target = INT64_MAX;
};

// Cuts a table. Pointers may be offsets from a base that is added at launch, so 0 is allowed.
// Throws std::invalid_argument as validate_segments does, or if there are 2^31 units of a kind.
SegmentUnits cut_segments(const Segment* segments, std::int64_t num_segments);

enum class WordKind : int { bytes = 0, halves = 1, words = 2, fp32_as_bf16 = 3 };
inline constexpr int kNumWordKinds = 4;

WordKind word_kind(const DigestRow& row);

struct DigestOwner {
    std::uint64_t seed;
    std::uint32_t owner;  // where the row's digest is added
    std::uint32_t unused;
};

struct DigestUnits {
    UnitList<DigestUnit> pieces[kNumWordKinds];
    UnitList<GridUnit> grid[kNumWordKinds];  // warp units only
    std::vector<DigestRow> grid_rows;        // coalesced; GridUnit::row counts in these...
    std::vector<std::uint32_t> grid_owners;  // ...and so do their owners
    std::vector<DigestOwner> rows;           // DigestUnit::row counts in these: all rows
    std::int64_t num_owners = 0;
    std::int64_t num_bytes = 0;
};

// Cuts a table. `owners` (null: each row its own) says where a row's digest is added, and is
// checked to lie in [0, num_owners). Throws std::invalid_argument.
DigestUnits cut_digests(const DigestRow* rows, std::int64_t num_rows, const std::int64_t* owners,
                        std::int64_t num_owners);

// A piece that is copied and digested in one go; the digest is of what was read.
struct CopyDigestUnit {
    CopyUnit copy;
    std::int64_t index;
    std::uint32_t row;
    std::uint32_t unused;
};

// A segment table and the digest table of its sources, row by row the same memory. Rows that are
// one run are fused; the others are copied and digested one after the other.
struct CopyDigestUnits {
    UnitList<CopyDigestUnit> fused[kNumWordKinds];
    SegmentUnits copied;
    DigestUnits digested;  // `rows` and `num_owners` are the fused units' too
    std::int64_t num_bytes = 0;
};

// Throws std::invalid_argument as both cuts do, or if a pair of rows is not the same memory.
CopyDigestUnits cut_copy_digests(const Segment* segments, const DigestRow* rows,
                                 std::int64_t num_rows, const std::int64_t* owners,
                                 std::int64_t num_owners);

// The CPU's twins of the launches, lane by lane through the same code: they test it, slowly.
void run_segment_units(const SegmentUnits& units, std::int64_t source_base,
                       std::int64_t target_base);
void run_digest_units(const DigestUnits& units, std::uint64_t* out);
void run_copy_digest_units(const CopyDigestUnits& units, std::uint64_t* out);

}  // namespace weightsync
