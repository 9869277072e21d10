#include "weightsync/sampling.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "weightsync/parallel.hpp"
#include "weightsync/sampling_math.hpp"

namespace weightsync {
namespace {

constexpr std::int64_t kBlock = 256;
constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Scores that are worth a thread of their own.
constexpr std::int64_t kMinThreadScores = 20'000;

WEIGHTSYNC_HD_INLINE void noise_body(NoiseKey key, std::int64_t first, std::int64_t count,
                                     float* noise) {
    for (std::int64_t i = 0; i < count; ++i) {
        noise[i] = gumbel_noise(key, static_cast<std::uint32_t>(first + i));
    }
}

// A block's best first, then where it is: a better one is rare.
WEIGHTSYNC_HD_INLINE std::int64_t row_body(const SampleStep& step, std::int64_t row) {
    const float* scores = step.scores + row * step.row_stride;
    const float scale = step.noise_scales[row];
    const NoiseKey key = noise_key(step.seeds[row], step.positions[row]);
    float best = kLowest;
    std::int64_t token = -1;
    float values[kBlock];
    for (std::int64_t first = 0; first < step.vocab_size; first += kBlock) {
        const std::int64_t count = std::min(kBlock, step.vocab_size - first);
        if (scale != 0.0f) {
            noise_body(key, first, count, values);
            for (std::int64_t i = 0; i < count; ++i) values[i] = scores[first + i] + values[i];
        } else {
            for (std::int64_t i = 0; i < count; ++i) values[i] = scores[first + i];
        }
        for (std::int64_t i = 0; i < count; ++i) {
            if (values[i] > best) {
                best = values[i];
                token = first + i;
            }
        }
    }
    return token;
}

std::int64_t row_portable(const SampleStep& step, std::int64_t row) { return row_body(step, row); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::int64_t row_avx2(const SampleStep& step, std::int64_t row) {
    return row_body(step, row);
}
#endif

using SampleRow = std::int64_t (*)(const SampleStep&, std::int64_t);

SampleRow pick_row() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return row_avx2;
#endif
    return row_portable;
}

}  // namespace

void sample_tokens(const SampleStep& step, int num_threads) {
    if (step.num_rows < 0 || step.vocab_size < 1 || step.row_stride < step.vocab_size) {
        throw std::invalid_argument("sampling: a size is negative, or rows overlap");
    }
    static const SampleRow sample_row = pick_row();
    const std::int64_t useful = step.num_rows * step.vocab_size / kMinThreadScores + 1;
    std::atomic<std::int64_t> next{0};
    const auto threads = std::min<std::int64_t>({num_threads, step.num_rows, useful, kMaxThreads});
    run_on_threads(static_cast<int>(threads), [&] {
        for (std::int64_t row = next++; row < step.num_rows; row = next++) {
            step.tokens[row] = sample_row(step, row);
        }
    });
}

void fill_gumbel_noise(std::uint64_t seed, std::int64_t position, std::int64_t vocab_size,
                       float* noise) {
    noise_body(noise_key(seed, position), 0, vocab_size, noise);
}

void gumbel_of_each(const std::uint32_t* bits, std::int64_t count, float* noise, float* low,
                    float* high) {
    for (std::int64_t i = 0; i < count; ++i) {
        const NoiseBounds bounds = gumbel_bounds(bits[i]);
        noise[i] = gumbel_of_bits(bits[i]);
        low[i] = bounds.low;
        high[i] = bounds.high;
    }
}

}  // namespace weightsync
