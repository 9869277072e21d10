// Blocks of many spans to bits; see delta_block_work.hpp for the steps, delta_twin.cpp for the same
// without a device.
#include <algorithm>

#include "delta_device.cuh"
#include "weightsync/delta_block_work.hpp"

namespace weightsync {
namespace {

using namespace lanes;

// Blocks of threads a multiprocessor: with more of them registers are spilt, which takes longer.
constexpr int kBlocks = 4;
// Changes of one warp that shared memory holds beside the others.
constexpr std::uint32_t kCapacity = 352;
struct Launch {
    const DeltaSpanRow* rows;
    const std::int64_t* first_block;
    const DeltaParameters* parameters;
    const std::uint64_t* digests;
    DeltaBlockResult* results;
    const DeltaBlockUnit* units;
    const std::uint32_t* num_units;  // of the crowded, counted on the device
    DeltaBlockUnit* crowded;
    std::uint32_t* num_crowded;
    unsigned char* arena;
    std::uint64_t arena_bytes;
    unsigned long long* arena_used;
    unsigned char* scratch;  // of the crowded
    std::size_t scratch_bytes;
};

// What a block of threads shares.
struct Shared {
    DeltaBlockCounts counts;
    unsigned long long digest;
    unsigned long long offset;
};

// What all threads of a block of threads know.
struct Work {
    const DeltaBlockPlace& block;
    const DeltaStage& stage;
    const DeltaParameters& parameters;
    DeltaBlockCounts* counts;
    std::uint32_t warp;
    std::uint32_t lane;
};

// Staged changes from `first` on, one a lane. Adds up what they add to the digest, and in lane c
// how many are of class c.
template <DeltaKind kind>
__device__ __forceinline__ void turn(const Work& work, std::uint32_t first, std::uint32_t staged,
                                     std::uint64_t* growth, std::uint32_t* in_class) {
    const std::uint32_t i = first + work.lane;
    std::uint32_t c = kDeltaClasses;
    if (i < staged) {
        *growth += delta_turn<kind>(work.stage, work.block, work.parameters,
                                    work.counts->starts[work.warp], work.warp, i);
        c = work.stage.label[work.warp * work.stage.capacity + i] & 7;
    }
#pragma unroll
    for (std::uint32_t one = 0; one < kDeltaClasses; ++one) {
        const unsigned votes = __ballot_sync(kFull, c == one);
        if (work.lane == one) *in_class += static_cast<std::uint32_t>(__popc(votes));
    }
}

// Looks at all rows of a warp, and turns what changed while it is still in the caches: as soon as
// there are changes for all lanes. Returns what they add to the digest, in every lane its part.
template <DeltaKind kind, bool has_byte_keys>
__device__ __forceinline__ std::uint64_t look_at(const Work& work, const DeltaCuts& cuts) {
    using Vector = DeltaVector<kind>;
    constexpr std::uint32_t unroll = 2 / Vector::vectors;
    const DeltaBlockPlace& block = work.block;
    const std::uint32_t warp = work.warp;
    const std::uint32_t lane = work.lane;
    const int num_thresholds = work.parameters.num_thresholds;
    FieldSum running(lane);
    std::uint64_t growth = 0;
    std::uint32_t in_class = 0;
    std::uint32_t found = 0;  // changes, which all lanes need
    std::uint32_t turned = 0;
    for (std::uint32_t r = 0;; r += unroll) {
        const std::uint32_t start = warp * kDeltaWarpElements + r * Vector::row_elements;
        const bool is_over = r >= Vector::rows || start >= block.size;
        if (!is_over) {
            typename Vector::Lane old[unroll];
            typename Vector::Lane current[unroll];
#pragma unroll
            for (std::uint32_t u = 0; u < unroll; ++u) {
                const std::uint32_t at = start + u * Vector::row_elements + lane * Vector::elements;
                if (start + unroll * Vector::row_elements <= block.size) {
                    old[u] = Vector::read_whole(block.old, at);
                    current[u] = Vector::read_whole(block.current, at);
                } else {
                    old[u] = Vector::read(block.old, at, block.size);
                    current[u] = Vector::read(block.current, at, block.size);
                }
            }
#pragma unroll
            for (std::uint32_t u = 0; u < unroll; ++u) {
                const std::uint32_t at = start + u * Vector::row_elements + lane * Vector::elements;
                const std::uint32_t changed = Vector::changed_mask(old[u], current[u]);
                const DeltaCounts own =
                    delta_count<kind, has_byte_keys>(old[u], changed, cuts, num_thresholds);
                DeltaCounts total;
                const DeltaCounts before = scan_counts(own, num_thresholds > 2, &total);
                if (lane <= kDeltaThresholds) {
                    work.counts->starts[warp][r + u].reached[lane] =
                        static_cast<std::uint16_t>(running.sum());
                }
                delta_stage_lane(work.stage, warp, at, changed, before, found);
                running.add(total);
                found += total.low & 1023u;
            }
        }
        const std::uint32_t staged = min(found, work.stage.capacity);
        if (turned + (is_over ? 1 : kWarpLanes) <= staged) __syncwarp();
        while (turned + (is_over ? 1 : kWarpLanes) <= staged) {
            turn<kind>(work, turned, staged, &growth, &in_class);
            turned += kWarpLanes;
        }
        if (is_over) break;
    }
    if (lane <= kDeltaThresholds) work.counts->totals[warp][lane] = running.sum();
    if (lane < kDeltaClasses) work.counts->places[warp][lane] = in_class;
    return growth;
}

template <DeltaKind kind>
__device__ __forceinline__ std::uint64_t look(const Work& work) {
    const DeltaCuts cuts = delta_cuts<kind>(work.parameters);
    if (kind == DeltaKind::float16 && delta_has_byte_keys<kind>(work.parameters)) {
        return look_at<kind, kind == DeltaKind::float16>(work, cuts);
    }
    return look_at<kind, false>(work, cuts);
}

// One block by the whole block of threads; all of them return together.
template <DeltaKind kind, bool is_last>
__device__ __forceinline__ void encode_block(const Launch& launch, const DeltaBlockUnit& unit,
                                             const DeltaStage& stage, Shared* shared,
                                             DeltaParameters* parameters) {
    const std::uint32_t thread = threadIdx.x;
    const std::uint32_t warp = thread / kWarpLanes;
    const std::uint32_t lane = thread % kWarpLanes;
    DeltaBlockCounts& counts = shared->counts;
    const DeltaSpanRow& row = launch.rows[unit.row];
    const std::int64_t at = launch.first_block[unit.row] + unit.block;
    const auto* from = reinterpret_cast<const unsigned char*>(launch.parameters + unit.row);
    for (std::uint32_t i = thread; i < sizeof(DeltaParameters); i += kDeltaThreads) {
        reinterpret_cast<unsigned char*>(parameters)[i] = from[i];
    }
    if (thread == 0) shared->digest = 0;
    __syncthreads();
    const DeltaBlockPlace block = delta_place_of<kind>(row, row.new_ptr, unit.block);
    const std::uint64_t sum =
        cuda::warp_sum(look<kind>(Work{block, stage, *parameters, &counts, warp, lane}));
    if (lane == 0) atomicAdd(&shared->digest, static_cast<unsigned long long>(sum));
    __syncthreads();
    if (thread <= kDeltaThresholds) delta_add_warps(stage, static_cast<int>(thread), &counts);
    __syncthreads();
    DeltaBlockResult result{launch.digests[at],     0, 0, counts.num_changed,
                            DeltaBlockStatus::done, 0};
    const auto finish = [&](DeltaBlockStatus status) {
        if (thread != 0) return;
        result.status = status;
        if (!is_last && status == DeltaBlockStatus::crowded) {
            launch.crowded[atomicAdd(launch.num_crowded, 1u)] = unit;
        }
        launch.results[at] = result;
    };
    if (!counts.is_fitting) return finish(DeltaBlockStatus::crowded);
    if (counts.num_changed == 0) return finish(DeltaBlockStatus::done);
    // A warp a class: what one thread does, another of its warp would have to wait for.
    if (lane == 0 && warp <= kDeltaClasses) {
        delta_measure_class(block.size, *parameters, static_cast<int>(warp), &counts);
    }
    __syncthreads();
    if (thread == 0) delta_choose_mode(block.size, *parameters, &counts);
    __syncthreads();
    const WarpTeam team{lane};
    const bool has_class = static_cast<int>(warp) < counts.num_classes;
    if (static_cast<int>(lane) < counts.num_classes) {
        delta_begin_places(warp, static_cast<int>(lane), &counts);
    }
    __syncwarp();
    delta_place(team, stage, warp, counts.staged[warp], counts.mode == DeltaMode::gaps,
                counts.places[warp], counts.numbers[warp]);
    __syncthreads();
    if (has_class) delta_measure(team, stage, &counts.classes[warp]);
    __syncthreads();
    std::uint32_t total = 0;
    const DeltaPlanes planes =
        delta_planes(counts.classes, counts.num_classes, static_cast<int>(warp), &total);
    result.num_bytes = static_cast<std::uint32_t>((total + 7) / 8);
    result.mode = static_cast<std::uint32_t>(counts.mode);
    result.digest += shared->digest;
    const auto words = static_cast<std::uint32_t>((total + 31) / 32);
    if (result.num_bytes >
        delta_dense_limit(std::int64_t{block.size} * DeltaElement<kind>::bytes)) {
        return finish(DeltaBlockStatus::dense);
    }
    if (words > stage.bit_words) return finish(DeltaBlockStatus::crowded);
    for (std::uint32_t i = thread; i < words; i += kDeltaThreads) stage.high[i] = 0;
    if (thread == 0) {
        shared->offset =
            atomicAdd(launch.arena_used, static_cast<unsigned long long>((words + 3) / 4 * 16));
    }
    __syncthreads();
    if (has_class) delta_put_class(team, stage, counts.classes[warp], planes, stage.high);
    if (thread == kDeltaThreads - 1) {
        delta_put_counts(counts.classes, counts.num_classes, stage.high);
    }
    __syncthreads();
    result.offset = shared->offset;
    // Beyond its end nothing is written: the host sees how much was needed, and comes again.
    if (result.offset + std::uint64_t{words} * 4 <= launch.arena_bytes) {
        auto* out = reinterpret_cast<std::uint32_t*>(launch.arena + result.offset);
        for (std::uint32_t i = thread; i < words; i += kDeltaThreads) out[i] = stage.high[i];
    }
    finish(DeltaBlockStatus::done);
}

template <DeltaKind kind>
__global__ __launch_bounds__(kDeltaThreads, kBlocks) void encode_kernel(Launch launch) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Shared shared;
    __shared__ __align__(8) unsigned char parameters[sizeof(DeltaParameters)];
    DeltaStage stage;
    delta_stage_at(held_shared(memory), kCapacity, 0, &stage);
    encode_block<kind, false>(launch, launch.units[blockIdx.x], stage, held_shared(&shared),
                              reinterpret_cast<DeltaParameters*>(parameters));
}

// What was crowded, with room for everything in the device's memory.
template <DeltaKind kind>
__global__ __launch_bounds__(kDeltaThreads) void crowded_kernel(Launch launch) {
    __shared__ Shared shared;
    __shared__ __align__(8) unsigned char parameters[sizeof(DeltaParameters)];
    DeltaStage stage;
    delta_stage_at(launch.scratch + blockIdx.x * launch.scratch_bytes, kDeltaWarpElements,
                   kDeltaCrowdedWords, &stage);
    const std::uint32_t count = *launch.num_units;
    for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        encode_block<kind, true>(launch, launch.units[i], stage, &shared,
                                 reinterpret_cast<DeltaParameters*>(parameters));
        __syncthreads();
    }
}

