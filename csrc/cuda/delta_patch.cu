#include "tables.cuh"
#include "weightsync/delta_patch.hpp"

namespace weightsync {
namespace {

__device__ __forceinline__ void add_warp(std::uint64_t own, unsigned long long* to) {
    const std::uint64_t sum = cuda::warp_sum(own);
    if (cuda::this_lane() == 0 && sum != 0) atomicAdd(to, static_cast<unsigned long long>(sum));
}

// A block a unit. Changed elements lie some hundred bytes apart, so each is a sector of its own and
// what counts is how many are in flight.
template <PatchWork work>
__global__ __launch_bounds__(kPatchThreads) void patch_kernel(const PatchRow* __restrict__ rows,
                                                              const PatchUnit* __restrict__ units,
                                                              unsigned long long* found) {
    const PatchUnit unit = units[blockIdx.x];
    const PatchFound own = patch_thread<work>(rows[unit.row], unit, threadIdx.x);
    if (work == PatchWork::compare || work == PatchWork::compare_former) {
        add_warp(own.different, found);
    }
    if (work == PatchWork::compare) add_warp(own.growth, found + 1);
}

}  // namespace

struct CudaPatchTable::State {
    int device;
    std::vector<PatchUnit> cut;
    cuda::DeviceArray<PatchRow> rows;
    cuda::DeviceArray<PatchUnit> units;
    cuda::DeviceArray<unsigned long long> found;  // a PatchFound

    template <PatchWork work>
    void launch_one(cudaStream_t stream) {
        patch_kernel<work><<<static_cast<unsigned>(cut.size()), kPatchThreads, 0, stream>>>(
            rows.get(), units.get(), found.get());
        cuda::check(cudaGetLastError(), "launch of patch_kernel", device);
    }
    void launch(cudaStream_t stream, PatchWork work) {
        switch (work) {
            case PatchWork::exchange:
                return launch_one<PatchWork::exchange>(stream);
            case PatchWork::take_back:
                return launch_one<PatchWork::take_back>(stream);
            case PatchWork::compare:
                return launch_one<PatchWork::compare>(stream);
            default:
                return launch_one<PatchWork::compare_former>(stream);
        }
    }
};

CudaPatchTable::CudaPatchTable(const PatchRow* rows, std::int64_t num_rows, int device) {
    cuda::checked_device(device);
    std::vector<PatchUnit> cut = cut_patch(rows, num_rows);
    const std::vector<PatchRow> copied(rows, rows + num_rows);
    state_.reset(new State{device, cut, cuda::DeviceArray<PatchRow>(copied, device),
                           cuda::DeviceArray<PatchUnit>(cut, device),
                           cuda::DeviceArray<unsigned long long>(2, device)});
}

CudaPatchTable::~CudaPatchTable() = default;

PatchFound CudaPatchTable::run(std::uintptr_t stream, const std::vector<PatchWork>& works) {
    State& s = *state_;
    if (s.cut.empty()) return {};
    const cuda::DeviceScope scope(s.device);
    const cudaStream_t on = cuda::as_stream(stream);
    cuda::check(cudaMemsetAsync(s.found.get(), 0, sizeof(PatchFound), on), "cudaMemsetAsync",
                s.device);
    for (const PatchWork work : works) s.launch(on, work);
    PatchFound found;
    cuda::check(cudaMemcpyAsync(&found, s.found.get(), sizeof(found), cudaMemcpyDeviceToHost, on),
                "cudaMemcpyAsync", s.device);
    cuda::check(cudaStreamSynchronize(on), "cudaStreamSynchronize", s.device);
    return found;
}

void CudaPatchTable::close() {
    state_->rows.close();
    state_->units.close();
    state_->found.close();
}

}  // namespace weightsync
