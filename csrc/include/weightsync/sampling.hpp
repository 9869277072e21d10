// Drawing tokens from scores.
#pragma once

#include <cstdint>

namespace weightsync {

// Scores are fp32 [num_rows, vocab_size] with rows `row_stride` elements apart; -infinity rules a
// token out. A row is drawn by its seed and position, or, where `noise_scales` is 0 and not 1, is
// its largest score; of equal ones the lowest token wins. `tokens` gets one int64 a row: -1 if no
// score of the row is a number above -infinity.
struct SampleStep {
    const float* scores;
    std::int64_t num_rows;
    std::int64_t vocab_size;
    std::int64_t row_stride;
    const std::uint64_t* seeds;
    const std::int64_t* positions;
    const float* noise_scales;
    std::int64_t* tokens;
};

void sample_tokens(const SampleStep& step, int num_threads);

// The noise itself, fp32 [vocab_size].
void fill_gumbel_noise(std::uint64_t seed, std::int64_t position, std::int64_t vocab_size,
                       float* noise);

// Of each of some random bits the noise, and between what it must lie; for tests.
void gumbel_of_each(const std::uint32_t* bits, std::int64_t count, float* noise, float* low,
                    float* high);

}  // namespace weightsync
