// Segment copy out of another process of this machine, by process_vm_readv.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "weightsync/control.hpp"
#include "weightsync/segments.hpp"

namespace weightsync {

// Like copy_segments, with every source_ptr an address in process `pid`. Throws std::system_error
// (errno, with pid and address in the text) if the kernel refuses, std::invalid_argument if a
// segment asks for a conversion.
std::int64_t read_process_segments(pid_t pid, const Segment* segments, std::int64_t num_segments,
                                   int num_threads, const CallControl& control);

}  // namespace weightsync
