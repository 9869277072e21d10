#include "weightsync/digest_gather.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "weightsync/transpose.hpp"

namespace weightsync {
namespace {

// Words gathered along the index at a time; a tile's worth of rows of them is 64 KiB of any word.
constexpr std::int64_t kGatherWords = 256;

bool is_along(const DigestDim& dim) { return dim.count > 1 && dim.index_stride == 1; }

}  // namespace

bool DigestGather::suits(const DigestRow& row) {
    return row.num_words == 1 && std::any_of(std::begin(row.dims), std::end(row.dims), is_along);
}

DigestGather::DigestGather(const DigestRow& row) : row_(row) {
    DigestDim dims[kDigestDims];
    std::copy(std::begin(row.dims), std::end(row.dims), dims);
    std::iter_swap(std::find_if(std::begin(dims), std::end(dims), is_along), dims);
    const auto rank = [](const DigestDim& d) {
        return d.count == 1 ? INT64_MAX : std::abs(d.stride_bytes);
    };
    if (rank(dims[2]) < rank(dims[1])) std::swap(dims[1], dims[2]);
    along_ = dims[0];
    across_ = dims[1];
    rest_ = dims[2];
    block_ = std::min(tile_elements(row.memory_word_bytes()), across_.count);
}

std::uint64_t DigestGather::digest_units(std::int64_t begin, std::int64_t end) const {
    std::uint64_t sum = 0;
    while (begin < end) {
        const std::int64_t panel = begin / along_.count;
        const std::int64_t first = begin % along_.count;
        const std::int64_t last = std::min(along_.count, first + (end - begin));
        sum += digest_panel(panel, first, last);
        begin += last - first;
    }
    return sum;
}

std::uint64_t DigestGather::digest_panel(std::int64_t panel, std::int64_t begin,
                                         std::int64_t end) const {
    alignas(64) unsigned char scratch[kTileRowBytes * kGatherWords];
    const std::int64_t word_bytes = row_.memory_word_bytes();
    const std::int64_t pitch = kGatherWords * word_bytes;
    const std::int64_t first_line = panel % num_blocks() * block_;
    const std::int64_t num_lines = std::min(block_, across_.count - first_line);
    const std::int64_t rest = panel / num_blocks();
    const std::int64_t offset = rest * rest_.stride_bytes + first_line * across_.stride_bytes;
    const std::int64_t index =
        row_.start_index + rest * rest_.index_stride + first_line * across_.index_stride;
    std::uint64_t sum = 0;
    for (std::int64_t word = begin; word < end; word += kGatherWords) {
        const std::int64_t num_words = std::min(kGatherWords, end - word);
        const Segment segment{row_.ptr + offset + word * along_.stride_bytes,
                              reinterpret_cast<std::int64_t>(scratch),
                              word_bytes,
                              static_cast<std::int64_t>(Convert::none),
                              {{1, 0, 0},
                               {num_lines, across_.stride_bytes, pitch},
                               {num_words, along_.stride_bytes, word_bytes}}};
        const ElementGrid grid(segment);
        grid.copy_units(0, grid.num_units(), nullptr);
        for (std::int64_t line = 0; line < num_lines; ++line) {
            sum += digest_run(
                row_, scratch + line * pitch,
                static_cast<std::uint64_t>(index + line * across_.index_stride + word), num_words);
        }
    }
    return sum;
}

}  // namespace weightsync
