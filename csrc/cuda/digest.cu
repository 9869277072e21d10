#include "tables.cuh"
#include "weightsync/cuda_digest_lanes.hpp"
#include "weightsync/cuda_tables.hpp"

namespace weightsync {
namespace cuda {
namespace {

template <WordKind kind>
__global__ __launch_bounds__(kBlockThreads) void digest_kernel(const DigestUnit* __restrict__ units,
                                                               UnitCounts counts,
                                                               const DigestOwner* __restrict__ rows,
                                                               std::uint64_t* digests) {
    const WarpShare share = this_share(counts);
    if (share.unit >= counts.total()) return;
    const DigestUnit unit = units[share.unit];
    const DigestOwner row = rows[unit.row];
    const std::uint64_t sum =
        lanes::digest_unit<kind>(unit, row.seed, share, kDigestWarpBytes, this_lane());
    add_sum(sum, share.is_shared, digests + row.owner);
}

template <WordKind kind>
__global__ __launch_bounds__(kBlockThreads) void digest_grid_kernel(
    const GridUnit* __restrict__ units, UnitCounts counts, const DigestRow* __restrict__ rows,
    const std::uint32_t* __restrict__ owners, std::uint64_t* digests) {
    const WarpShare share = this_share(counts);
    if (share.unit >= counts.total()) return;
    const GridUnit unit = units[share.unit];
    add_sum(lanes::digest_grid<kind>(rows[unit.row], unit, this_lane()), false,
            digests + owners[unit.row]);
}

template <WordKind kind>
__global__ __launch_bounds__(kBlockThreads) void copy_digest_kernel(
    const CopyDigestUnit* __restrict__ units, UnitCounts counts,
    const DigestOwner* __restrict__ rows, std::uint64_t* digests) {
    const WarpShare share = this_share(counts);
    if (share.unit >= counts.total()) return;
    const CopyDigestUnit unit = units[share.unit];
    const DigestOwner row = rows[unit.row];
    const std::uint64_t sum = lanes::copy_digest_unit<kind>(unit, row.seed, share, this_lane());
    add_sum(sum, share.is_shared, digests + row.owner);
}

template <WordKind kind>
void launch_fused(const DeviceUnits<CopyDigestUnit>& fused, const DeviceDigests& digests,
                  cudaStream_t stream, int device) {
    if (fused.is_empty()) return;
    copy_digest_kernel<kind><<<fused.counts.num_blocks(), kBlockThreads, 0, stream>>>(
        fused.units.get(), fused.counts, digests.rows(), digests.digests());
    check(cudaGetLastError(), "launch of copy_digest_kernel", device);
}

}  // namespace

DeviceDigests::DeviceDigests(const DigestUnits& units, int device)
    : device_(checked_device(device)),
      grid_rows_(units.grid_rows, device),
      grid_owners_(units.grid_owners, device),
      rows_(units.rows, device),
      digests_(static_cast<std::size_t>(units.num_owners), device) {
    for (int kind = 0; kind < kNumWordKinds; ++kind) {
        pieces_[kind] = DeviceUnits<DigestUnit>(units.pieces[kind], device);
        grid_[kind] = DeviceUnits<GridUnit>(units.grid[kind], device);
    }
}

template <WordKind kind>
void DeviceDigests::launch_kind(cudaStream_t stream) const {
    const auto& pieces = pieces_[static_cast<int>(kind)];
    if (!pieces.is_empty()) {
        digest_kernel<kind><<<pieces.counts.num_blocks(), kBlockThreads, 0, stream>>>(
            pieces.units.get(), pieces.counts, rows_.get(), digests_.get());
        check(cudaGetLastError(), "launch of digest_kernel", device_);
    }
    const auto& grid = grid_[static_cast<int>(kind)];
    if (!grid.is_empty()) {
        digest_grid_kernel<kind><<<grid.counts.num_blocks(), kBlockThreads, 0, stream>>>(
            grid.units.get(), grid.counts, grid_rows_.get(), grid_owners_.get(), digests_.get());
        check(cudaGetLastError(), "launch of digest_grid_kernel", device_);
    }
}

void DeviceDigests::launch(cudaStream_t stream) const {
    if (digests_.size() == 0) return;
    const DeviceScope scope(device_);
    check(cudaMemsetAsync(digests_.get(), 0, digests_.size() * sizeof(std::uint64_t), stream),
          "cudaMemsetAsync", device_);
    launch_kind<WordKind::bytes>(stream);
    launch_kind<WordKind::halves>(stream);
    launch_kind<WordKind::words>(stream);
    launch_kind<WordKind::fp32_as_bf16>(stream);
}

void DeviceDigests::read(cudaStream_t stream, std::uint64_t* out) const {
    if (digests_.size() == 0) return;
    const DeviceScope scope(device_);
    check(cudaMemcpyAsync(out, digests_.get(), digests_.size() * sizeof(std::uint64_t),
                          cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync", device_);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device_);
}

void DeviceDigests::close() {
    for (DeviceUnits<DigestUnit>& pieces : pieces_) pieces.units.close();
    for (DeviceUnits<GridUnit>& grid : grid_) grid.units.close();
    grid_rows_.close();
    grid_owners_.close();
    rows_.close();
    digests_.close();
}

}  // namespace cuda

struct CudaDigestTable::State {
    cuda::DeviceDigests digests;
};

CudaDigestTable::CudaDigestTable(const DigestUnits& units, int device)
    : state_(new State{{units, device}}) {}
CudaDigestTable::~CudaDigestTable() = default;

void CudaDigestTable::launch(std::uintptr_t stream) {
    state_->digests.launch(cuda::as_stream(stream));
}

void CudaDigestTable::read(std::uintptr_t stream, std::uint64_t* out) {
    state_->digests.read(cuda::as_stream(stream), out);
}

void CudaDigestTable::close() { state_->digests.close(); }

struct CudaCopyDigestTable::State {
    int device;
    cuda::DeviceUnits<CopyDigestUnit> fused[kNumWordKinds];
    cuda::DeviceSegments copied;
    cuda::DeviceDigests digests;

    State(const CopyDigestUnits& units, int on_device)
        : device(on_device), copied(units.copied, on_device), digests(units.digested, on_device) {
        for (int kind = 0; kind < kNumWordKinds; ++kind) {
            fused[kind] = cuda::DeviceUnits<CopyDigestUnit>(units.fused[kind], on_device);
        }
    }
};

CudaCopyDigestTable::CudaCopyDigestTable(const CopyDigestUnits& units, int device)
    : state_(new State(units, device)) {}
CudaCopyDigestTable::~CudaCopyDigestTable() = default;

void CudaCopyDigestTable::launch(std::uintptr_t stream) {
    const cuda::DeviceScope scope(state_->device);
    const cudaStream_t on = cuda::as_stream(stream);
    state_->digests.launch(on);
    state_->copied.launch(on, 0, 0, 0);
    const auto& fused = state_->fused;
    cuda::launch_fused<WordKind::bytes>(fused[0], state_->digests, on, state_->device);
    cuda::launch_fused<WordKind::halves>(fused[1], state_->digests, on, state_->device);
    cuda::launch_fused<WordKind::words>(fused[2], state_->digests, on, state_->device);
    cuda::launch_fused<WordKind::fp32_as_bf16>(fused[3], state_->digests, on, state_->device);
}

void CudaCopyDigestTable::read(std::uintptr_t stream, std::uint64_t* out) {
    state_->digests.read(cuda::as_stream(stream), out);
}

void CudaCopyDigestTable::close() {
    for (auto& units : state_->fused) units.units.close();
    state_->copied.close();
    state_->digests.close();
}

}  // namespace weightsync
