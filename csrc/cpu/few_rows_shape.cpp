#include <algorithm>

#include "weightsync/few_rows.hpp"

namespace weightsync {
namespace {

constexpr std::int32_t kMostWarps[] = {8, 12};           // gated: the latter
constexpr std::int32_t kStages[] = {2, 3, 4, 6, 8, 12};  // that kernels are compiled for

// Of the warps' time in all rounds, in thousandths.
std::int64_t share_at_work(std::int64_t tiles, std::int64_t warps) {
    const std::int64_t rounds = (tiles + warps - 1) / warps;
    return tiles * 1000 / (rounds * warps);
}

}  // namespace

FewRowsShape few_rows_shape(const FewRowsProduct& product, int num_multiprocessors,
                            std::int64_t most_shared_bytes) {
    FewRowsShape shape{};
    const std::int64_t tiles =
        product.weight_rows / (product.is_gated ? 2 * kFewRowsTile : kFewRowsTile);
    shape.num_blocks =
        static_cast<std::int32_t>(std::min<std::int64_t>(num_multiprocessors, tiles));
    const std::int64_t stage_bytes = few_rows_stage_bytes(product.is_gated);
    const std::int64_t room = most_shared_bytes - product.num_rows * few_rows_pitch(product.inner);
    std::int64_t best = -1;
    for (std::int32_t warps = 1; warps <= kMostWarps[product.is_gated]; ++warps) {
        if (kStages[0] * warps * stage_bytes > room) break;
        const std::int64_t share =
            share_at_work(tiles, static_cast<std::int64_t>(warps) * shape.num_blocks);
        if (share < best) continue;
        best = share;
        shape.num_warps = warps;
    }
    if (shape.num_warps == 0) return shape;
    const std::int64_t ring_bytes = shape.num_warps * stage_bytes;
    for (const std::int32_t stages : kStages) {
        if (stages * ring_bytes <= room) shape.num_stages = stages;
    }
    const std::int64_t used = most_shared_bytes - room + shape.num_stages * ring_bytes;
    // No two blocks of products fit on one multiprocessor, so that none is left without.
    shape.shared_bytes = static_cast<std::int32_t>(std::max(used, most_shared_bytes / 2 + 1024));
    return shape;
}

}  // namespace weightsync
