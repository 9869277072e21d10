// Copying one contiguous run past the cache.
#pragma once

#include <cstddef>

namespace weightsync {

// memcpy with non-temporal stores: no read of the target's lines and nothing evicted for them.
// Worth it only when much more than the cache is moved. `next_source` (or null) is what the caller
// will read next; its first lines are prefetched while this run ends. Call stream_fence() after the
// last run and before another thread is told.
using StreamCopy = void (*)(void* target, const void* source, std::size_t num_bytes,
                            const void* next_source);

struct StreamKernel {
    StreamCopy copy;
    const char* name;  // for build_info
};

// The fastest kernel this CPU can run, picked once.
const StreamKernel& stream_kernel();

void stream_fence();

}  // namespace weightsync
