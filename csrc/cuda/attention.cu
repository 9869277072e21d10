#include <cuda_runtime.h>

#include <algorithm>

#include "attention_kernels.cuh"
#include "attention_tiles.cuh"
#include "memory.cuh"
#include "weightsync/cuda_attention.hpp"

namespace weightsync {
namespace {

using namespace cuda;

// Shared memory that the driver keeps for itself in every block.
constexpr int kReservedBytes = 1024;

struct Limits {
    int num_sms;
    int block_bytes;  // shared memory that a block may have
    int sm_bytes;     // and all blocks of a multiprocessor together
};

int attribute(cudaDeviceAttr name, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute", device);
    return value;
}

Limits limits_of(int device) {
    return {attribute(cudaDevAttrMultiProcessorCount, device),
            attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
}

template <typename Kernel>
void allow_shared(Kernel kernel, int num_bytes, int device) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes),
          "cudaFuncSetAttribute", device);
}

struct Launch {
    const AttentionStep& step;
    const AttentionWork& work;
    cudaStream_t stream;
    int device;
    float scale_log2;

    template <typename Tensor, int kDim, int kStages>
    void split(const Limits& limits, int num_warps) const {
        constexpr int warp_bytes = kStages * kTileBytes<kDim>;
        allow_shared(split_kernel<Tensor, kDim, kStages>, num_warps * warp_bytes, device);
        const int blocks_an_sm =
            std::max(1, limits.sm_bytes / (num_warps * warp_bytes + kReservedBytes));
        const std::int64_t most = work.max_split * step.num_kv_heads;
        const auto blocks =
            static_cast<unsigned>(std::min<std::int64_t>(limits.num_sms * blocks_an_sm, most));
        launch_behind(split_kernel<Tensor, kDim, kStages>, dim3(blocks), num_warps * 32,
                      num_warps * warp_bytes, stream, device, "launch of split_kernel", step, work,
                      scale_log2);
    }

    template <typename Tensor, int kDim>
    void split(const Limits& limits) const {
        const int num_warps = work.num_warps > 0 ? work.num_warps : kThreads / 32;
        const bool has_room = num_warps * 3 * kTileBytes<kDim> <= limits.block_bytes;
        switch (work.num_stages > 0 ? work.num_stages : has_room ? 3 : 2) {
            case 2:
                return split<Tensor, kDim, 2>(limits, num_warps);
            case 3:
                return split<Tensor, kDim, 3>(limits, num_warps);
            default:
                return split<Tensor, kDim, 4>(limits, num_warps);
        }
    }

    template <typename Tensor, int kDim, int kWarps>
    void tiles_by() const {
        constexpr int num_bytes = tile_shared_bytes<kDim>(kWarps);
        allow_shared(tile_kernel<Tensor, kDim, kWarps>, num_bytes, device);
        const dim3 grid(static_cast<unsigned>(step.num_kv_heads),
                        static_cast<unsigned>(work.max_tiles), kTileEntries / (kWarps * kWarpRows));
        tile_kernel<Tensor, kDim, kWarps>
            <<<grid, kWarps * 32, num_bytes, stream>>>(step, work, scale_log2);
        check(cudaGetLastError(), "launch of tile_kernel", device);
    }

    template <typename Tensor, int kDim>
    void tiles(const Limits& limits) const {
        const auto has_room = [&](int num_warps) {
            return tile_shared_bytes<kDim>(num_warps) <= limits.block_bytes &&
                   (work.num_warps == 0 || work.num_warps >= num_warps);
        };
        if (has_room(8)) return tiles_by<Tensor, kDim, 8>();
        if (has_room(4)) return tiles_by<Tensor, kDim, 4>();
        return tiles_by<Tensor, kDim, 2>();
    }

    template <typename Tensor, int kDim>
    void all() const {
        const Limits limits = limits_of(device);
        if (work.max_split > 0) {
            split<Tensor, kDim>(limits);
            constexpr int entries = kCombinedEntries<kDim>;
            const dim3 grid(static_cast<unsigned>(step.num_sequences),
                            static_cast<unsigned>(step.num_kv_heads),
                            static_cast<unsigned>((work.partial_entries + entries - 1) / entries));
            launch_behind(combine_kernel<Tensor, kDim>, grid, kThreads, 0, stream, device,
                          "launch of combine_kernel", step, work, scale_log2);
        }
        if (work.max_tiles > 0) tiles<Tensor, kDim>(limits);
    }

    template <typename Tensor>
    void of_dim() const {
        switch (step.head_dim) {
            case 32:
                return all<Tensor, 32>();
            case 64:
                return all<Tensor, 64>();
            case 128:
                return all<Tensor, 128>();
            default:
                throw std::invalid_argument("attention on tensor cores: head_dim " +
                                            std::to_string(step.head_dim));
        }
    }
};

}  // namespace

void cuda_attend(const AttentionStep& step, const AttentionWork& work, std::uintptr_t stream,
                 int device) {
    if (step.num_sequences == 0) return;
    const DeviceScope scope(checked_device(device));
    constexpr float log2_e = 1.44269504f;
    const Launch launch{step, work, as_stream(stream), device, step.scale * log2_e};
    if (step.dtype == FloatType::bf16) return launch.of_dim<TensorBf16>();
    if (step.dtype == FloatType::fp16) return launch.of_dim<TensorFp16>();
    throw std::invalid_argument("attention on tensor cores: fp32");
}

}  // namespace weightsync
