// Decoded changes of many spans as one table that a device applies, and takes back, in one launch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weightsync/hd.hpp"

namespace weightsync {

// Changes of one span. Addresses are of the device; `positions` are uint32, `values` and `former`
// elements. `count` positions, all below `num_elements` of `target`.
struct PatchRow {
    std::uint64_t target;
    std::uint64_t positions;
    std::uint64_t values;
    std::uint64_t former;
    std::int64_t count;
    std::int64_t element_bytes;  // 1, 2 or 4
};

// Some changes of one row: what one block of threads does.
struct PatchUnit {
    std::uint32_t row;
    std::uint32_t start;
};

inline constexpr std::uint32_t kPatchUnit = 2048;

enum class PatchWork : int {
    exchange = 0,   // values go in, what was there goes to `former`
    take_back = 1,  // `former` goes in
    compare = 2,    // how many elements are not their value
    compare_former = 3,
};

// Does one change; whether it differs, for the comparisons.
template <typename T>
WEIGHTSYNC_HD_INLINE bool patch_one(PatchWork work, const PatchRow& row, std::int64_t i) {
    T* live =
        reinterpret_cast<T*>(row.target) + reinterpret_cast<const std::uint32_t*>(row.positions)[i];
    const T* values = reinterpret_cast<const T*>(row.values);
    T* former = reinterpret_cast<T*>(row.former);
    switch (work) {
        case PatchWork::exchange: {
            const T old = *live;
            *live = values[i];
            former[i] = old;
            return false;
        }
        case PatchWork::take_back:
            *live = former[i];
            return false;
        case PatchWork::compare:
            return *live != values[i];
        default:
            return *live != former[i];
    }
}

WEIGHTSYNC_HD_INLINE bool patch_any(PatchWork work, const PatchRow& row, std::int64_t i) {
    switch (row.element_bytes) {
        case 1:
            return patch_one<std::uint8_t>(work, row, i);
        case 2:
            return patch_one<std::uint16_t>(work, row, i);
        default:
            return patch_one<std::uint32_t>(work, row, i);
    }
}

// Throws std::invalid_argument for a null address, an unaligned one, or another element size.
std::vector<PatchUnit> cut_patch(const PatchRow* rows, std::int64_t num_rows);

// The CPU's twin of a launch, for tests: rows of this process's memory. Returns the differences.
std::int64_t run_patch(const PatchRow* rows, std::int64_t num_rows, PatchWork work);

// On a device; see cuda_tables.hpp for what holds of streams and errors.
class CudaPatchTable {
  public:
    CudaPatchTable(const PatchRow* rows, std::int64_t num_rows, int device);
    ~CudaPatchTable();

    // Enqueues the work, waits for it, and returns the differences (0 but for comparisons).
    std::int64_t run(std::uintptr_t stream, PatchWork work);
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace weightsync
