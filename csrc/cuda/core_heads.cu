// Compiled without fused multiply-add, so that an element has the bits that the CPU gives it.
#include <cuda_runtime.h>

#include "memory.cuh"
#include "row_parts.cuh"
#include "weightsync/cuda_core.hpp"
#include "weightsync/rope_math.hpp"

namespace weightsync {
namespace {

using cuda::as_stream;
using cuda::blocks_for;
using cuda::checked_device;
using cuda::DeviceScope;
using cuda::norm_scale;
using cuda::warp_total;
using cuda::with_type;

constexpr int kHeadWarps = 8;

// kCount elements side by side, read at once if kAtOnce: they are aligned then.
template <typename Type, int kCount, bool kAtOnce>
struct alignas(kCount * sizeof(typename Type::Memory)) Adjacent {
    using Memory = typename Type::Memory;
    Memory values[kCount];

    static __device__ Adjacent at(const Memory* source) {
        Adjacent found;
        if constexpr (kAtOnce) {
            found = *reinterpret_cast<const Adjacent*>(source);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) found.values[i] = source[i];
        }
        return found;
    }
    __device__ void write(Memory* target) const {
        if constexpr (kAtOnce) {
            *reinterpret_cast<Adjacent*>(target) = *this;
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) target[i] = values[i];
        }
    }
    __device__ float operator[](int i) const { return Type::load(values[i]); }
};

// What a lane reads of a head: kPairs pairs of elements that rotate together, the weights of their
// norm, and by how much they rotate.
template <typename Type, int kPairs, bool kAtOnce>
struct HeadPart {
    using Memory = typename Type::Memory;
    using Some = Adjacent<Type, kPairs, kAtOnce>;
    Some first;
    Some second;
    Some first_weight;
    Some second_weight;
    Some cos;
    Some sin;

    __device__ void load(const Memory* head, const Memory* weight, const Memory* cosines,
                         const Memory* sines, std::int64_t half) {
        first = Some::at(head);
        second = Some::at(head + half);
        cos = Some::at(cosines);
        sin = Some::at(sines);
        if (weight == nullptr) return;
        first_weight = Some::at(weight);
        second_weight = Some::at(weight + half);
    }

    __device__ float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            sum += first[j] * first[j];
            sum += second[j] * second[j];
        }
        return sum;
    }

    __device__ void place(Memory* out, std::int64_t half, bool has_norm, float scale) const {
        Some rotated[2];
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            float low = first[j];
            float high = second[j];
            if (has_norm) {
                low = Type::load(scale_normed<Type>(low, scale, first_weight[j]));
                high = Type::load(scale_normed<Type>(high, scale, second_weight[j]));
            }
            const RotatedPair<Type> pair = rotate_pair<Type>(low, high, cos[j], sin[j]);
            rotated[0].values[j] = pair.first;
            rotated[1].values[j] = pair.second;
        }
        rotated[0].write(out);
        rotated[1].write(out + half);
    }
};

// One warp has one head of one row: a lane has kPairs neighbours among the pairs, and those
// 32 * kPairs further. All that heads of usual size need is asked for before any of it is used.
template <typename Type, int kPairs, bool kAtOnce>
__device__ void place_rotated(const HeadRows& rows, const typename Type::Memory* head,
                              const void* norm, std::int64_t position, typename Type::Memory* out) {
    using Memory = typename Type::Memory;
    using Part = HeadPart<Type, kPairs, kAtOnce>;
    const std::int64_t half = rows.head_dim / 2;
    const int own = static_cast<int>(threadIdx.x) % 32 * kPairs;
    const auto* weight = static_cast<const Memory*>(norm);
    const auto* cos = static_cast<const Memory*>(rows.cos) + position * half;
    const auto* sin = static_cast<const Memory*>(rows.sin) + position * half;
    const auto load = [&](Part& part, std::int64_t i) {
        part.load(head + i, weight == nullptr ? nullptr : weight + i, cos + i, sin + i, half);
    };
    Part part;
    if (own < half) load(part, own);
    float scale = 1.0f;
    if (weight != nullptr) {
        float squares = own < half ? part.squares() : 0.0f;
        for (std::int64_t i = own + 32 * kPairs; i < half; i += 32 * kPairs) {
            Part more;
            load(more, i);
            squares += more.squares();
        }
        scale = norm_scale(warp_total(squares), rows.head_dim, rows.eps);
    }
    if (own < half) part.place(out + own, half, weight != nullptr, scale);
    for (std::int64_t i = own + 32 * kPairs; i < half; i += 32 * kPairs) {
        load(part, i);
        part.place(out + i, half, weight != nullptr, scale);
    }
}

