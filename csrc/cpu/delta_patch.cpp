#include "weightsync/delta_patch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weightsync {
namespace {

void check_row(const PatchRow& row, std::int64_t number) {
    const auto size = static_cast<std::uint64_t>(row.element_bytes);
    const bool has_size = size == 1 || size == 2 || size == 4;
    const bool has_word = row.word_shift >= 0 && row.word_shift <= 2;
    const bool has_addresses = row.target != 0 && row.positions != 0 && row.values != 0 &&
                               row.former != 0 && row.count >= 0 && row.count <= UINT32_MAX;
    if (!has_size || !has_word || !has_addresses ||
        (row.target | row.values | row.former) % size != 0 || row.positions % 4 != 0) {
        throw std::invalid_argument("patch row " + std::to_string(number) +
                                    ": an address is null or unaligned, or elements of " +
                                    std::to_string(row.element_bytes) + " bytes in words of 2^" +
                                    std::to_string(row.word_shift));
    }
}

}  // namespace

std::vector<PatchUnit> cut_patch(const PatchRow* rows, std::int64_t num_rows) {
    std::vector<PatchUnit> units;
    for (std::int64_t i = 0; i < num_rows; ++i) {
        check_row(rows[i], i);
        for (std::int64_t start = 0; start < rows[i].count; start += kPatchUnit) {
            units.push_back({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(start)});
        }
    }
    return units;
}

namespace {

template <PatchWork work>
PatchFound run_units(const PatchRow* rows, const std::vector<PatchUnit>& units) {
    PatchFound found;
    for (const PatchUnit& unit : units) {
        for (std::uint32_t thread = 0; thread < kPatchThreads; ++thread) {
            found.add(patch_thread<work>(rows[unit.row], unit, thread));
        }
    }
    return found;
}

PatchFound run_work(const PatchRow* rows, const std::vector<PatchUnit>& units, PatchWork work) {
    switch (work) {
        case PatchWork::exchange:
            return run_units<PatchWork::exchange>(rows, units);
        case PatchWork::take_back:
            return run_units<PatchWork::take_back>(rows, units);
        case PatchWork::compare:
            return run_units<PatchWork::compare>(rows, units);
        default:
            return run_units<PatchWork::compare_former>(rows, units);
    }
}

}  // namespace

PatchFound run_patch(const PatchRow* rows, std::int64_t num_rows,
                     const std::vector<PatchWork>& works) {
    const std::vector<PatchUnit> units = cut_patch(rows, num_rows);
    PatchFound found;
    for (const PatchWork work : works) found.add(run_work(rows, units, work));
    return found;
}

}  // namespace weightsync
