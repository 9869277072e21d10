// Stands in for csrc/cuda when there is no toolkit.
#include "weightsync/device.hpp"

namespace weightsync {

bool has_cuda() { return false; }

}  // namespace weightsync
