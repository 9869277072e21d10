#include "weightsync/digest.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "weightsync/digest_gather.hpp"
#include "weightsync/digest_kernels.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

constexpr std::int64_t kMinGrainBytes = std::int64_t{256} << 10;
constexpr std::int64_t kMaxGrainBytes = std::int64_t{16} << 20;

std::uint32_t load_word(const unsigned char* ptr, const DigestRow& row) {
    std::uint32_t word = 0;
    // Little-endian: the low bytes of `word` are the ones read.
    std::memcpy(&word, ptr, static_cast<std::size_t>(row.memory_word_bytes()));
    return row.conversion() == Convert::fp32_to_bf16 ? fp32_bits_to_bf16(word) : word;
}

DigestBlocks block_kernel(const DigestRow& row) {
    const DigestKernels& kernels = digest_kernels();
    if (row.conversion() == Convert::fp32_to_bf16) return kernels.fp32_as_bf16;
    if (row.word_bytes == 1) return kernels.bytes;
    return row.word_bytes == 2 ? kernels.halves : kernels.words;
}

// Words that lie in one block, fewer than all of it.
std::uint64_t digest_within_block(const DigestRow& row, const unsigned char* ptr,
                                  std::uint64_t index, std::int64_t num_words) {
    if (num_words == 0) return 0;
    std::uint64_t inner = 0;
    for (std::int64_t i = 0; i < num_words; ++i) {
        inner += digest_word_factor(index + static_cast<std::uint64_t>(i)) *
                 load_word(ptr + i * row.memory_word_bytes(), row);
    }
    const auto seed = static_cast<std::uint64_t>(row.seed);
    return digest_block_factor(seed, index / kDigestBlockWords) * inner;
}

// The same words with as few dims as possible.
DigestRow coalesced(const DigestRow& row) {
    DigestRow merged = row;
    for (DigestDim& d : merged.dims) d = DigestDim{1, 0, 0};
    int slot = kDigestDims;
    for (int dim = kDigestDims - 1; dim >= 0; --dim) {
        const DigestDim& d = row.dims[dim];
        if (d.count == 1) continue;
        if (slot == kDigestDims && d.index_stride == merged.num_words &&
            d.stride_bytes == merged.num_words * merged.memory_word_bytes()) {
            merged.num_words *= d.count;
        } else {
            merged.dims[--slot] = d;
        }
    }
    return merged;
}

// Words [begin, end) of a coalesced row, counted run by run.
std::uint64_t digest_runs(const DigestRow& row, std::int64_t begin, std::int64_t end) {
    std::uint64_t sum = 0;
    std::int64_t run = begin / row.num_words;
    std::int64_t within = begin % row.num_words;
    while (begin < end) {
        std::int64_t offset = within * row.memory_word_bytes();
        std::int64_t index = row.start_index + within;
        std::int64_t rest = run;
        for (int dim = kDigestDims - 1; dim >= 0; --dim) {
            const DigestDim& d = row.dims[dim];
            offset += rest % d.count * d.stride_bytes;
            index += rest % d.count * d.index_stride;
            rest /= d.count;
        }
        const std::int64_t count = std::min(row.num_words - within, end - begin);
        sum += digest_run(row, reinterpret_cast<const unsigned char*>(row.ptr + offset),
                          static_cast<std::uint64_t>(index), count);
        begin += count;
        ++run;
        within = 0;
    }
    return sum;
}

std::int64_t cost_words(const DigestRow& original) {
    const std::int64_t num_words = original.num_runs() * original.num_words;
    if (num_words == 0 || original.num_runs() == 1) return num_words;
    const DigestRow row = coalesced(original);
    if (!DigestGather::suits(row)) return num_words;
    const DigestGather gather(row);
    return gather.num_units() * gather.unit_words();
}

// The part [begin, end) of a row's cost. A cut inside a unit goes to the left of it, on both sides.
std::uint64_t digest_part(const DigestRow& original, std::int64_t begin, std::int64_t end) {
    const DigestRow row = coalesced(original);
    if (!DigestGather::suits(row)) return digest_runs(row, begin, end);
    const DigestGather gather(row);
    return gather.digest_units(begin / gather.unit_words(), end / gather.unit_words());
}

[[noreturn]] void fail(std::int64_t row, const std::string& what) {
    throw std::invalid_argument("digest table row " + std::to_string(row) + ": " + what);
}

