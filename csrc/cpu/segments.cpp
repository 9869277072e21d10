#include "weightsync/segments.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "weightsync/convert_run.hpp"
#include "weightsync/memory.hpp"
#include "weightsync/parallel.hpp"
#include "weightsync/stream.hpp"
#include "weightsync/transpose.hpp"

namespace weightsync {
namespace {

// Below this, a run is better off in cache: its two partial lines cost more than streaming saves.
constexpr std::int64_t kMinStreamedRunBytes = 512;
// A thread takes at least this much at a time, so that small calls stay on one thread...
constexpr std::int64_t kMinGrainBytes = std::int64_t{256} << 10;
// ...and at most this much, so that threads finish together.
constexpr std::int64_t kMaxGrainBytes = std::int64_t{16} << 20;
constexpr std::int64_t kGrainsPerThread = 8;
// Where a segment may be cut: a whole line of the target, and a whole element of any size.
constexpr std::int64_t kCutBytes = 128;

struct CopyContext {
    bool is_streaming;
    StreamCopy stream;
};

unsigned char* address(std::int64_t ptr) { return reinterpret_cast<unsigned char*>(ptr); }

void copy_run(const CopyContext& context, unsigned char* target, const unsigned char* source,
              std::int64_t num_bytes, Convert convert, const unsigned char* next_source) {
    if (convert == Convert::fp32_to_bf16) {
        // Converting into a cached page first lets the same streaming stores finish the job.
        constexpr std::int64_t page_elements = 2048;
        const bool is_streaming = context.is_streaming && num_bytes / 2 >= kMinStreamedRunBytes;
        alignas(64) unsigned char page[page_elements * 2];
        for (std::int64_t left = num_bytes / 4; left > 0;) {
            const std::int64_t count = std::min(left, page_elements);
            fp32_to_bf16_run(is_streaming ? page : target, source, count);
            if (is_streaming) {
                context.stream(target, page, static_cast<std::size_t>(count) * 2, nullptr);
            }
            target += count * 2;
            source += count * 4;
            left -= count;
        }
    } else if (context.is_streaming && num_bytes >= kMinStreamedRunBytes) {
        context.stream(target, source, static_cast<std::size_t>(num_bytes), next_source);
    } else {
        std::memcpy(target, source, static_cast<std::size_t>(num_bytes));
    }
}

// Copies source bytes [begin, end) of a coalesced segment, run by run.
void copy_runs(const CopyContext& context, const Segment& segment, std::int64_t begin,
               std::int64_t end, const unsigned char* next_source) {
    std::int64_t run = begin / segment.num_bytes;
    std::int64_t within = begin % segment.num_bytes;
    while (begin < end) {
        const RunOffset offset = run_offset(segment, run);
        const std::int64_t count = std::min(segment.num_bytes - within, end - begin);
        begin += count;
        ++run;
        const unsigned char* source = address(segment.source_ptr + offset.source + within);
        const unsigned char* next = next_source;
        if (within + count < segment.num_bytes) {
            next = source + count;
        } else if (begin < end) {
            next = address(segment.source_ptr + run_offset(segment, run).source);
        }
        copy_run(context,
                 address(segment.target_ptr + offset.target +
                         converted_bytes(within, segment.conversion())),
                 source, count, segment.conversion(), next);
        within = 0;
    }
}

// How one segment is walked: run by run, or, if a run is a single small element, in tiles.
struct Walk {
    Segment segment;
    bool is_tiled;
    ElementGrid grid;  // set if is_tiled

