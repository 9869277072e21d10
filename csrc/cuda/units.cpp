#include "weightsync/cuda_units.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "weightsync/cuda_digest_lanes.hpp"

namespace weightsync {
namespace {

// Units start at whole lines of the target where the row allows it.
constexpr std::int64_t kLineBytes = 128;
constexpr std::size_t kMaxUnits = std::size_t{1} << 31;

[[noreturn]] void fail(std::int64_t row, const std::string& what) {
    throw std::invalid_argument("table row " + std::to_string(row) + ": " + what);
}

template <typename Unit>
void check_count(const UnitList<Unit>& list) {
    if (list.block_units.size() >= kMaxUnits || list.warp_units.size() >= kMaxUnits) {
        throw std::invalid_argument("the table makes 2^31 or more units of work; split it");
    }
}

// Bytes up to the next multiple of `num_bytes`, a power of two.
std::int64_t bytes_to(std::int64_t ptr, std::int64_t num_bytes) { return -ptr & (num_bytes - 1); }

// Calls `add_block(begin)` for whole blocks of warp shares and `add_warp(begin, num_bytes)` for the
// rest of [0, num_bytes), with a first cut after `head`.
template <typename AddBlock, typename AddWarp>
void cut_run(std::int64_t num_bytes, std::int64_t head, std::int64_t share_bytes,
             const AddBlock& add_block, const AddWarp& add_warp) {
    std::int64_t begin = 0;
    if (head > 0 && num_bytes > share_bytes) {
        add_warp(begin, head);
        begin = head;
    }
    for (; num_bytes - begin >= share_bytes * kBlockWarps; begin += share_bytes * kBlockWarps) {
        add_block(begin);
    }
    for (; begin < num_bytes; begin += share_bytes) {
        add_warp(begin, std::min(share_bytes, num_bytes - begin));
    }
}

// Source bytes before the first unit that writes whole lines.
std::int64_t copy_head(std::int64_t target, Convert convert) {
    if (convert == Convert::none) return bytes_to(target, kLineBytes);
    return target % 2 == 0 ? bytes_to(target, kLineBytes) * 2 : 0;
}

void cut_copy_run(std::int64_t source, std::int64_t target, std::int64_t num_bytes, Convert convert,
                  UnitList<CopyUnit>& list) {
    const auto unit = [&](std::int64_t begin, std::int64_t size) {
        return CopyUnit{source + begin, target + converted_bytes(begin, convert),
                        static_cast<std::uint32_t>(size), 0};
    };
    cut_run(
        num_bytes, copy_head(target, convert), kCopyWarpBytes,
        [&](std::int64_t begin) {
            list.block_units.push_back(unit(begin, kCopyWarpBytes * kBlockWarps));
        },
        [&](std::int64_t begin, std::int64_t size) {
            list.warp_units.push_back(unit(begin, size));
        });
}

void cut_digest_run(std::int64_t ptr, std::int64_t index, std::int64_t num_words, WordKind kind,
                    std::uint32_t row, UnitList<DigestUnit>& list) {
    const std::int64_t word = lanes::memory_word_bytes(kind);
    const auto unit = [&](std::int64_t begin, std::int64_t size) {
        return DigestUnit{ptr + begin, index + begin / word,
                          static_cast<std::uint32_t>(size / word), row};
    };
    cut_run(
        num_words * word, bytes_to(index, kDigestBlockWords) * word, kDigestWarpBytes,
        [&](std::int64_t begin) {
            list.block_units.push_back(unit(begin, kDigestWarpBytes * kBlockWarps));
        },
        [&](std::int64_t begin, std::int64_t size) {
            list.warp_units.push_back(unit(begin, size));
        });
}

// Small runs, as many in a unit as fit `unit_bytes`.
void cut_grid(std::int64_t num_runs, std::int64_t run_bytes, std::int64_t unit_bytes,
              std::size_t row, UnitList<GridUnit>& list) {
    const std::int64_t per_unit = std::max<std::int64_t>(unit_bytes / run_bytes, 1);
    if (num_runs / per_unit >= static_cast<std::int64_t>(kMaxUnits)) {
        throw std::invalid_argument("the table makes 2^31 or more units of work; split it");
    }
    for (std::int64_t run = 0; run < num_runs; run += per_unit) {
        list.warp_units.push_back({run, static_cast<std::uint32_t>(row),
                                   static_cast<std::uint32_t>(std::min(per_unit, num_runs - run))});
    }
}

void cut_segment(const Segment& original, SegmentUnits& units) {
    const Segment row = coalesced(original);
    auto& list = units.pieces[row.convert];
    const std::int64_t num_runs = row.num_runs();
    if (num_runs > 1 && row.num_bytes < kGridRunBytes) {
        cut_grid(num_runs, row.num_bytes, kCopyWarpBytes, units.grid_rows.size(), units.grid);
        units.grid_rows.push_back(row);
        return;
    }
    for (std::int64_t run = 0; run < num_runs; ++run) {
        const RunOffset offset = run_offset(row, run);
        cut_copy_run(row.source_ptr + offset.source, row.target_ptr + offset.target, row.num_bytes,
                     row.conversion(), list);
        check_count(list);
    }
}

// Validates as if pointers were addresses: an offset of 0 from a base is one too.
void validate_offsets(const Segment* segments, std::int64_t num_segments) {
    if (segments == nullptr || num_segments <= 0) return validate_segments(segments, num_segments);
    std::vector<Segment> shifted(segments, segments + num_segments);
    for (Segment& segment : shifted) {
        if (segment.source_ptr == 0) segment.source_ptr = 1;
        if (segment.target_ptr == 0) segment.target_ptr = 1;
    }
    validate_segments(shifted.data(), num_segments);
}

void add_segment(const Segment& segment, SegmentUnits& units) {
    const std::int64_t num_bytes = segment.source_bytes();
    if (num_bytes == 0) return;
    units.num_bytes += num_bytes;
    units.lowest_source = std::min(units.lowest_source, segment.source_ptr);
    units.lowest_target = std::min(units.lowest_target, segment.target_ptr);
    cut_segment(segment, units);
}

bool is_nested(const DigestDim& outer, const DigestDim& inner) {
    return outer.stride_bytes == inner.count * inner.stride_bytes &&
           outer.index_stride == inner.count * inner.index_stride;
}

// The same words with as few dims as possible.
DigestRow coalesced_digest(const DigestRow& row) {
    DigestRow merged = row;
    for (DigestDim& d : merged.dims) d = DigestDim{1, 0, 0};
    int slot = kDigestDims;
    for (int dim = kDigestDims - 1; dim >= 0; --dim) {
        const DigestDim& d = row.dims[dim];
        if (d.count == 1) continue;
        if (slot == kDigestDims && d.index_stride == merged.num_words &&
            d.stride_bytes == merged.num_words * merged.memory_word_bytes()) {
            merged.num_words *= d.count;
        } else if (slot < kDigestDims && is_nested(d, merged.dims[slot])) {
            merged.dims[slot].count *= d.count;
        } else {
            merged.dims[--slot] = d;
        }
    }
    return merged;
}

void add_digest(const DigestRow& original, std::uint32_t place, DigestUnits& units) {
    const DigestRow row = coalesced_digest(original);
    const std::int64_t num_runs = row.num_runs();
    const std::int64_t run_bytes = row.num_words * row.memory_word_bytes();
    if (num_runs * run_bytes == 0) return;
    units.num_bytes += num_runs * run_bytes;
    const WordKind kind = word_kind(row);
    if (num_runs > 1 && run_bytes < kGridRunBytes) {
        auto& list = units.grid[static_cast<int>(kind)];
        cut_grid(num_runs, run_bytes, kDigestWarpBytes, units.grid_rows.size(), list);
        check_count(list);
        units.grid_rows.push_back(row);
        units.grid_owners.push_back(units.rows[place].owner);
        return;
    }
    auto& list = units.pieces[static_cast<int>(kind)];
    for (std::int64_t run = 0; run < num_runs; ++run) {
        std::int64_t ptr = row.ptr;
        std::int64_t index = row.start_index;
        std::int64_t rest = run;
        for (int dim = kDigestDims - 1; dim >= 0; --dim) {
            const DigestDim& d = row.dims[dim];
            ptr += rest % d.count * d.stride_bytes;
            index += rest % d.count * d.index_stride;
            rest /= d.count;
        }
        cut_digest_run(ptr, index, row.num_words, kind, place, list);
        check_count(list);
    }
}

// Everything but the units.
DigestUnits digest_owners(const DigestRow* rows, std::int64_t num_rows, const std::int64_t* owners,
                          std::int64_t num_owners) {
    validate_digest_rows(rows, num_rows);
    DigestUnits units;
    units.num_owners = owners == nullptr ? num_rows : num_owners;
    if (num_rows >= static_cast<std::int64_t>(kMaxUnits)) {
        throw std::invalid_argument("the digest table has 2^31 or more rows; split it");
    }
    for (std::int64_t i = 0; i < num_rows; ++i) {
        const std::int64_t owner = owners == nullptr ? i : owners[i];
        if (owner < 0 || owner >= units.num_owners) {
            fail(i, "owner is " + std::to_string(owner) + ", expected 0 to " +
                        std::to_string(units.num_owners - 1));
        }
        units.rows.push_back(
            {static_cast<std::uint64_t>(rows[i].seed), static_cast<std::uint32_t>(owner), 0});
    }
    return units;
}

// Whether a digest row covers what a segment reads, run by run.
bool is_same_memory(const Segment& segment, const DigestRow& row) {
    bool is_same = segment.source_ptr == row.ptr && segment.convert == row.convert &&
                   segment.num_bytes == row.num_words * row.memory_word_bytes();
    for (int dim = 0; dim < kSegmentDims; ++dim) {
        const SegmentDim& a = segment.dims[dim];
        const DigestDim& b = row.dims[dim];
        is_same &= a.count == b.count && (a.count == 1 || a.source_stride_bytes == b.stride_bytes);
    }
    return is_same;
}

void add_fused(const Segment& segment, const DigestRow& row, std::uint32_t place,
               CopyDigestUnits& units) {
    const WordKind kind = word_kind(row);
    auto& list = units.fused[static_cast<int>(kind)];
    const std::int64_t word = lanes::memory_word_bytes(kind);
    UnitList<CopyUnit> cut;
    cut_copy_run(segment.source_ptr, segment.target_ptr, segment.num_bytes, segment.conversion(),
                 cut);
    const auto fused = [&](const CopyUnit& unit) {
        return CopyDigestUnit{unit, row.start_index + (unit.source_ptr - segment.source_ptr) / word,
                              place, 0};
    };
    for (const CopyUnit& unit : cut.block_units) list.block_units.push_back(fused(unit));
    for (const CopyUnit& unit : cut.warp_units) list.warp_units.push_back(fused(unit));
    check_count(list);
}

// Whether every cut of the copy falls between two words.
bool is_cut_between_words(const Segment& segment, const DigestRow& row) {
    return segment.num_bytes <= kCopyWarpBytes ||
           copy_head(segment.target_ptr, segment.conversion()) % row.memory_word_bytes() == 0;
}

}  // namespace

WordKind word_kind(const DigestRow& row) {
    if (row.conversion() == Convert::fp32_to_bf16) return WordKind::fp32_as_bf16;
    if (row.word_bytes == 1) return WordKind::bytes;
    return row.word_bytes == 2 ? WordKind::halves : WordKind::words;
}

SegmentUnits cut_segments(const Segment* segments, std::int64_t num_segments) {
    validate_offsets(segments, num_segments);
    SegmentUnits units;
    for (std::int64_t i = 0; i < num_segments; ++i) add_segment(segments[i], units);
    return units;
}

DigestUnits cut_digests(const DigestRow* rows, std::int64_t num_rows, const std::int64_t* owners,
                        std::int64_t num_owners) {
    DigestUnits units = digest_owners(rows, num_rows, owners, num_owners);
    for (std::int64_t i = 0; i < num_rows; ++i) {
        add_digest(rows[i], static_cast<std::uint32_t>(i), units);
    }
    return units;
}

CopyDigestUnits cut_copy_digests(const Segment* segments, const DigestRow* rows,
                                 std::int64_t num_rows, const std::int64_t* owners,
                                 std::int64_t num_owners) {
    validate_segments(segments, num_rows);
    CopyDigestUnits units;
    units.digested = digest_owners(rows, num_rows, owners, num_owners);
    for (std::int64_t i = 0; i < num_rows; ++i) {
        if (segments[i].source_bytes() == 0 && rows[i].num_words * rows[i].num_runs() == 0) {
            continue;
        }
        if (!is_same_memory(segments[i], rows[i])) {
            fail(i, "the segment does not read the memory of its digest row");
        }
        units.num_bytes += segments[i].source_bytes();
        const Segment segment = coalesced(segments[i]);
        const DigestRow row = coalesced_digest(rows[i]);
        if (segment.num_runs() == 1 && row.num_runs() == 1 && is_cut_between_words(segment, row)) {
            add_fused(segment, row, static_cast<std::uint32_t>(i), units);
        } else {
            add_segment(segments[i], units.copied);
            add_digest(rows[i], static_cast<std::uint32_t>(i), units.digested);
        }
    }
    return units;
}

}  // namespace weightsync
