// Digest rows whose indices run across memory: a transposed tensor, gathered before it is summed.
#pragma once

#include <cstdint>

#include "weightsync/digest.hpp"

namespace weightsync {

// Single words that are neighbours by index but not in memory would each need a block factor of
// their own. Gathered into index order first, eight words share one, and memory is read in whole
// lines.
class DigestGather {
  public:
    // Whether some dim of a coalesced row steps from index to index.
    static bool suits(const DigestRow& row);

    explicit DigestGather(const DigestRow& row);

    // The row is cut in units: one `along_` index of one block of `across_`.
    std::int64_t num_units() const { return rest_.count * num_blocks() * along_.count; }
    std::int64_t unit_words() const { return block_; }

    // The digest of units [begin, end).
    std::uint64_t digest_units(std::int64_t begin, std::int64_t end) const;

  private:
    std::int64_t num_blocks() const { return (across_.count + block_ - 1) / block_; }
    std::uint64_t digest_panel(std::int64_t panel, std::int64_t begin, std::int64_t end) const;

    DigestRow row_;
    DigestDim rest_;
    DigestDim across_;  // the densest in memory of the others
    DigestDim along_;   // index stride 1
    std::int64_t block_;
};

}  // namespace weightsync
