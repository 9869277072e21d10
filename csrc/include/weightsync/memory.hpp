// Plain memory operations, and how large is large.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weightsync {

// memcpy cut over threads: the ceiling that a segment copy is measured against.
void memcpy_bytes(void* target, const void* source, std::size_t num_bytes, int num_threads);

// Makes every page of the range present and writable, contents kept. Throws std::system_error.
void prefault(void* ptr, std::size_t num_bytes);

// A call that moves at least this much should write past the cache: the last-level cache, or 32 MiB
// where the system names no size or a larger one (virtual machines report the host's whole cache).
std::int64_t streaming_threshold_bytes();

}  // namespace weightsync
