// Plain memory operations, and what this machine's memory looks like.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weightsync {

// memcpy cut over threads: the ceiling that a segment copy is measured against.
void memcpy_bytes(void* target, const void* source, std::size_t num_bytes, int num_threads);

// Makes every page of the range present and writable, contents kept. Throws std::system_error.
void prefault(void* ptr, std::size_t num_bytes);

// Bytes of the last-level cache; 32 MiB where the system does not say.
std::int64_t last_level_cache_bytes();

}  // namespace weightsync