// Elements of a sample that a thread has in flight: of a piece, all.
constexpr int kSampleThreads = 256;
constexpr int kSampleBatch = kSamplePiece / kSampleThreads;

// A block of threads a span.
template <DeltaKind kind>
__device__ void sample_span(const DeltaSpanRow& row, std::uint32_t (*steps)[kDeltaMaxTypical + 1],
                            DeltaSampleCounts* counts, DeltaSampleCounts* out) {
    using Element = DeltaElement<kind>;
    const std::uint32_t thread = threadIdx.x;
    auto* zero = reinterpret_cast<std::uint32_t*>(steps);
    for (std::uint32_t i = thread; i < 256 * (kDeltaMaxTypical + 1); i += blockDim.x) zero[i] = 0;
    for (std::uint32_t i = thread; i < 256; i += blockDim.x)
        counts->all[i] = counts->changed[i] = 0;
    __syncthreads();
    const auto* old = reinterpret_cast<const unsigned char*>(row.old_ptr);
    const auto* current = reinterpret_cast<const unsigned char*>(row.new_ptr);
    const auto size = static_cast<std::int64_t>(row.num_elements);
    const auto load_one = [](const unsigned char* ptr, std::int64_t i) -> std::uint32_t {
        if constexpr (Element::bytes == 4) return reinterpret_cast<const std::uint32_t*>(ptr)[i];
        if constexpr (Element::bytes == 2) return reinterpret_cast<const std::uint16_t*>(ptr)[i];
        return ptr[i];
    };
    std::uint32_t compared = 0;
    std::uint32_t counted = 0;
    for (std::int64_t p = 0; p < delta_sample_pieces(size); ++p) {
        const DeltaSamplePiece piece = delta_sample_piece(size, p);
        compared += static_cast<std::uint32_t>(piece.end - piece.begin);
        counted += static_cast<std::uint32_t>(piece.counted_end - piece.begin);
        for (std::int64_t first = piece.begin + thread; first < piece.end;
             first += kSampleBatch * blockDim.x) {
            std::uint32_t from[kSampleBatch];
            std::uint32_t to[kSampleBatch];
#pragma unroll
            for (int k = 0; k < kSampleBatch; ++k) {  // all loads come before the first count
                const std::int64_t i = first + k * blockDim.x;
                from[k] = i < piece.end ? load_one(old, i) : 0;
                to[k] = i < piece.end ? load_one(current, i) : 0;
            }
#pragma unroll
            for (int k = 0; k < kSampleBatch; ++k) {
                const std::uint32_t key = Element::key(from[k]);
                if (first + k * blockDim.x < piece.counted_end) atomicAdd(&counts->all[key], 1u);
                if (from[k] == to[k]) continue;
                std::uint32_t down = 0;
                const std::uint32_t step = Element::step(from[k], to[k], &down);
                atomicAdd(&counts->changed[key], 1u);
                atomicAdd(&steps[key][step <= kDeltaMaxTypical ? step : 0], 1u);
            }
        }
    }
    __syncthreads();
    for (std::uint32_t i = thread; i < 256; i += blockDim.x) {
        out->all[i] = counts->all[i];
        out->changed[i] = counts->changed[i];
        out->typical[i] = delta_typical_step(steps[i]);
    }
    if (thread == 0) {
        out->num_compared = compared;
        out->num_counted = counted;
    }
}

