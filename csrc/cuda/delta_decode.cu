// Blocks of many spans back to changes; see delta_team_decode.hpp for the steps,
// delta_decode_twin.cpp for the same without a device.

#include "delta_device.cuh"
#include "weightsync/delta_block_work.hpp"
#include "weightsync/delta_decode_work.hpp"

namespace weightsync {
namespace {

using namespace lanes;

struct Launch {
    const DeltaDecodeRow* rows;
    const std::int64_t* first_block;
    const DeltaParameters* parameters;
    const DeltaDecodeUnit* units;
    DeltaDecodeState* states;
    std::uint64_t* digests;
};

// What a block of threads shares.
struct Shared {
    DeltaDecodeBlock block;
    DeltaDecodeOutput out;
    unsigned long long digest;
    std::uint32_t end;  // of the plane that was read last
    std::uint32_t chunks[kDeltaWarps];
    __align__(8) unsigned char parameters[sizeof(DeltaParameters)];
};

// `act(first element, what a lane has, counts of its keys, row)` for a warp's rows, by all lanes.
template <DeltaKind kind, bool has_byte_keys, typename Act>
__device__ __forceinline__ void for_rows_by(const DeltaEmit<kind>& emit, std::uint32_t warp,
                                            std::uint32_t lane, const Act& act) {
    using Vector = DeltaVector<kind>;
    constexpr std::uint32_t unroll = 2 / Vector::vectors;
    const int num_thresholds = emit.parameters->num_thresholds;
    const std::uint32_t size = emit.place.size;
    for (std::uint32_t r = 0; r < Vector::rows; r += unroll) {
        const std::uint32_t start = warp * kDeltaWarpElements + r * Vector::row_elements;
        if (start >= size) break;
        typename Vector::Lane old[unroll];
#pragma unroll
        for (std::uint32_t u = 0; u < unroll; ++u) {
            const std::uint32_t at = start + u * Vector::row_elements + lane * Vector::elements;
            old[u] = start + unroll * Vector::row_elements <= size
                         ? Vector::read_whole(emit.place.old, at)
                         : Vector::read(emit.place.old, at, size);
        }
#pragma unroll
        for (std::uint32_t u = 0; u < unroll; ++u) {
            const DeltaCounts own =
                delta_count<kind, has_byte_keys>(old[u], 0, emit.cuts, num_thresholds);
            act(start + u * Vector::row_elements + lane * Vector::elements, old[u], own, r + u);
        }
    }
}

template <DeltaKind kind, typename Act>
__device__ __forceinline__ void for_rows(const DeltaEmit<kind>& emit, std::uint32_t warp,
                                         std::uint32_t lane, const Act& act) {
    if (kind == DeltaKind::float16 && delta_has_byte_keys<kind>(*emit.parameters)) {
        for_rows_by<kind, kind == DeltaKind::float16>(emit, warp, lane, act);
    } else {
        for_rows_by<kind, false>(emit, warp, lane, act);
    }
}

template <DeltaKind kind>
__device__ __forceinline__ void count_keys(const DeltaEmit<kind>& emit, DeltaDecodeBlock* block,
                                           std::uint32_t warp, std::uint32_t lane) {
    FieldSum running(lane);
    for_rows<kind>(
        emit, warp, lane, [&](std::uint32_t, const auto&, const DeltaCounts& own, std::uint32_t r) {
            if (lane < kDeltaThresholds) {
                block->starts[warp][r].reached[lane] = static_cast<std::uint16_t>(running.sum());
            }
            running.add(sum_counts(own));
        });
    if (lane < kDeltaThresholds) block->totals[warp][lane] = running.sum();
}

// All codes of a block to maps and steps. False, for all threads, if that cannot be: the state says
// why. It is only set and looked at by atomic operations, since a warp may set it while another
// that came earlier looks: who sets it sees it itself, so that all leave at the same barrier.
template <DeltaKind kind>
__device__ __forceinline__ bool read_codes(const DeltaEmit<kind>& emit, const DeltaDecodeUnit& unit,
                                           Shared* shared, std::uint32_t warp, std::uint32_t lane) {
    DeltaDecodeBlock& block = shared->block;
    const WarpTeam team{lane};
    const bool is_first = warp == 0 && lane == 0;
    const auto is_over = [&] {
        __syncwarp();
        return __syncthreads_or(lane == 0 && atomicOr(&block.state, 0u) != 0 ? 1 : 0) != 0;
    };
    if (is_first) {
        set_bits(&block.state,
                 delta_open_block(emit.codes, emit.place.size, emit.parameters->num_thresholds,
                                  unit.is_gaps != 0, &block));
    }
    if (is_over()) return false;
    if (warp == 0) {
        const std::uint32_t end =
            delta_find_ends(team, emit.codes, block.high, block.num_codes, &block);
        if (lane == 0) shared->end = end;
    }
    if (is_over()) return false;
    const bool has_class = static_cast<int>(warp) < block.num_classes;
    if (has_class) {
        const DeltaDecodeClass& one = block.classes[warp];
        delta_map_list(team, emit.codes, one.numbers, one.map_begin, block.map, &block);
    }
    if (is_over()) return false;
    const std::uint32_t in_chunk = delta_count_chunk(team, warp, &block);
    if (lane == 0) shared->chunks[warp] = in_chunk;
    __syncthreads();
    if (is_first) {
        std::uint32_t before = 0;
        for (std::uint32_t chunk = 0; chunk < kDeltaWarps; ++chunk) {
            block.chunk_before[chunk] = before;
            before += shared->chunks[chunk];
        }
        set_bits(&block.state, delta_open_exceptions(emit.codes, shared->end, &block));
    }
    if (is_over()) return false;
    std::uint32_t steps = 0;
    if (warp == 0) {
        steps = delta_find_ends(team, emit.codes, block.exception_high, block.num_exception_codes,
                                &block);
    }
    if (is_over()) return false;
    if (has_class) {
        const DeltaDecodeClass& one = block.classes[warp];
        delta_map_list(team, emit.codes, one.exception_numbers, one.begin, block.exception_map,
                       &block);
    }
    if (is_over()) return false;
    if (warp == 1) delta_count_exceptions(team, &block);
    if (is_first) set_bits(&block.state, delta_take_steps(emit.codes, steps, &block));
    return !is_over();
}

template <DeltaKind kind>
__global__ __launch_bounds__(kDeltaThreads, 6) void decode_kernel(Launch launch) {
    __shared__ Shared shared;
    const std::uint32_t thread = threadIdx.x;
    const std::uint32_t warp = thread / kWarpLanes;
    const std::uint32_t lane = thread % kWarpLanes;
    const DeltaDecodeUnit unit = launch.units[blockIdx.x];
    const DeltaDecodeRow& row = launch.rows[unit.row];
    DeltaDecodeState* state = launch.states + unit.row;
    DeltaDecodeBlock& block = shared.block;
    const auto* from = reinterpret_cast<const unsigned char*>(launch.parameters + unit.row);
    for (std::uint32_t i = thread; i < sizeof(DeltaParameters); i += kDeltaThreads) {
        shared.parameters[i] = from[i];
    }
    delta_clear_maps(WarpTeam{lane}, thread, kDeltaThreads, &block);
    if (thread == 0) shared.digest = 0;
    __syncthreads();
    const auto& parameters = *reinterpret_cast<const DeltaParameters*>(shared.parameters);
    DeltaEmit<kind> emit = delta_emit_of<kind>(row, parameters, unit, &block);
    count_keys(emit, &block, warp, lane);
    __syncthreads();
    if (!read_codes(emit, unit, &shared, warp, lane)) {
        if (thread == 0) set_bits(&state->state, block.state);
        return;
    }
    bool is_full = false;
    if (thread == 0) {
        shared.out = emit.out;
        is_full = !delta_take_output(row, block.num_changed, state, &shared.out);
    }
    if (__syncthreads_or(is_full ? 1 : 0) != 0) return;
    emit.out = shared.out;
    const bool has_high = parameters.num_thresholds > 2;
    for_rows<kind>(emit, warp, lane,
                   [&](std::uint32_t at, const auto& old, const DeltaCounts& own, std::uint32_t) {
                       DeltaCounts total;
                       emit.find(old, at, own, scan_counts(own, has_high, &total));
                   });
    __syncthreads();
    if (__syncthreads_or(thread == 0 && !delta_all_found(&block, state) ? 1 : 0) != 0) return;
    std::uint64_t sum = 0;
    for (std::uint32_t k = thread; k < block.num_changed; k += kDeltaThreads) sum += emit.put(k);
    sum = cuda::warp_sum(sum);
    if (lane == 0) atomicAdd(&shared.digest, static_cast<unsigned long long>(sum));
    __syncthreads();
    if (thread == 0) {
        delta_end_block(unit, shared.digest, block.state, state,
                        launch.digests + launch.first_block[unit.row] + unit.block);
    }
}

}  // namespace

struct CudaDeltaDecoder::State {
    int device;
    cuda::DeviceArray<DeltaDecodeRow> rows;
    cuda::DeviceArray<std::int64_t> first_block;
    cuda::DeviceArray<DeltaParameters> parameters;
    cuda::DeviceArray<DeltaDecodeUnit> units;
    cuda::DeviceArray<DeltaDecodeState> states;
    cuda::DeviceArray<std::uint64_t> digests;
    std::vector<double> seconds;
    cudaStream_t stream = nullptr;

