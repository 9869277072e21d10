// Whether CUDA can be used here, why not, and what a failed call says.
#pragma once

#include <stdexcept>
#include <string>

namespace weightsync {

// A CUDA call that failed: `error_name` is the runtime's name of the error, e.g.
// "cudaErrorInvalidDevice".
class CudaError : public std::runtime_error {
  public:
    CudaError(std::string error_name, std::string call, int device, const std::string& text)
        : std::runtime_error(call + " on device " + std::to_string(device) + ": " + error_name +
                             " (" + text + ")"),
          error_name_(std::move(error_name)),
          call_(std::move(call)),
          device_(device) {}

    const std::string& error_name() const { return error_name_; }
    const std::string& call() const { return call_; }
    int device() const { return device_; }

  private:
    std::string error_name_;
    std::string call_;
    int device_;
};

// Empty if CUDA can be used; else "built without CUDA", "no driver", "no device", or the error.
std::string cuda_unavailable_reason();

// Version of the CUDA runtime built in, e.g. "13.0"; empty without.
std::string cuda_version();

}  // namespace weightsync
