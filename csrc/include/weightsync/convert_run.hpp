// Conversion of a contiguous run, vectorised for the CPU at hand.
#pragma once

#include <cstdint>

namespace weightsync {

// `count` fp32 at `source` become `count` bf16 at `target`; any alignment, no overlap.
void fp32_to_bf16_run(void* target, const void* source, std::int64_t count);

}  // namespace weightsync
