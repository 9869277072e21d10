#include "tables.cuh"
#include "weightsync/cuda_copy_lanes.hpp"
#include "weightsync/cuda_tables.hpp"

namespace weightsync {
namespace cuda {
namespace {

// One unit a warp and no loop over units: the scheduler keeps more loads in flight than a
// persistent grid does. Plain loads and stores: streaming hints were slower or no better.
template <Convert convert>
__global__ __launch_bounds__(kBlockThreads) void copy_kernel(const CopyUnit* __restrict__ units,
                                                             UnitCounts counts,
                                                             std::int64_t source_base,
                                                             std::int64_t target_base) {
    const WarpShare share = this_share(counts);
    if (share.unit >= counts.total()) return;
    lanes::copy_unit<convert>(units[share.unit], share, source_base, target_base, this_lane());
}

__global__ __launch_bounds__(kBlockThreads) void copy_grid_kernel(
    const GridUnit* __restrict__ units, UnitCounts counts, const Segment* __restrict__ rows,
    std::int64_t source_base, std::int64_t target_base) {
    const WarpShare share = this_share(counts);
    if (share.unit >= counts.total()) return;
    const GridUnit unit = units[share.unit];
    lanes::copy_grid(rows[unit.row], unit, source_base, target_base, this_lane());
}

// The same by few blocks, which leave memory and multiprocessors to others.
template <Convert convert>
__global__ __launch_bounds__(kBlockThreads) void narrow_copy_kernel(
    const CopyUnit* __restrict__ units, UnitCounts counts, std::int64_t source_base,
    std::int64_t target_base) {
    for (std::uint32_t block = blockIdx.x; block < counts.num_blocks(); block += gridDim.x) {
        const WarpShare share = warp_share(counts, block, threadIdx.x / kWarpLanes);
        if (share.unit >= counts.total()) return;
        lanes::copy_unit<convert>(units[share.unit], share, source_base, target_base, this_lane());
    }
}

template <Convert convert>
void launch_pieces(const DeviceUnits<CopyUnit>& pieces, cudaStream_t stream,
                   std::int64_t source_base, std::int64_t target_base, std::uint32_t max_blocks,
                   int device) {
    if (pieces.is_empty()) return;
    const std::uint32_t num_blocks = pieces.counts.num_blocks();
    if (max_blocks == 0 || num_blocks <= max_blocks) {
        copy_kernel<convert><<<num_blocks, kBlockThreads, 0, stream>>>(
            pieces.units.get(), pieces.counts, source_base, target_base);
    } else {
        narrow_copy_kernel<convert><<<max_blocks, kBlockThreads, 0, stream>>>(
            pieces.units.get(), pieces.counts, source_base, target_base);
    }
    check(cudaGetLastError(), "launch of copy_kernel", device);
}

}  // namespace

DeviceSegments::DeviceSegments(const SegmentUnits& units, int device)
    : device_(checked_device(device)),
      grid_(units.grid, device),
      grid_rows_(units.grid_rows, device) {
    for (int i = 0; i < kNumConverts; ++i) {
        pieces_[i] = DeviceUnits<CopyUnit>(units.pieces[i], device);
    }
}

void DeviceSegments::launch(cudaStream_t stream, std::int64_t source_base, std::int64_t target_base,
                            std::uint32_t max_blocks) const {
    const DeviceScope scope(device_);
    launch_pieces<Convert::none>(pieces_[0], stream, source_base, target_base, max_blocks, device_);
    launch_pieces<Convert::fp32_to_bf16>(pieces_[1], stream, source_base, target_base, max_blocks,
                                         device_);
    if (!grid_.is_empty()) {
        copy_grid_kernel<<<grid_.counts.num_blocks(), kBlockThreads, 0, stream>>>(
            grid_.units.get(), grid_.counts, grid_rows_.get(), source_base, target_base);
        check(cudaGetLastError(), "launch of copy_grid_kernel", device_);
    }
}

void DeviceSegments::close() {
    for (DeviceUnits<CopyUnit>& pieces : pieces_) pieces.units.close();
    grid_.units.close();
    grid_rows_.close();
}

}  // namespace cuda

struct CudaSegmentTable::State {
    cuda::DeviceSegments segments;
};

CudaSegmentTable::CudaSegmentTable(const SegmentUnits& units, int device)
    : state_(new State{{units, device}}) {}
CudaSegmentTable::~CudaSegmentTable() = default;

void CudaSegmentTable::launch(std::uintptr_t stream, std::int64_t source_base,
                              std::int64_t target_base, std::uint32_t max_blocks) {
    state_->segments.launch(cuda::as_stream(stream), source_base, target_base, max_blocks);
}

void CudaSegmentTable::close() { state_->segments.close(); }

}  // namespace weightsync
