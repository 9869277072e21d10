#include "weightsync/process_read.hpp"

#include <limits.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "weightsync/memory.hpp"
#include "weightsync/parallel.hpp"
#include "weightsync/stream.hpp"

namespace weightsync {
namespace {

// One system call moves at most this much, which bounds how late a cancel is seen.
constexpr std::int64_t kMaxCallBytes = std::int64_t{4} << 20;
constexpr std::int64_t kMinGrainBytes = std::int64_t{256} << 10;
constexpr std::size_t kMaxCallRuns = IOV_MAX;

// The kernel stores what it reads with ordinary stores, which first fetch every line of the target
// from memory. A large read therefore goes through a buffer that stays in the second-level cache,
// and from there past the cache: on two Zen 3 cores 6.3 instead of 5.6 GB/s.
constexpr std::int64_t kBounceBytes = std::int64_t{512} << 10;

// One a thread; threads live for one call, so it is gone after it.
char* bounce_buffer() {
    thread_local std::vector<char> buffer(static_cast<std::size_t>(kBounceBytes));
    return buffer.data();
}

std::string hex(const void* ptr) {
    char text[32];
    std::snprintf(text, sizeof(text), "%p", ptr);
    return text;
}

// The runs of one system call.
class ReadBatch {
  public:
    // `bounce` is kBounceBytes of memory to read through, or null to read into the targets.
    ReadBatch(pid_t pid, char* bounce) : pid_(pid), bounce_(bounce) {
        source_.reserve(kMaxCallRuns);
        target_.reserve(kMaxCallRuns);
    }

    bool is_full() const { return source_.size() == kMaxCallRuns; }

    // Runs that continue the one before, on either side, share its entry.
    void add(std::int64_t source_ptr, std::int64_t target_ptr, std::int64_t num_bytes) {
        append(source_, source_ptr, num_bytes);
        append(target_, target_ptr, num_bytes);
        num_bytes_ += num_bytes;
    }

    // Reads everything added since the last flush and returns its bytes.
    std::int64_t flush() {
        const std::int64_t flushed = num_bytes_;
        if (bounce_ != nullptr && flushed <= kBounceBytes) {
            iovec through{bounce_, static_cast<std::size_t>(flushed)};
            read_into(&through, 1);
            store_from_bounce();
        } else {
            read_into(target_.data(), target_.size());
        }
        source_.clear();
        target_.clear();
        num_bytes_ = 0;
        return flushed;
    }

  private:
    // Reads num_bytes_ from the sources into these entries, which are used up.
    void read_into(iovec* target, std::size_t num_targets) {
        iovec* const target_end = target + num_targets;
        iovec* source = source_.data();
        std::int64_t left = num_bytes_;
        while (left > 0) {
            const ssize_t done =
                process_vm_readv(pid_, target, static_cast<unsigned long>(target_end - target),
                                 source, static_cast<unsigned long>(source_end() - source), 0);
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0) fail(done < 0 ? errno : EFAULT, *source, *target);
            source = advanced(source, static_cast<std::size_t>(done));
            target = advanced(target, static_cast<std::size_t>(done));
            left -= done;
        }
    }

    void store_from_bounce() const {
        const char* from = bounce_;
        for (const iovec& run : target_) {
            stream_kernel().copy(run.iov_base, from, run.iov_len, nullptr);
            from += run.iov_len;
        }
        stream_fence();
    }

    iovec* source_end() { return source_.data() + source_.size(); }

    static void append(std::vector<iovec>& runs, std::int64_t ptr, std::int64_t num_bytes) {
        auto* base = reinterpret_cast<char*>(ptr);
        if (!runs.empty() &&
            static_cast<char*>(runs.back().iov_base) + runs.back().iov_len == base) {
            runs.back().iov_len += static_cast<std::size_t>(num_bytes);
        } else {
            runs.push_back(iovec{base, static_cast<std::size_t>(num_bytes)});
        }
    }

    // The first entry not wholly read; what was read of it is cut off.
    static iovec* advanced(iovec* run, std::size_t num_bytes) {
        while (num_bytes > 0 && num_bytes >= run->iov_len) {
            num_bytes -= run->iov_len;
            ++run;
        }
        if (num_bytes > 0) {
            run->iov_base = static_cast<char*>(run->iov_base) + num_bytes;
            run->iov_len -= num_bytes;
        }
        return run;
    }

    [[noreturn]] void fail(int error, const iovec& source, const iovec& target) const {
        throw std::system_error(error, std::generic_category(),
                                "process_vm_readv of " + std::to_string(source.iov_len) +
                                    " bytes at " + hex(source.iov_base) + " in process " +
                                    std::to_string(pid_) + " to " + hex(target.iov_base));
    }

    pid_t pid_;
    char* bounce_;
    std::vector<iovec> source_;
    std::vector<iovec> target_;
    std::int64_t num_bytes_ = 0;
};

// Adds source bytes [begin, end) of a segment, run by run; a full batch is flushed on the way.
std::int64_t add_runs(ReadBatch& batch, const Segment& original, std::int64_t begin,
                      std::int64_t end) {
    const Segment segment = coalesced(original);
    std::int64_t flushed = 0;
    std::int64_t run = begin / segment.num_bytes;
    std::int64_t within = begin % segment.num_bytes;
    while (begin < end) {
        if (batch.is_full()) flushed += batch.flush();
        const RunOffset offset = run_offset(segment, run);
        const std::int64_t count = std::min(segment.num_bytes - within, end - begin);
        batch.add(segment.source_ptr + offset.source + within,
                  segment.target_ptr + offset.target + within, count);
        begin += count;
        ++run;
        within = 0;
    }
    return flushed;
}

void validate_read(pid_t pid, const Segment* segments, std::int64_t num_segments) {
    if (pid <= 0) {
        throw std::invalid_argument("pid is " + std::to_string(pid) + ", expected > 0");
    }
    validate_segments(segments, num_segments);
    for (std::int64_t row = 0; row < num_segments; ++row) {
        if (segments[row].conversion() != Convert::none) {
            throw std::invalid_argument("segment table row " + std::to_string(row) +
                                        ": convert is not supported in a read of another process; "
                                        "read first, then copy_segments");
        }
    }
}

}  // namespace

std::int64_t read_process_segments(pid_t pid, const Segment* segments, std::int64_t num_segments,
                                   int num_threads, const CallControl& control) {
    validate_read(pid, segments, num_segments);
    const WorkAxis axis(num_segments, [&](std::int64_t i) { return segments[i].source_bytes(); });
    const bool is_streamed = axis.total() >= streaming_threshold_bytes();
    const std::int64_t grain =
        std::clamp(axis.total() / (std::max(num_threads, 1) * 8), kMinGrainBytes,
                   is_streamed ? kBounceBytes : kMaxCallBytes);
    std::atomic<std::int64_t> total{0};
    axis.run(num_threads, grain, [&](std::int64_t begin, std::int64_t end) {
        if (control.is_cancelled()) return false;
        ReadBatch batch(pid, is_streamed ? bounce_buffer() : nullptr);
        std::int64_t num_bytes = 0;
        axis.for_range(begin, end, [&](std::int64_t i, std::int64_t from, std::int64_t to) {
            num_bytes += add_runs(batch, segments[i], from, to);
        });
        num_bytes += batch.flush();
        total.fetch_add(num_bytes, std::memory_order_relaxed);
        control.advance(num_bytes);
        return true;
    });
    return total.load();
}

}  // namespace weightsync
