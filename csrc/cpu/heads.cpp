#include "weightsync/heads.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "weightsync/float_codecs.hpp"
#include "weightsync/norm_math.hpp"
#include "weightsync/parallel.hpp"
#include "weightsync/rope_math.hpp"

namespace weightsync {
namespace {

// Elements that are worth a thread of their own.
constexpr std::int64_t kMinThreadElements = 200'000;

template <typename Type>
WEIGHTSYNC_HD_INLINE void norm_head(const RotatedRows& rows, const void* norm,
                                    typename Type::Memory* head) {
    const auto* weight = static_cast<const typename Type::Memory*>(norm);
    const float scale = rms_scale<Type>(head, rows.head_dim, rows.eps);
    for (std::int64_t i = 0; i < rows.head_dim; ++i) {
        head[i] = scale_normed<Type>(Type::load(head[i]), scale, Type::load(weight[i]));
    }
}

template <typename Type>
WEIGHTSYNC_HD_INLINE void row_body(const RotatedRows& rows, std::int64_t row) {
    using Memory = typename Type::Memory;
    const std::int64_t half = rows.head_dim / 2;
    const auto* __restrict cos = static_cast<const Memory*>(rows.cos) + rows.positions[row] * half;
    const auto* __restrict sin = static_cast<const Memory*>(rows.sin) + rows.positions[row] * half;
    auto* head = static_cast<Memory*>(rows.heads) + row * rows.row_stride;
    for (std::int64_t h = 0; h < rows.num_heads + rows.num_kv_heads; ++h, head += rows.head_dim) {
        const void* norm = h < rows.num_heads ? rows.query_norm : rows.key_norm;
        if (norm != nullptr) norm_head<Type>(rows, norm, head);
        Memory* __restrict first = head;
        Memory* __restrict second = head + half;
        for (std::int64_t i = 0; i < half; ++i) {
            const RotatedPair<Type> pair =
                rotate_pair<Type>(Type::load(first[i]), Type::load(second[i]), Type::load(cos[i]),
                                  Type::load(sin[i]));
            first[i] = pair.first;
            second[i] = pair.second;
        }
    }
}

template <typename Type>
void row_portable(const RotatedRows& rows, std::int64_t row) {
    row_body<Type>(rows, row);
}

#if defined(__x86_64__)
template <typename Type>
__attribute__((target("avx2"))) void row_avx2(const RotatedRows& rows, std::int64_t row) {
    row_body<Type>(rows, row);
}
#endif

using RotateRow = void (*)(const RotatedRows&, std::int64_t);

template <typename Type>
RotateRow pick_row() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return row_avx2<Type>;
#endif
    return row_portable<Type>;
}

RotateRow row_kernel(FloatType dtype) {
    switch (dtype) {
        case FloatType::fp32:
            return pick_row<Fp32>();
        case FloatType::bf16:
            return pick_row<Bf16>();
        case FloatType::fp16:
            return pick_row<Fp16>();
    }
    throw std::invalid_argument("rotated rows: unknown dtype");
}

void check(const RotatedRows& rows) {
    const std::int64_t width = (rows.num_heads + 2 * rows.num_kv_heads) * rows.head_dim;
    if (rows.num_rows < 0 || rows.num_heads < 1 || rows.num_kv_heads < 1 || rows.head_dim < 2 ||
        rows.head_dim % 2 != 0 || rows.row_stride < width) {
        throw std::invalid_argument("rotated rows: a size is negative or odd, or rows overlap");
    }
    for (std::int64_t row = 0; row < rows.num_rows; ++row) {
        const std::int64_t position = rows.positions[row];
        if (position < 0 || position >= rows.num_positions) {
            throw std::invalid_argument("rotated rows: row " + std::to_string(row) + ": position " +
                                        std::to_string(position) + " of " +
                                        std::to_string(rows.num_positions));
        }
    }
}

}  // namespace

void rotate_rows(const RotatedRows& rows, int num_threads) {
    check(rows);
    const RotateRow rotate_row = row_kernel(rows.dtype);
    const std::int64_t elements =
        rows.num_rows * (rows.num_heads + rows.num_kv_heads) * rows.head_dim;
    const auto threads = std::min<std::int64_t>(
        {num_threads, rows.num_rows, elements / kMinThreadElements + 1, kMaxThreads});
    std::atomic<std::int64_t> next{0};
    run_on_threads(static_cast<int>(threads), [&] {
        for (std::int64_t row = next++; row < rows.num_rows; row = next++) rotate_row(rows, row);
    });
}

}  // namespace weightsync
