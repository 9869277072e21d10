#include "weightsync/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "weightsync/parallel.hpp"

namespace weightsync {

void memcpy_bytes(void* target, const void* source, std::size_t num_bytes, int num_threads) {
    auto* to = static_cast<unsigned char*>(target);
    const auto* from = static_cast<const unsigned char*>(source);
    const auto total = static_cast<std::int64_t>(num_bytes);
    const std::int64_t threads = std::max(num_threads, 1);
    // One range a thread, cut at a page so that no two threads share a line of the target.
    const std::int64_t share =
        std::max<std::int64_t>(((total / threads) + 4095) / 4096 * 4096, 4096);
    const WorkAxis axis(1, [&](std::int64_t) { return total; });
    axis.run(num_threads, share, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
        return true;
    });
}

void prefault(void* ptr, std::size_t num_bytes) {
    if (num_bytes == 0) return;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(ptr) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(ptr) + num_bytes;
#ifdef MADV_POPULATE_WRITE
    constexpr int populate_write = MADV_POPULATE_WRITE;
#else
    constexpr int populate_write = 23;  // Linux 5.14; older headers lack the name
#endif
    int result = 0;
    do {
        result = madvise(reinterpret_cast<void*>(begin), end - begin, populate_write);
    } while (result != 0 && errno == EINTR);
    if (result == 0) return;
    if (errno != EINVAL) {
        throw std::system_error(errno, std::generic_category(),
                                "prefault of " + std::to_string(num_bytes) + " bytes at " +
                                    std::to_string(reinterpret_cast<std::uintptr_t>(ptr)));
    }
    // An older kernel: an atomic no-op write touches a page without losing anyone's store.
    for (std::uintptr_t address = begin; address < end; address += page) {
        auto* byte = reinterpret_cast<unsigned char*>(
            std::max(address, reinterpret_cast<std::uintptr_t>(ptr)));
        __atomic_fetch_or(byte, static_cast<unsigned char>(0), __ATOMIC_RELAXED);
    }
}

std::int64_t streaming_threshold_bytes() {
    static const std::int64_t num_bytes = [] {
        constexpr long most = 32L << 20;
        long level3 = -1;
#ifdef _SC_LEVEL3_CACHE_SIZE
        level3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        return std::int64_t{level3 > 0 ? std::min(level3, most) : most};
    }();
    return num_bytes;
}

}  // namespace weightsync
