#include "weightsync/peer_sum.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "memory.cuh"

namespace weightsync {
namespace {

constexpr int kThreads = 512;
constexpr int kLooksBetweenClocks = 64;

__device__ void store_release(std::uint32_t* address, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ std::uint32_t load_acquire(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ std::uint64_t now_ns() {
    std::uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Past every cache that does not see what other devices write.
__device__ Words4 load_part(const Words4* address) {
    Words4 found;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.w[0]), "=r"(found.w[1]), "=r"(found.w[2]), "=r"(found.w[3])
                 : "l"(address)
                 : "memory");
    return found;
}

__device__ std::uint32_t* word_at(std::uint64_t mailbox, std::int64_t offset) {
    return reinterpret_cast<std::uint32_t*>(mailbox + offset);
}

__device__ std::int64_t flag_offset(int block, int rank) {
    return 4 * (std::int64_t{block} * kMaxPeers + rank);
}

// True once `peer` has left its part of this block.
__device__ bool wait_for(const PeerSum& sum, std::uint32_t number, int peer) {
    const std::uint64_t mine = sum.mailboxes[sum.rank];
    const std::uint32_t* flag = word_at(mine, flag_offset(blockIdx.x, peer));
    const std::uint32_t* failed = word_at(mine, kMailboxFailed);
    const std::uint64_t start_ns = now_ns();
    while (true) {
        for (int look = 0; look < kLooksBetweenClocks; ++look) {
            // It may be one sum ahead already.
            if (static_cast<std::int32_t>(load_acquire(flag) - number) >= 0) return true;
        }
        if (load_acquire(failed) != 0) return false;
        if (now_ns() - start_ns > static_cast<std::uint64_t>(sum.limit_ns)) return false;
    }
}

template <FloatType Type>
__global__ __launch_bounds__(kThreads) void peer_sum_kernel(PeerSum sum) {
    __shared__ std::uint32_t shared_number;
    __shared__ int has_failed;
    const std::uint64_t mine = sum.mailboxes[sum.rank];
    if (threadIdx.x == 0) {
        shared_number = *static_cast<volatile std::uint32_t*>(word_at(mine, kMailboxNumber)) + 1;
        has_failed = load_acquire(word_at(mine, kMailboxFailed)) != 0;
    }
    __syncthreads();
    const std::uint32_t number = shared_number;
    const std::int64_t num_vectors = sum.num_bytes / 16;
    const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
    const auto* part = static_cast<const Words4*>(sum.part);
    const auto slot_of = [&](int owner, int rank) {
        return reinterpret_cast<Words4*>(sum.mailboxes[owner] + mailbox_slot(sum, number, rank));
    };
    if (!has_failed) {
        for (std::int64_t i = first; i < num_vectors; i += step) {
            const Words4 words = part[i];
            for (int peer = 0; peer < sum.size; ++peer) {
                if (peer != sum.rank) slot_of(peer, sum.rank)[i] = words;
            }
        }
        __threadfence_system();
        __syncthreads();
        const int peer = threadIdx.x;
        if (peer < sum.size && peer != sum.rank) {
            store_release(word_at(sum.mailboxes[peer], flag_offset(blockIdx.x, sum.rank)), number);
            if (!wait_for(sum, number, peer)) has_failed = 1;
        }
        __syncthreads();
    }
    if (has_failed && threadIdx.x < sum.size) {
        store_release(word_at(sum.mailboxes[threadIdx.x], kMailboxFailed), 1);
    }
    auto* out = static_cast<Words4*>(sum.sum);
    for (std::int64_t i = first; i < num_vectors; i += step) {
        if (has_failed) {
            out[i] = Words4{{~0u, ~0u, ~0u, ~0u}};  // NaN in every type
            continue;
        }
        Sums8 sums;
        for (int rank = 0; rank < sum.size; ++rank) {
            const Words4 words =
                rank == sum.rank ? part[i] : load_part(slot_of(sum.rank, rank) + i);
            add_part<Type>(sums, words);
        }
        out[i] = rounded_sums<Type>(sums);
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // the last block to end numbers the sum: all have read the number
        std::uint32_t* ended = word_at(mine, kMailboxEnded);
        if (atomicAdd(ended, 1) == gridDim.x - 1) {
            *ended = 0;
            *word_at(mine, kMailboxNumber) = number;
            __threadfence();
        }
    }
}

void check_sum(const PeerSum& sum) {
    const bool is_sized = sum.num_bytes > 0 && sum.num_bytes % 16 == 0 &&
                          sum.num_bytes <= sum.slot_bytes && sum.slot_bytes % 16 == 0;
    if (!is_sized || sum.size < 2 || sum.size > kMaxPeers || sum.rank < 0 || sum.rank >= sum.size) {
        throw std::invalid_argument("peer_sum: sizes, or a rank, that do not fit a mailbox");
    }
}

template <FloatType Type>
void launch(const PeerSum& sum, cudaStream_t stream) {
    const std::int64_t wanted = (sum.num_bytes / 16 + kThreads - 1) / kThreads;
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, kMaxPeerBlocks));
    peer_sum_kernel<Type><<<blocks, kThreads, 0, stream>>>(sum);
}

}  // namespace

void cuda_peer_sum(const PeerSum& sum, std::uintptr_t stream, int device) {
    check_sum(sum);
    const cuda::DeviceScope scope(cuda::checked_device(device));
    const cudaStream_t on = cuda::as_stream(stream);
    switch (sum.dtype) {
        case FloatType::fp32:
            launch<FloatType::fp32>(sum, on);
            break;
        case FloatType::bf16:
            launch<FloatType::bf16>(sum, on);
            break;
        case FloatType::fp16:
            launch<FloatType::fp16>(sum, on);
            break;
    }
    cuda::check(cudaGetLastError(), "launch of peer_sum_kernel", device);
}

}  // namespace weightsync
