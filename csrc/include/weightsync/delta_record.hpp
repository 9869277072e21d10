// Parts of a record that every encoder writes alike.
#pragma once

#include <cstdint>

#include "weightsync/delta_span.hpp"

namespace weightsync {

// A header of a span without changes; what depends on them is zero.
DeltaHeader delta_header(const DeltaPlace& place, bool is_absolute);

// Bytes that delta_put_parameters writes.
std::int64_t delta_parameter_bytes(const DeltaParameters& parameters);

// Thresholds, then pairs (key, typical step); notes their numbers in the header, returns the bytes.
std::int64_t delta_put_parameters(const DeltaParameters& parameters, DeltaHeader* header,
                                  unsigned char* out);

// An entry of the block index.
void delta_put_entry(unsigned char* entry, std::int64_t num_bytes, std::uint32_t check);

}  // namespace weightsync