__global__ __launch_bounds__(kSampleThreads) void sample_kernel(const DeltaSpanRow* rows,
                                                                DeltaSampleCounts* out) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ DeltaSampleCounts counts;
    auto* steps = reinterpret_cast<std::uint32_t (*)[kDeltaMaxTypical + 1]>(memory);
    const DeltaSpanRow row = rows[blockIdx.x];
    switch (static_cast<DeltaKind>(row.kind)) {
        case DeltaKind::bytes:
            return sample_span<DeltaKind::bytes>(row, steps, &counts, out + blockIdx.x);
        case DeltaKind::float8:
            return sample_span<DeltaKind::float8>(row, steps, &counts, out + blockIdx.x);
        case DeltaKind::float16:
            return sample_span<DeltaKind::float16>(row, steps, &counts, out + blockIdx.x);
        default:
            return sample_span<DeltaKind::float32>(row, steps, &counts, out + blockIdx.x);
    }
}

constexpr std::size_t kSampleBytes = 256 * (kDeltaMaxTypical + 1) * sizeof(std::uint32_t);

}  // namespace

struct CudaDeltaEncoder::State {
    int device;
    cuda::DeviceArray<DeltaSpanRow> rows;
    cuda::DeviceArray<std::int64_t> first_block;
    cuda::DeviceArray<DeltaParameters> parameters;
    cuda::DeviceArray<DeltaSampleCounts> samples;
    cuda::DeviceArray<std::uint64_t> digests;
    cuda::DeviceArray<DeltaBlockResult> results;
    cuda::DeviceArray<DeltaBlockUnit> units;
    cuda::DeviceArray<DeltaBlockUnit> crowded;
    cuda::DeviceArray<std::uint32_t> num_crowded;
    cuda::DeviceArray<unsigned long long> arena_used;
    cuda::DeviceArray<unsigned char> arena;
    cuda::DeviceArray<unsigned char> scratch;
    PinnedBytes pinned_samples;
    PinnedBytes pinned_results;
    PinnedBytes pinned_arena;
    std::vector<double> seconds;
    cudaStream_t stream = nullptr;

