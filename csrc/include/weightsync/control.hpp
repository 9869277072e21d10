// How a caller watches and stops a long call from another thread.
#pragma once

#include <cstdint>

namespace weightsync {

// Work between two looks at the cancel flag.
inline constexpr std::int64_t kCancelGrainBytes = std::int64_t{1} << 20;

// Both pointers may be null. They must be aligned and outlive the call.
struct CallControl {
    const std::int32_t* cancel = nullptr;  // non-zero: stop at the next chunk
    std::int64_t* progress = nullptr;      // source bytes done are added, chunk by chunk

    bool is_cancelled() const {
        return cancel != nullptr && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0;
    }
    void advance(std::int64_t num_bytes) const {
        if (progress != nullptr) __atomic_fetch_add(progress, num_bytes, __ATOMIC_RELAXED);
    }
};

}  // namespace weightsync