    template <typename T>
    T* put(cuda::DeviceArray<T>* array, const std::vector<T>& values) {
        return upload(array, values.data(), values.size(), device, stream);
    }
    template <DeltaKind kind>
    void decode(const DeltaDecodeBatch& batch, Launch launch) {
        const std::vector<DeltaDecodeUnit>& cut = batch.units[static_cast<int>(kind)];
        if (cut.empty()) return;
        wait();  // the former kind's units are overwritten
        launch.units = put(&units, cut);
        decode_kernel<kind>
            <<<static_cast<unsigned>(cut.size()), kDeltaThreads, 0, stream>>>(launch);
        cuda::check(cudaGetLastError(), "launch of decode_kernel", device);
    }
    void wait() { cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device); }
    void download(void* to, const void* from, std::size_t bytes) {
        cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream),
                    "cudaMemcpyAsync", device);
    }
};

CudaDeltaDecoder::CudaDeltaDecoder(int device) : state_(new State{}) {
    state_->device = cuda::checked_device(device);
}

CudaDeltaDecoder::~CudaDeltaDecoder() = default;

void CudaDeltaDecoder::run(DeltaDecodeBatch* batch, std::uint64_t* digests, std::uintptr_t stream) {
    State& s = *state_;
    s.seconds.assign(3, 0);
    if (batch->rows.empty()) return;
    const cuda::DeviceScope scope(s.device);
    s.stream = cuda::as_stream(stream);
    double start_s = now_s();
    const auto lap = [&](std::size_t part) {
        s.wait();
        const double end_s = now_s();
        s.seconds[part] = end_s - start_s;
        start_s = end_s;
    };
    const auto num_blocks = static_cast<std::size_t>(batch->num_blocks());
    std::vector<DeltaDecodeState> states(batch->rows.size());
    Launch launch{};
    launch.rows = s.put(&s.rows, batch->rows);
    launch.first_block = s.put(&s.first_block, batch->first_block);
    launch.parameters = s.put(&s.parameters, batch->parameters);
    launch.states = s.put(&s.states, states);
    launch.digests = upload(&s.digests, digests, num_blocks, s.device, s.stream);
    lap(0);
    s.decode<DeltaKind::bytes>(*batch, launch);
    s.decode<DeltaKind::float8>(*batch, launch);
    s.decode<DeltaKind::float16>(*batch, launch);
    s.decode<DeltaKind::float32>(*batch, launch);
    lap(1);
    s.download(states.data(), launch.states, states.size() * sizeof(DeltaDecodeState));
    s.download(digests, launch.digests, num_blocks * sizeof(std::uint64_t));
    lap(2);
    delta_decode_settle(batch, states.data(), digests);
}

std::vector<double> CudaDeltaDecoder::seconds() const { return state_->seconds; }

void CudaDeltaDecoder::close() {
    State& s = *state_;
    s.rows.close();
    s.first_block.close();
    s.parameters.close();
    s.units.close();
    s.states.close();
    s.digests.close();
}

}  // namespace weightsync