template <typename Type, int kPairs, bool kAtOnce>
__global__ __launch_bounds__(kHeadWarps * 32) void heads_kernel(HeadRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    using Memory = typename Type::Memory;
    using Some = Adjacent<Type, kPairs, kAtOnce>;
    const std::int64_t num_heads = rows.num_heads + 2 * rows.num_kv_heads;
    const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
    if (unit >= rows.num_rows * num_heads) return;
    const std::int64_t row = unit / num_heads;
    const std::int64_t head = unit % num_heads;
    auto* source = static_cast<Memory*>(rows.heads) + row * rows.row_stride + head * rows.head_dim;
    if (head < rows.num_heads) {
        place_rotated<Type, kPairs, kAtOnce>(rows, source, rows.query_norm, rows.positions[row],
                                             source);
        return;
    }
    const std::int64_t slot = rows.slot_mapping[row];
    if (slot < 0) return;
    const bool is_key = head < rows.num_heads + rows.num_kv_heads;
    const std::int64_t kv_head = (head - rows.num_heads) % rows.num_kv_heads;
    auto* out = static_cast<Memory*>(is_key ? rows.cache_keys : rows.cache_values) +
                (slot * rows.num_kv_heads + kv_head) * rows.head_dim;
    if (is_key) {
        place_rotated<Type, kPairs, kAtOnce>(rows, source, rows.key_norm, rows.positions[row], out);
        return;
    }
    for (std::int64_t d = threadIdx.x % 32 * kPairs; d < rows.head_dim; d += 32 * kPairs) {
        Some::at(source + d).write(out + d);
    }
}

// Whether two elements side by side can be read at once, wherever a pair of them begins.
bool has_even_places(const HeadRows& rows, std::size_t element_bytes) {
    const auto is_even = [&](const void* pointer) {
        return reinterpret_cast<std::uintptr_t>(pointer) % (2 * element_bytes) == 0;
    };
    return rows.row_stride % 2 == 0 && is_even(rows.heads) && is_even(rows.query_norm) &&
           is_even(rows.key_norm) && is_even(rows.cos) && is_even(rows.sin) &&
           is_even(rows.cache_keys) && is_even(rows.cache_values);
}

// How many neighbours a lane has, which decides the order of sums, depends on the width alone.
template <typename Type>
auto heads_kernel_for(const HeadRows& rows) {
    if (rows.head_dim % 4 != 0) return heads_kernel<Type, 1, true>;
    return has_even_places(rows, sizeof(typename Type::Memory)) ? heads_kernel<Type, 2, true>
                                                                : heads_kernel<Type, 2, false>;
}

}  // namespace

void cuda_place_heads(const HeadRows& rows, std::uintptr_t stream, int device) {
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    const std::int64_t units = rows.num_rows * (rows.num_heads + 2 * rows.num_kv_heads);
    with_type(rows.dtype, [&](auto type) {
        cuda::launch_behind(heads_kernel_for<decltype(type)>(rows),
                            dim3(blocks_for(units, kHeadWarps)), kHeadWarps * 32, 0,
                            as_stream(stream), device, "launch of heads_kernel", rows);
    });
}

}  // namespace weightsync
