// Stands in for csrc/cuda/*.cu when there is no toolkit.
#include "weightsync/cuda_device.hpp"
#include "weightsync/cuda_tables.hpp"
#include "weightsync/device.hpp"

namespace weightsync {
namespace {

[[noreturn]] void fail(const char* call, int device) {
    throw CudaError("cudaErrorNotSupported", call, device, cuda_unavailable_reason());
}

}  // namespace

bool has_cuda() { return false; }

std::string cuda_unavailable_reason() { return "built without CUDA"; }

std::string cuda_version() { return {}; }

struct CudaSegmentTable::State {};
struct CudaDigestTable::State {};
struct CudaCopyDigestTable::State {};

CudaSegmentTable::CudaSegmentTable(const SegmentUnits&, int device) {
    fail("CudaSegmentTable", device);
}
CudaSegmentTable::~CudaSegmentTable() = default;
void CudaSegmentTable::launch(std::uintptr_t, std::int64_t, std::int64_t) {}
void CudaSegmentTable::close() {}

CudaDigestTable::CudaDigestTable(const DigestUnits&, int device) {
    fail("CudaDigestTable", device);
}
CudaDigestTable::~CudaDigestTable() = default;
void CudaDigestTable::launch(std::uintptr_t) {}
void CudaDigestTable::read(std::uintptr_t, std::uint64_t*) {}
void CudaDigestTable::close() {}

CudaCopyDigestTable::CudaCopyDigestTable(const CopyDigestUnits&, int device) {
    fail("CudaCopyDigestTable", device);
}
CudaCopyDigestTable::~CudaCopyDigestTable() = default;
void CudaCopyDigestTable::launch(std::uintptr_t) {}
void CudaCopyDigestTable::read(std::uintptr_t, std::uint64_t*) {}
void CudaCopyDigestTable::close() {}

}  // namespace weightsync
