#include "weightsync/attention.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "weightsync/attention_block.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

// Multiply-adds that are worth a thread of their own, at some 20 us to start one.
constexpr std::int64_t kMinThreadWork = 2'000'000;

[[noreturn]] void fail(const std::string& what) {
    throw std::invalid_argument("attention: " + what);
}

void check_shape(const AttentionStep& step) {
    if (step.num_rows < 0 || step.num_sequences < 0 || step.table_width < 0 || step.head_dim < 1 ||
        step.num_kv_heads < 1 || step.num_heads < 1 || step.page_size < 1 || step.num_pages < 1) {
        fail("a size is negative or zero");
    }
    if (step.num_heads % step.num_kv_heads != 0) {
        fail(std::to_string(step.num_heads) + " heads are not a multiple of " +
             std::to_string(step.num_kv_heads) + " KV heads");
    }
}

void check_sequence(const AttentionStep& step, std::int64_t sequence) {
    const std::int64_t begin = step.query_starts[sequence];
    const std::int64_t end = step.query_starts[sequence + 1];
    const std::int64_t context = step.context_lens[sequence];
    const std::string name = "sequence " + std::to_string(sequence) + ": ";
    if (begin < 0 || end <= begin || end > step.num_rows) {
        fail(name + "rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
             std::to_string(step.num_rows));
    }
    const std::int64_t num_pages = (context + step.page_size - 1) / step.page_size;
    if (context < end - begin || num_pages > step.table_width) {
        fail(name + "context of " + std::to_string(context) + " tokens, with " +
             std::to_string(end - begin) + " rows and room for " +
             std::to_string(step.table_width) + " pages of " + std::to_string(step.page_size));
    }
    for (std::int64_t i = 0; i < num_pages; ++i) {
        const std::int64_t page = step.block_tables[sequence * step.table_width + i];
        if (page < 0 || page >= step.num_pages) {
            fail(name + "page " + std::to_string(page) + " of " + std::to_string(step.num_pages));
        }
    }
}

void check(const AttentionStep& step) {
    check_shape(step);
    if (step.num_sequences > 0 && step.query_starts[0] != 0) fail("query_starts begin above 0");
    for (std::int64_t s = 0; s < step.num_sequences; ++s) check_sequence(step, s);
    for (std::int64_t row = 0; row < step.num_rows; ++row) {
        const std::int64_t slot = step.slot_mapping[row];
        if (slot < -1 || slot >= step.num_pages * step.page_size) {
            fail("row " + std::to_string(row) + ": slot " + std::to_string(slot) + " of " +
                 std::to_string(step.num_pages * step.page_size));
        }
    }
}

std::size_t element_bytes(FloatType dtype) { return dtype == FloatType::fp32 ? 4 : 2; }

void write_rows(const AttentionStep& step, void* cache, const void* rows, std::int64_t stride) {
    const std::size_t element = element_bytes(step.dtype);
    const std::size_t row_bytes =
        static_cast<std::size_t>(step.num_kv_heads * step.head_dim) * element;
    for (std::int64_t row = 0; row < step.num_rows; ++row) {
        const std::int64_t slot = step.slot_mapping[row];
        if (slot < 0) continue;
        std::memcpy(static_cast<unsigned char*>(cache) + static_cast<std::size_t>(slot) * row_bytes,
                    static_cast<const unsigned char*>(rows) +
                        static_cast<std::size_t>(row * stride) * element,
                    row_bytes);
    }
}

std::vector<AttentionBlock> cut_blocks(const AttentionStep& step) {
    std::vector<AttentionBlock> blocks;
    for (std::int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
        const std::int64_t end = step.query_starts[sequence + 1];
        for (std::int64_t row = step.query_starts[sequence]; row < end; row += kAttentionRowBlock) {
            const std::int64_t stop = std::min(end, row + kAttentionRowBlock);
            for (std::int64_t head = 0; head < step.num_kv_heads; ++head) {
                blocks.push_back({sequence, head, row, stop});
            }
        }
    }
    return blocks;
}

int useful_threads(const AttentionStep& step, std::size_t num_blocks, int num_threads) {
    std::int64_t work = 0;
    for (std::int64_t s = 0; s < step.num_sequences; ++s) {
        const std::int64_t rows = step.query_starts[s + 1] - step.query_starts[s];
        work += rows * step.context_lens[s] * step.num_heads * step.head_dim * 2;
    }
    const std::int64_t most = std::min<std::int64_t>(
        {num_threads, static_cast<std::int64_t>(num_blocks), work / kMinThreadWork + 1});
    return static_cast<int>(std::min<std::int64_t>(most, kMaxThreads));
}

void zero_padding(const AttentionStep& step) {
    const std::int64_t first = step.num_sequences > 0 ? step.query_starts[step.num_sequences] : 0;
    const std::size_t row_bytes =
        static_cast<std::size_t>(step.num_heads * step.head_dim) * element_bytes(step.dtype);
    std::memset(
        static_cast<unsigned char*>(step.output) + static_cast<std::size_t>(first) * row_bytes, 0,
        static_cast<std::size_t>(step.num_rows - first) * row_bytes);
}

}  // namespace

void attend_paged(const AttentionStep& step, int num_threads) {
    check(step);
    write_rows(step, step.cache_keys, step.key, step.key_stride);
    write_rows(step, step.cache_values, step.value, step.value_stride);
    zero_padding(step);
    const std::vector<AttentionBlock> blocks = cut_blocks(step);
    const AttendBlock attend_block = attend_block_kernel(step.dtype);
    std::atomic<std::size_t> next{0};
    run_on_threads(useful_threads(step, blocks.size(), num_threads), [&] {
        AttentionScratch scratch(step);
        for (std::size_t i = next++; i < blocks.size(); i = next++) {
            attend_block(step, blocks[i], scratch);
        }
    });
}

}  // namespace weightsync