    template <typename T>
    T* upload(cuda::DeviceArray<T>* array, const std::vector<T>& values) {
        return upload(array, values.data(), values.size());
    }
    template <typename T>
    T* upload(cuda::DeviceArray<T>* array, const T* values, std::size_t size) {
        return weightsync::upload(array, values, size, device, stream);
    }
    void download(void* to, const void* from, std::size_t bytes) {
        cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream),
                    "cudaMemcpyAsync", device);
        wait();
    }
    void wait() { cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device); }

    void sample(DeltaBatch* batch) {
        const std::size_t count = batch->rows.size();
        DeltaSampleCounts* out = fit(&samples, count, device);
        cuda::check(cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(kSampleBytes)),
                    "cudaFuncSetAttribute", device);
        sample_kernel<<<static_cast<unsigned>(count), kSampleThreads, kSampleBytes, stream>>>(
            rows.get(), out);
        cuda::check(cudaGetLastError(), "launch of sample_kernel", device);
        const std::size_t bytes = count * sizeof(DeltaSampleCounts);
        download(pinned_samples.fit(bytes, device), out, bytes);
    }

    template <DeltaKind kind>
    void encode(const DeltaBatch& batch, Launch launch) {
        const std::vector<DeltaBlockUnit> cut = delta_units(batch, kind);
        if (cut.empty()) return;
        launch.units = upload(&units, cut);
        launch.crowded = fit(&crowded, cut.size(), device);
        launch.num_crowded = fit(&num_crowded, 1, device);
        cuda::check(cudaMemsetAsync(launch.num_crowded, 0, 4, stream), "cudaMemsetAsync", device);
        DeltaStage stage;
        const std::size_t shared_bytes = delta_stage_at(nullptr, kCapacity, 0, &stage);
        cuda::check(
            cudaFuncSetAttribute(encode_kernel<kind>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)),
            "cudaFuncSetAttribute", device);
        encode_kernel<kind>
            <<<static_cast<unsigned>(cut.size()), kDeltaThreads, shared_bytes, stream>>>(launch);
        cuda::check(cudaGetLastError(), "launch of encode_kernel", device);
        std::uint32_t found = 0;
        download(&found, launch.num_crowded, sizeof(found));
        if (found == 0) return;
        launch.scratch_bytes =
            delta_stage_at(nullptr, kDeltaWarpElements, kDeltaCrowdedWords, &stage);
        const std::uint32_t blocks = std::min(found, 132u);
        launch.scratch = fit(&scratch, launch.scratch_bytes * blocks, device);
        launch.units = launch.crowded;
        launch.num_units = launch.num_crowded;
        crowded_kernel<kind><<<blocks, kDeltaThreads, 0, stream>>>(launch);
        cuda::check(cudaGetLastError(), "launch of crowded_kernel", device);
    }

    // Bytes of the arena that were needed; more than there are: nothing was coded whole.
    std::uint64_t encode_all(const DeltaBatch& batch, const Launch& launch) {
        cuda::check(cudaMemsetAsync(launch.arena_used, 0, sizeof(unsigned long long), stream),
                    "cudaMemsetAsync", device);
        encode<DeltaKind::bytes>(batch, launch);
        encode<DeltaKind::float8>(batch, launch);
        encode<DeltaKind::float16>(batch, launch);
        encode<DeltaKind::float32>(batch, launch);
        unsigned long long used = 0;
        download(&used, launch.arena_used, sizeof(used));
        return used;
    }
};

