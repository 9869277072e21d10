#include "weightsync/cuda_attention.hpp"

namespace weightsync {

std::string no_tensor_cores_reason(FloatType dtype, std::int64_t num_heads,
                                   std::int64_t num_kv_heads, std::int64_t head_dim) {
    if (dtype == FloatType::fp32) return "float32";
    if (head_dim != 32 && head_dim != 64 && head_dim != 128) {
        return "head_dim " + std::to_string(head_dim) + " (32, 64 and 128 are)";
    }
    if (num_heads / num_kv_heads > kWarpEntries) {
        return std::to_string(num_heads / num_kv_heads) + " query heads a KV head (up to " +
               std::to_string(kWarpEntries) + " are)";
    }
    return {};
}

void plan_attention(const AttentionStep& step, const AttentionWork& work) {
    const auto group = static_cast<std::int32_t>(step.num_heads / step.num_kv_heads);
    AttentionCounts total{0, 0};
    for (std::int32_t s = 0; s < step.num_sequences; ++s) {
        const std::int32_t rows = step.query_starts[s + 1] - step.query_starts[s];
        const AttentionCounts counts = items_of(rows, step.context_lens[s], group);
        const bool is_whole =
            counts.num_split > 0 && total.num_split + counts.num_split <= work.max_split;
        work.first_split[s] = is_whole ? total.num_split : -1;
        for (std::int32_t i = 0; i < counts.num_split; ++i) {
            if (total.num_split + i >= work.max_split) break;
            work.split[total.num_split + i] = split_item(s, step.context_lens[s], i);
        }
        for (std::int32_t i = 0; i < counts.num_tiles; ++i) {
            if (total.num_tiles + i >= work.max_tiles) break;
            work.tiles[total.num_tiles + i] = {s, i * kTileEntries};
        }
        total.num_split += counts.num_split;
        total.num_tiles += counts.num_tiles;
    }
    if (total.num_split > work.max_split) {
        total.num_split = static_cast<std::int32_t>(work.max_split);
    }
    if (total.num_tiles > work.max_tiles) {
        total.num_tiles = static_cast<std::int32_t>(work.max_tiles);
    }
    *work.counts = total;
}

}  // namespace weightsync
