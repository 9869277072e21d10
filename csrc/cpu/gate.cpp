#include "weightsync/gate.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "weightsync/float_codecs.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

// Elements that are worth a thread of their own.
constexpr std::int64_t kMinThreadElements = 100'000;

template <typename Type>
WEIGHTSYNC_HD_INLINE void row_body(const GatedRows& rows, std::int64_t row) {
    using Memory = typename Type::Memory;
    const Memory* gate = static_cast<const Memory*>(rows.gate_up) + row * rows.row_stride;
    const Memory* up = gate + rows.width;
    Memory* out = static_cast<Memory*>(rows.output) + row * rows.width;
    for (std::int64_t i = 0; i < rows.width; ++i) {
        const float rounded = Type::load(Type::store(silu(Type::load(gate[i]))));
        out[i] = Type::store(rounded * Type::load(up[i]));
    }
}

template <typename Type>
void row_portable(const GatedRows& rows, std::int64_t row) {
    row_body<Type>(rows, row);
}

#if defined(__x86_64__)
template <typename Type>
__attribute__((target("avx2"))) void row_avx2(const GatedRows& rows, std::int64_t row) {
    row_body<Type>(rows, row);
}
#endif

using GateRow = void (*)(const GatedRows&, std::int64_t);

template <typename Type>
GateRow pick_row() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return row_avx2<Type>;
#endif
    return row_portable<Type>;
}

GateRow row_kernel(FloatType dtype) {
    switch (dtype) {
        case FloatType::fp32:
            return pick_row<Fp32>();
        case FloatType::bf16:
            return pick_row<Bf16>();
        case FloatType::fp16:
            return pick_row<Fp16>();
    }
    throw std::invalid_argument("gated rows: unknown dtype");
}

}  // namespace

void gate_rows(const GatedRows& rows, int num_threads) {
    if (rows.num_rows < 0 || rows.width < 1 || rows.row_stride < 2 * rows.width) {
        throw std::invalid_argument("gated rows: a size is negative, or rows overlap");
    }
    const GateRow gate_row = row_kernel(rows.dtype);
    const std::int64_t useful = rows.num_rows * rows.width / kMinThreadElements + 1;
    const auto threads = std::min<std::int64_t>({num_threads, rows.num_rows, useful, kMaxThreads});
    std::atomic<std::int64_t> next{0};
    run_on_threads(static_cast<int>(threads), [&] {
        for (std::int64_t row = next++; row < rows.num_rows; row = next++) gate_row(rows, row);
    });
}

}  // namespace weightsync