CudaDeltaEncoder::CudaDeltaEncoder(int device) : state_(new State{}) {
    state_->device = cuda::checked_device(device);
}

CudaDeltaEncoder::~CudaDeltaEncoder() = default;

void CudaDeltaEncoder::run(DeltaBatch* batch, const std::uint64_t* digests, std::uintptr_t stream,
                           std::uintptr_t sample_stream, int num_threads) {
    State& s = *state_;
    s.seconds.assign(4, 0);
    if (batch->rows.empty()) return;
    const cuda::DeviceScope scope(s.device);
    s.stream = cuda::as_stream(sample_stream);
    double start_s = now_s();
    const auto lap = [&](std::size_t part) {
        const double end_s = now_s();
        s.seconds[part] = end_s - start_s;
        start_s = end_s;
    };
    const auto blocks = static_cast<std::size_t>(batch->num_blocks());
    Launch launch{};
    launch.rows = s.upload(&s.rows, batch->rows);
    launch.first_block = s.upload(&s.first_block, batch->first_block);
    launch.digests = s.upload(&s.digests, digests, blocks);
    s.sample(batch);
    lap(0);
    delta_batch_choose(batch,
                       reinterpret_cast<DeltaSampleCounts*>(s.pinned_samples.fit(0, s.device)),
                       num_threads);
    lap(1);
    s.stream = cuda::as_stream(stream);  // what was uploaded is there: the sample was waited for
    launch.parameters = s.upload(&s.parameters, batch->parameters);
    launch.results = fit(&s.results, blocks, s.device);
    launch.arena_used = fit(&s.arena_used, 1, s.device);
    std::uint64_t used = 0;
    for (std::uint64_t room = std::max<std::uint64_t>(s.arena.size(), blocks * 2048);;
         room = used + used / 8) {
        launch.arena = fit(&s.arena, room, s.device);
        launch.arena_bytes = s.arena.size();
        used = s.encode_all(*batch, launch);
        if (used <= launch.arena_bytes) break;
    }
    lap(2);
    const std::size_t bytes = blocks * sizeof(DeltaBlockResult);
    unsigned char* const results = s.pinned_results.fit(bytes, s.device);
    s.download(results, launch.results, bytes);
    batch->results = reinterpret_cast<DeltaBlockResult*>(results);
    unsigned char* const arena = s.pinned_arena.fit(used, s.device);
    if (used > 0) s.download(arena, launch.arena, used);
    batch->arena = arena;
    lap(3);
}

std::vector<double> CudaDeltaEncoder::seconds() const { return state_->seconds; }

void CudaDeltaEncoder::close() {
    State& s = *state_;
    s.rows.close();
    s.first_block.close();
    s.parameters.close();
    s.samples.close();
    s.digests.close();
    s.results.close();
    s.units.close();
    s.crowded.close();
    s.num_crowded.close();
    s.arena_used.close();
    s.arena.close();
    s.scratch.close();
    s.pinned_samples.close(s.device);
    s.pinned_results.close(s.device);
    s.pinned_arena.close(s.device);
}

}  // namespace weightsync
