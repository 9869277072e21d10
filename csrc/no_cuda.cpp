// Stands in for csrc/cuda/*.cu when there is no toolkit.
#include "weightsync/cuda_arena.hpp"
#include "weightsync/cuda_attention.hpp"
#include "weightsync/cuda_core.hpp"
#include "weightsync/cuda_device.hpp"
#include "weightsync/cuda_memory.hpp"
#include "weightsync/cuda_tables.hpp"
#include "weightsync/delta_batch.hpp"
#include "weightsync/delta_decode_batch.hpp"
#include "weightsync/delta_patch.hpp"
#include "weightsync/device.hpp"
#include "weightsync/expert_rows.hpp"
#include "weightsync/few_rows.hpp"
#include "weightsync/peer_sum.hpp"

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
void CudaSegmentTable::launch(std::uintptr_t, std::int64_t, std::int64_t, std::uint32_t) {}
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

struct CudaPatchTable::State {};
CudaPatchTable::CudaPatchTable(const PatchRow*, std::int64_t, int device) {
    fail("CudaPatchTable", device);
}
CudaPatchTable::~CudaPatchTable() = default;
PatchFound CudaPatchTable::run(std::uintptr_t, const std::vector<PatchWork>&) { return {}; }
void CudaPatchTable::close() {}

struct CudaDeltaEncoder::State {};
CudaDeltaEncoder::CudaDeltaEncoder(int device) { fail("CudaDeltaEncoder", device); }
CudaDeltaEncoder::~CudaDeltaEncoder() = default;
void CudaDeltaEncoder::run(DeltaBatch*, const std::uint64_t*, std::uintptr_t, std::uintptr_t, int) {
}
std::vector<double> CudaDeltaEncoder::seconds() const { return {}; }
void CudaDeltaEncoder::close() {}

struct CudaDeltaDecoder::State {};
CudaDeltaDecoder::CudaDeltaDecoder(int device) { fail("CudaDeltaDecoder", device); }
CudaDeltaDecoder::~CudaDeltaDecoder() = default;
void CudaDeltaDecoder::run(DeltaDecodeBatch*, std::uint64_t*, std::uintptr_t) {}
std::vector<double> CudaDeltaDecoder::seconds() const { return {}; }
void CudaDeltaDecoder::close() {}

ArenaRange cuda_arena_reserve(std::uint64_t, int device) { fail("cuda_arena_reserve", device); }
void cuda_arena_map(std::uint64_t, const std::vector<std::uint64_t>&, int device) {
    fail("cuda_arena_map", device);
}
void cuda_arena_unmap(std::uint64_t, int device) { fail("cuda_arena_unmap", device); }
void cuda_arena_free(std::uint64_t, int device) { fail("cuda_arena_free", device); }
void cuda_pool_own(std::uint64_t) {}
std::vector<ArenaRange> cuda_pool_ranges(std::uint64_t) { return {}; }

