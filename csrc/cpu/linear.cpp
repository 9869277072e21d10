#include "weightsync/linear.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "weightsync/linear_block.hpp"
#include "weightsync/parallel.hpp"

namespace weightsync {
namespace {

// Multiply-adds that are worth a thread of their own: more than a tenth of a millisecond of them.
// Starting one takes some 20 us on an idle machine; on a busy one the call waits for its turn.
constexpr std::int64_t kMinThreadWork = 2'000'000;
// Columns that a thread takes at a time: whole tiles, and few turns.
constexpr std::int64_t kBlockColumns = 48;

void check(const LinearProduct& product) {
    if (product.dtype != FloatType::bf16 && product.dtype != FloatType::fp16) {
        throw std::invalid_argument("product of rows: only bf16 and fp16 are computed here");
    }
    if (product.num_rows < 0 || product.num_inputs < 1 || product.num_outputs < 0 ||
        product.states_stride < product.num_inputs) {
        throw std::invalid_argument("product of rows: " + std::to_string(product.num_rows) +
                                    " rows of " + std::to_string(product.num_inputs) + " inputs, " +
                                    std::to_string(product.states_stride) + " apart, and " +
                                    std::to_string(product.num_outputs) + " outputs");
    }
}

int useful_threads(const LinearProduct& product, std::int64_t num_blocks, int num_threads) {
    const std::int64_t work = product.num_rows * product.num_inputs * product.num_outputs;
    const std::int64_t most =
        std::min<std::int64_t>({num_threads, num_blocks, work / kMinThreadWork + 1, kMaxThreads});
    return static_cast<int>(std::max<std::int64_t>(most, 1));
}

}  // namespace

void multiply_rows(const LinearProduct& product, int num_threads) {
    check(product);
    const LinearKernel kernel = linear_kernel(product.dtype);
    const std::int64_t padded =
        (product.num_inputs + kLinearLanes - 1) / kLinearLanes * kLinearLanes;
    const std::int64_t num_blocks = (product.num_outputs + kBlockColumns - 1) / kBlockColumns;
    const int threads = useful_threads(product, num_blocks, num_threads);
    std::vector<float> states(
        static_cast<std::size_t>(std::min(product.num_rows, kLinearPanelRows) * padded));
    for (std::int64_t row = 0; row < product.num_rows; row += kLinearPanelRows) {
        const std::int64_t num_rows = std::min(kLinearPanelRows, product.num_rows - row);
        kernel.widen_rows(product, row, num_rows, padded, states.data());
        std::atomic<std::int64_t> next{0};
        run_on_threads(threads, [&] {
            std::vector<float> weights;
            for (std::int64_t i = next++; i < num_blocks; i = next++) {
                const std::int64_t begin = i * kBlockColumns;
                const std::int64_t end = std::min(begin + kBlockColumns, product.num_outputs);
                const LinearBlock block{states.data(), padded, row, num_rows, begin, end};
                kernel.multiply_block(product, block, weights);
            }
        });
    }
}

}  // namespace weightsync
