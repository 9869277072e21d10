// Whether the CUDA twin is built in, and usable.
#pragma once

namespace weightsync {

bool has_cuda();

}  // namespace weightsync