CudaHeld cuda_held() { return {0, 0}; }
std::uint64_t cuda_malloc(std::uint64_t, int device) { fail("cuda_malloc", device); }
void cuda_free(std::uint64_t, int device) { fail("cuda_free", device); }
std::uint64_t cuda_malloc_host(std::uint64_t, int device) { fail("cuda_malloc_host", device); }
void cuda_free_host(std::uint64_t, int device) { fail("cuda_free_host", device); }
std::uint64_t cuda_free_bytes(int device) { fail("cuda_free_bytes", device); }
int cuda_current_device() { fail("cuda_current_device", 0); }
void cuda_use_device(int device) { fail("cuda_use_device", device); }
int cuda_num_devices() { return 0; }
CudaDeviceInfo cuda_device_info(int device) { fail("cuda_device_info", device); }
std::string cuda_driver_version() { return {}; }
std::string cuda_device_uuid(int device) { fail("cuda_device_uuid", device); }
CudaAllocation cuda_allocation(std::uint64_t, int device) { fail("cuda_allocation", device); }
std::string cuda_export(std::uint64_t, int device) { fail("cuda_export", device); }
std::uint64_t cuda_map(const std::string&, int device) { fail("cuda_map", device); }
void cuda_unmap(std::uint64_t, int device) { fail("cuda_unmap", device); }
int cuda_export_fd(std::uint64_t, int device) { fail("cuda_export_fd", device); }
std::uint64_t cuda_import_fd(int, int device) { fail("cuda_import_fd", device); }
void cuda_release_handle(std::uint64_t, int device) { fail("cuda_release_handle", device); }
std::uint64_t cuda_map_handles(const std::vector<std::uint64_t>&, const std::vector<std::uint64_t>&,
                               int device) {
    fail("cuda_map_handles", device);
}
void cuda_unmap_handles(std::uint64_t, const std::vector<std::uint64_t>&, int device) {
    fail("cuda_unmap_handles", device);
}
std::uint64_t cuda_create_stream(int device, int) { fail("cuda_create_stream", device); }
void cuda_wait_stream(std::uint64_t, int device) { fail("cuda_wait_stream", device); }
std::uint64_t cuda_create_event(int device) { fail("cuda_create_event", device); }
void cuda_destroy_event(std::uint64_t, int device) { fail("cuda_destroy_event", device); }
void cuda_record_event(std::uint64_t, std::uint64_t, int device) {
    fail("cuda_record_event", device);
}
double cuda_elapsed_s(std::uint64_t, std::uint64_t, int device) { fail("cuda_elapsed_s", device); }
void cuda_wait_event(std::uint64_t, int device) { fail("cuda_wait_event", device); }
bool cuda_event_passed(std::uint64_t, int device) { fail("cuda_event_passed", device); }
void cuda_synchronize(int device) { fail("cuda_synchronize", device); }
void cuda_copy(std::uint64_t, std::uint64_t, std::uint64_t, int device) {
    fail("cuda_copy", device);
}

void cuda_plan_attention(const AttentionStep&, const AttentionWork&, std::uintptr_t, int device) {
    fail("cuda_plan_attention", device);
}
void cuda_attend(const AttentionStep&, const AttentionWork&, std::uintptr_t, int device) {
    fail("cuda_attend", device);
}
void cuda_attend_general(const AttentionStep&, std::uintptr_t, int device) {
    fail("cuda_attend_general", device);
}
void cuda_norm_rows(const NormedRows&, std::uintptr_t, int device) {
    fail("cuda_norm_rows", device);
}
void cuda_add_norm_rows(const AddedRows&, std::uintptr_t, int device) {
    fail("cuda_add_norm_rows", device);
}
void cuda_gate_rows(const GatedRows&, std::uintptr_t, int device) {
    fail("cuda_gate_rows", device);
}
bool cuda_takes_few_rows(const FewRowsProduct&, int) { return false; }
void cuda_few_rows_product(const FewRowsProduct&, std::uintptr_t, int device) {
    fail("cuda_few_rows_product", device);
}
void cuda_grouped_product(const GroupedProduct&, std::uintptr_t, int device) {
    fail("cuda_grouped_product", device);
}
void cuda_route_rows(const RoutedRows&, std::uintptr_t, int device) {
    fail("cuda_route_rows", device);
}
void cuda_sort_picks(const SortedPicks&, std::uintptr_t, int device) {
    fail("cuda_sort_picks", device);
}
void cuda_combine_rows(const CombinedRows&, std::uintptr_t, int device) {
    fail("cuda_combine_rows", device);
}
void cuda_peer_sum(const PeerSum&, std::uintptr_t, int device) { fail("cuda_peer_sum", device); }
void cuda_place_heads(const HeadRows&, std::uintptr_t, int device) {
    fail("cuda_place_heads", device);
}
void cuda_place_rows(const DecodeRows&, std::uintptr_t, int device) {
    fail("cuda_place_rows", device);
}
void cuda_advance_rows(const DecodeRows&, std::uintptr_t, int device) {
    fail("cuda_advance_rows", device);
}
void cuda_read_bytes(std::uint64_t, std::uint64_t, std::uint64_t, std::uintptr_t, int device) {
    fail("cuda_read_bytes", device);
}
std::int64_t sample_scratch_bytes(std::int64_t, std::int64_t) { return 0; }
void cuda_sample_rows(const SampledRows&, std::uintptr_t, int device) {
    fail("cuda_sample_rows", device);
}

}  // namespace weightsync