void validate_words(const DigestRow& row, std::int64_t i) {
    if (row.convert != 0 && row.convert != 1) {
        fail(i, "convert is " + std::to_string(row.convert) +
                    ", expected 0 (none) or 1 (fp32_to_bf16)");
    }
    if (row.word_bytes != 1 && row.word_bytes != 2 && row.word_bytes != 4) {
        fail(i, "word_bytes is " + std::to_string(row.word_bytes) +
                    ", expected 1, 2 or 4 (wider elements are 4-byte words)");
    }
    if (row.convert == 1 && row.word_bytes != 2) {
        fail(i, "word_bytes is " + std::to_string(row.word_bytes) +
                    ", expected 2 for fp32_to_bf16 (the words digested)");
    }
    if (row.num_words < 0) {
        fail(i, "num_words is " + std::to_string(row.num_words) + ", expected >= 0");
    }
}

// Every word's index must fit, or shards of one tensor would not add up.
void validate_indices(const DigestRow& row, std::int64_t i) {
    std::int64_t lowest = row.start_index;
    std::int64_t highest = 0;
    bool is_too_large = __builtin_add_overflow(row.start_index, row.num_words, &highest);
    for (const DigestDim& d : row.dims) {
        std::int64_t reach = 0;
        is_too_large |= __builtin_mul_overflow(d.count - 1, d.index_stride, &reach);
        is_too_large |= __builtin_add_overflow(lowest, std::min<std::int64_t>(reach, 0), &lowest);
        is_too_large |= __builtin_add_overflow(highest, std::max<std::int64_t>(reach, 0), &highest);
    }
    if (is_too_large) fail(i, "a word index exceeds 2^63");
    if (lowest < 0) {
        fail(i, "the lowest word index is " + std::to_string(lowest) + ", expected >= 0");
    }
}

}  // namespace

std::uint64_t digest_run(const DigestRow& row, const unsigned char* ptr, std::uint64_t index,
                         std::int64_t num_words) {
    const std::int64_t stride = row.memory_word_bytes();
    const auto into_block = static_cast<std::int64_t>(index % kDigestBlockWords);
    std::int64_t head = into_block == 0 ? 0 : kDigestBlockWords - into_block;
    head = std::min(head, num_words);
    std::uint64_t sum = digest_within_block(row, ptr, index, head);
    ptr += head * stride;
    index += static_cast<std::uint64_t>(head);
    num_words -= head;
    const std::int64_t num_blocks = num_words / kDigestBlockWords;
    if (num_blocks > 0) {
        sum += block_kernel(row)(static_cast<std::uint64_t>(row.seed), index / kDigestBlockWords,
                                 ptr, num_blocks);
    }
    const std::int64_t done = num_blocks * kDigestBlockWords;
    return sum + digest_within_block(row, ptr + done * stride,
                                     index + static_cast<std::uint64_t>(done), num_words - done);
}

void validate_digest_rows(const DigestRow* rows, std::int64_t num_rows) {
    if (num_rows < 0) {
        throw std::invalid_argument("num_rows is " + std::to_string(num_rows) + ", expected >= 0");
    }
    if (rows == nullptr && num_rows > 0) throw std::invalid_argument("digest table is null");
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < num_rows; ++i) {
        const DigestRow& row = rows[i];
        validate_words(row, i);
        std::int64_t total = 0;
        bool is_too_large = __builtin_mul_overflow(row.num_words, row.memory_word_bytes(), &total);
        for (int dim = 0; dim < kDigestDims; ++dim) {
            const std::int64_t count = row.dims[dim].count;
            if (count < 0) {
                fail(i, "count" + std::to_string(dim) + " is " + std::to_string(count) +
                            ", expected >= 0 (1 if unused)");
            }
            is_too_large |= __builtin_mul_overflow(total, count, &total);
        }
        is_too_large |= __builtin_add_overflow(sum, total, &sum);
        if (is_too_large) fail(i, "the table exceeds 2^63 bytes");
        if (total == 0) continue;
        if (row.ptr <= 0) fail(i, "ptr is not an address");
        validate_indices(row, i);
    }
}

void digest_segments(const DigestRow* rows, std::int64_t num_rows, std::uint64_t* out,
                     int num_threads) {
    validate_digest_rows(rows, num_rows);
    std::fill(out, out + num_rows, std::uint64_t{0});
    const WorkAxis axis(num_rows, [&](std::int64_t i) {
        return cost_words(rows[i]) * rows[i].memory_word_bytes();
    });
    const std::int64_t grain =
        std::clamp(axis.total() / (std::max(num_threads, 1) * 8), kMinGrainBytes, kMaxGrainBytes);
    axis.run(num_threads, grain, [&](std::int64_t begin, std::int64_t end) {
        axis.for_range(begin, end, [&](std::int64_t i, std::int64_t from, std::int64_t to) {
            // A cut inside a word goes to the left of it, on both sides of the cut.
            const std::int64_t word_bytes = rows[i].memory_word_bytes();
            const std::uint64_t part = digest_part(rows[i], from / word_bytes, to / word_bytes);
            __atomic_fetch_add(&out[i], part, __ATOMIC_RELAXED);
        });
        return true;
    });
}

}  // namespace weightsync