    explicit Walk(const Segment& original) : segment(coalesced(original)) {
        is_tiled = is_elementwise(segment);
        if (is_tiled) grid = ElementGrid(segment);
    }
};

bool is_plain(const Segment& segment) { return segment.num_runs() == 1; }

std::int64_t walk_cost(const Segment& segment) {
    if (segment.source_bytes() == 0) return 0;
    if (is_plain(segment)) return segment.num_bytes;
    const Walk walk(segment);
    return walk.is_tiled ? walk.grid.num_units() * walk.grid.unit_bytes()
                         : walk.segment.source_bytes();
}

// Copies the part [begin, end) of a segment's cost and returns its source bytes. Cuts are rounded
// down to where the walk can be cut, the same way on both sides of a cut.
std::int64_t copy_part(const CopyContext& context, const Segment& original, std::int64_t begin,
                       std::int64_t end, bool is_last, const unsigned char* next_source) {
    const Walk walk(original);
    if (walk.is_tiled) {
        return walk.grid.copy_units(begin / walk.grid.unit_bytes(), end / walk.grid.unit_bytes(),
                                    context.is_streaming ? context.stream : nullptr);
    }
    begin = begin / kCutBytes * kCutBytes;
    if (!is_last) end = end / kCutBytes * kCutBytes;
    if (begin < end) copy_runs(context, walk.segment, begin, end, next_source);
    return std::max<std::int64_t>(end - begin, 0);
}

[[noreturn]] void fail(std::int64_t row, const std::string& what) {
    throw std::invalid_argument("segment table row " + std::to_string(row) + ": " + what);
}

}  // namespace

void validate_segments(const Segment* segments, std::int64_t num_segments) {
    if (num_segments < 0) {
        throw std::invalid_argument("num_segments is " + std::to_string(num_segments) +
                                    ", expected >= 0");
    }
    if (segments == nullptr && num_segments > 0) {
        throw std::invalid_argument("segment table is null");
    }
    std::int64_t sum = 0;
    for (std::int64_t row = 0; row < num_segments; ++row) {
        const Segment& segment = segments[row];
        if (segment.num_bytes < 0) {
            fail(row, "num_bytes is " + std::to_string(segment.num_bytes) + ", expected >= 0");
        }
        std::int64_t total = segment.num_bytes;
        for (int dim = 0; dim < kSegmentDims; ++dim) {
            const std::int64_t count = segment.dims[dim].count;
            if (count < 0) {
                fail(row, "count" + std::to_string(dim) + " is " + std::to_string(count) +
                              ", expected >= 0 (1 if unused)");
            }
            if (__builtin_mul_overflow(total, count, &total)) {
                fail(row, "num_bytes times counts exceeds 2^63");
            }
        }
        if (segment.convert != 0 && segment.convert != 1) {
            fail(row, "convert is " + std::to_string(segment.convert) +
                          ", expected 0 (none) or 1 (fp32_to_bf16)");
        }
        if (segment.convert == 1 && segment.num_bytes % 4 != 0) {
            fail(row, "num_bytes is " + std::to_string(segment.num_bytes) +
                          ", expected a multiple of 4 to convert fp32");
        }
        if (total > 0 && (segment.source_ptr <= 0 || segment.target_ptr <= 0)) {
            fail(row, "source_ptr or target_ptr is not an address");
        }
        if (__builtin_add_overflow(sum, total, &sum)) fail(row, "the table exceeds 2^63 bytes");
    }
}

std::int64_t copy_segments(const Segment* segments, std::int64_t num_segments, int num_threads,
                           const CallControl& control) {
    validate_segments(segments, num_segments);
    const WorkAxis axis(num_segments, [&](std::int64_t i) { return walk_cost(segments[i]); });
    const CopyContext context{axis.total() >= streaming_threshold_bytes(), stream_kernel().copy};
    const std::int64_t share = axis.total() / (std::max(num_threads, 1) * kGrainsPerThread);
    const std::int64_t grain =
        std::clamp(share / kCutBytes * kCutBytes, kMinGrainBytes, kMaxGrainBytes);

    std::atomic<std::int64_t> copied{0};
    const auto copy_range = [&](std::int64_t begin, std::int64_t end) {
        std::int64_t range_bytes = 0;
        axis.for_range(begin, end, [&](std::int64_t i, std::int64_t from, std::int64_t to) {
            const Segment& segment = segments[i];
            const unsigned char* next =
                i + 1 < num_segments ? address(segments[i + 1].source_ptr) : nullptr;
            if (is_plain(segment) && from == 0 && to == segment.num_bytes) {
                copy_run(context, address(segment.target_ptr), address(segment.source_ptr), to,
                         segment.conversion(), next);
                range_bytes += to;
            } else {
                range_bytes += copy_part(context, segment, from, to, to == axis.cost(i), next);
            }
        });
        copied.fetch_add(range_bytes, std::memory_order_relaxed);
        control.advance(range_bytes);
    };
    axis.run(num_threads, grain, [&](std::int64_t begin, std::int64_t end) {
        while (begin < end) {
            if (control.is_cancelled()) return false;
            const std::int64_t stop = std::min(begin + kCancelGrainBytes, end);
            copy_range(begin, stop);
            begin = stop;
        }
        // Streamed bytes are unordered until fenced, and this thread may be done after this grain.
        if (context.is_streaming) stream_fence();
        return true;
    });
    return copied.load();
}

}  // namespace weightsync
