#include "weightsync/norm.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "weightsync/float_codecs.hpp"
#include "weightsync/norm_math.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

// Elements that are worth a thread of their own.
constexpr std::int64_t kMinThreadElements = 200'000;

template <typename Type>
WEIGHTSYNC_HD_INLINE void group_body(const NormedRows& rows, std::int64_t row, std::int64_t group) {
    using Memory = typename Type::Memory;
    const Memory* input =
        static_cast<const Memory*>(rows.input) + row * rows.row_stride + group * rows.group_stride;
    const Memory* weight = static_cast<const Memory*>(rows.weight);
    Memory* out = static_cast<Memory*>(rows.output) + (row * rows.num_groups + group) * rows.width;
    const float scale = rms_scale<Type>(input, rows.width, rows.eps);
    for (std::int64_t i = 0; i < rows.width; ++i) {
        const float rounded = Type::load(Type::store(Type::load(input[i]) * scale));
        out[i] = Type::store(rounded * Type::load(weight[i]));
    }
}

template <typename Type>
void group_portable(const NormedRows& rows, std::int64_t row, std::int64_t group) {
    group_body<Type>(rows, row, group);
}

#if defined(__x86_64__)
template <typename Type>
__attribute__((target("avx2"))) void group_avx2(const NormedRows& rows, std::int64_t row,
                                                std::int64_t group) {
    group_body<Type>(rows, row, group);
}
#endif

using NormGroup = void (*)(const NormedRows&, std::int64_t, std::int64_t);

template <typename Type>
NormGroup pick_group() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return group_avx2<Type>;
#endif
    return group_portable<Type>;
}

NormGroup group_kernel(FloatType dtype) {
    switch (dtype) {
        case FloatType::fp32:
            return pick_group<Fp32>();
        case FloatType::bf16:
            return pick_group<Bf16>();
        case FloatType::fp16:
            return pick_group<Fp16>();
    }
    throw std::invalid_argument("normed rows: unknown dtype");
}

}  // namespace

void norm_rows(const NormedRows& rows, int num_threads) {
    if (rows.num_rows < 0 || rows.num_groups < 1 || rows.width < 1) {
        throw std::invalid_argument("normed rows: a size is negative or zero");
    }
    const NormGroup norm_group = group_kernel(rows.dtype);
    const std::int64_t elements = rows.num_rows * rows.num_groups * rows.width;
    const auto threads = std::min<std::int64_t>(
        {num_threads, rows.num_rows, elements / kMinThreadElements + 1, kMaxThreads});
    std::atomic<std::int64_t> next{0};
    run_on_threads(static_cast<int>(threads), [&] {
        for (std::int64_t row = next++; row < rows.num_rows; row = next++) {
            for (std::int64_t group = 0; group < rows.num_groups; ++group) {
                norm_group(rows, row, group);
            }
        }
    });
}

}  // namespace weightsync
