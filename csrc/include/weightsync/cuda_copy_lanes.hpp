// One lane's part of a copy unit.
#pragma once

#include <cstdint>

#include "weightsync/cuda_lanes.hpp"
#include "weightsync/cuda_units.hpp"

namespace weightsync::lanes {

// Vectors lane, lane + 32, ...; `Unroll` of them are loaded before the first is stored.
template <bool IsAligned, int Unroll>
WEIGHTSYNC_HD inline void copy_vectors(unsigned char* target, const unsigned char* source,
                                       std::uint32_t num_vectors, std::uint32_t lane) {
    for (std::uint32_t first = lane; first < num_vectors; first += kWarpLanes * Unroll) {
        Vec16 vectors[Unroll];
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < Unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            if (i < num_vectors) {
                vectors[u] = IsAligned ? load<Vec16>(source + 16 * i)
                                       : load_unaligned<Vec16>(source + 16 * i);
            }
        }
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < Unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            if (i < num_vectors) store(target + 16 * i, vectors[u]);
        }
    }
}

// At most kCopyWarpBytes, any alignment of either side.
WEIGHTSYNC_HD inline void copy_piece(unsigned char* target, const unsigned char* source,
                                     std::uint32_t num_bytes, std::uint32_t lane) {
    if (is_aligned(target, 16) && is_aligned(source, 16) && num_bytes % 16 == 0) {
        copy_vectors<true, 8>(target, source, num_bytes / 16, lane);
        return;
    }
    const auto to_line =
        static_cast<std::uint32_t>((16 - (reinterpret_cast<std::uintptr_t>(target) & 15)) & 15);
    const std::uint32_t head = to_line < num_bytes ? to_line : num_bytes;
    std::uint32_t num_vectors = (num_bytes - head) / 16;
    if (is_aligned(source + head, 16)) {
        copy_vectors<true, 8>(target + head, source + head, num_vectors, lane);
    } else {
        // The last vector must not read past the piece.
        if (num_vectors > 0 && (num_bytes - head) % 16 < kOverreadBytes) --num_vectors;
        copy_vectors<false, 4>(target + head, source + head, num_vectors, lane);
    }
    if (lane < head) target[lane] = source[lane];
    for (std::uint32_t i = head + 16 * num_vectors + lane; i < num_bytes; i += kWarpLanes) {
        target[i] = source[i];
    }
}

WEIGHTSYNC_HD inline void convert_element(unsigned char* target, const unsigned char* source) {
    const std::uint16_t half = fp32_bits_to_bf16(load_bytes<std::uint32_t>(source));
    if (is_aligned(target, 2)) {
        store(target, half);
    } else {
        target[0] = static_cast<unsigned char>(half);
        target[1] = static_cast<unsigned char>(half >> 8);
    }
}

// fp32 to bf16; `num_bytes` of the source, at most kCopyWarpBytes.
WEIGHTSYNC_HD inline void convert_piece(unsigned char* target, const unsigned char* source,
                                        std::uint32_t num_bytes, std::uint32_t lane) {
    constexpr int unroll = 8;
    std::uint32_t first_element = 0;
    if (is_aligned(source, 16) && is_aligned(target, 8)) {
        const std::uint32_t num_vectors = num_bytes / 16;
        first_element = 4 * num_vectors;
        for (std::uint32_t first = lane; first < num_vectors; first += kWarpLanes * unroll) {
            Vec16 vectors[unroll];
            WEIGHTSYNC_UNROLL
            for (int u = 0; u < unroll; ++u) {
                const std::uint32_t i = first + u * kWarpLanes;
                if (i < num_vectors) vectors[u] = load<Vec16>(source + 16 * i);
            }
            WEIGHTSYNC_UNROLL
            for (int u = 0; u < unroll; ++u) {
                const std::uint32_t i = first + u * kWarpLanes;
                const std::uint32_t* w = vectors[u].w;
                if (i < num_vectors) {
                    store(target + 8 * i,
                          Vec8{{fp32_pair_to_bf16(w[0], w[1]), fp32_pair_to_bf16(w[2], w[3])}});
                }
            }
        }
    }
    for (std::uint32_t i = first_element + lane; i < num_bytes / 4; i += kWarpLanes) {
        convert_element(target + 2 * i, source + 4 * i);
    }
}

// Where a grid unit starts, so that its runs are found with 32-bit divisions.
struct GridStart {
    std::int64_t index[3];
    bool is_small;  // every count is below 2^31
};

template <typename Row>
WEIGHTSYNC_HD inline GridStart grid_start(const Row& row, std::int64_t run) {
    GridStart start{};
    std::int64_t counts = 0;
    for (int dim = 2; dim >= 0; --dim) {
        start.index[dim] = run % row.dims[dim].count;
        run /= row.dims[dim].count;
        counts |= row.dims[dim].count;
    }
    start.is_small = counts >> 31 == 0;
    return start;
}

// The index of the run `local` (below 2^16) after the start.
template <typename Row>
WEIGHTSYNC_HD inline void run_index(const Row& row, const GridStart& start, std::uint32_t local,
                                    std::int64_t (&index)[3]) {
    std::uint32_t carry = local;
    for (int dim = 2; dim >= 0; --dim) {
        if (start.is_small) {
            const std::uint32_t sum = static_cast<std::uint32_t>(start.index[dim]) + carry;
            const auto count = static_cast<std::uint32_t>(row.dims[dim].count);
            carry = sum / count;
            index[dim] = sum - carry * count;
        } else {
            const std::int64_t sum = start.index[dim] + carry;
            carry = static_cast<std::uint32_t>(sum / row.dims[dim].count);
            index[dim] = sum % row.dims[dim].count;
        }
    }
}

WEIGHTSYNC_HD inline RunOffset near_run(const Segment& row, const GridStart& start,
                                        std::uint32_t local) {
    std::int64_t index[3];
    run_index(row, start, local, index);
    RunOffset offset{0, 0};
    for (int dim = 0; dim < kSegmentDims; ++dim) {
        offset.source += index[dim] * row.dims[dim].source_stride_bytes;
        offset.target += index[dim] * row.dims[dim].target_stride_bytes;
    }
    return offset;
}

// Elements of T: all pointers, strides and the run are multiples of sizeof(T).
template <typename T>
WEIGHTSYNC_HD inline void copy_grid_elements(const Segment& row, const GridUnit& unit,
                                             unsigned char* target, const unsigned char* source,
                                             std::uint32_t lane) {
    constexpr int unroll = 4;
    const GridStart start = grid_start(row, unit.first_run);
    const auto per_run = static_cast<std::uint32_t>(row.num_bytes / sizeof(T));
    const std::uint32_t total = unit.num_runs * per_run;
    for (std::uint32_t first = lane; first < total; first += kWarpLanes * unroll) {
        T values[unroll];
        std::int64_t places[unroll];
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < unroll; ++u) {
            const std::uint32_t i = first + u * kWarpLanes;
            if (i < total) {
                const RunOffset offset = near_run(row, start, i / per_run);
                const std::int64_t within = i % per_run * std::int64_t{sizeof(T)};
                values[u] = load<T>(source + offset.source + within);
                places[u] = offset.target + within;
            }
        }
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < unroll; ++u) {
            if (first + u * kWarpLanes < total) store(target + places[u], values[u]);
        }
    }
}

WEIGHTSYNC_HD inline void convert_grid_elements(const Segment& row, const GridUnit& unit,
                                                unsigned char* target, const unsigned char* source,
                                                std::uint32_t lane) {
    const GridStart start = grid_start(row, unit.first_run);
    const auto per_run = static_cast<std::uint32_t>(row.num_bytes / 4);
    for (std::uint32_t i = lane; i < unit.num_runs * per_run; i += kWarpLanes) {
        const RunOffset offset = near_run(row, start, i / per_run);
        const std::uint32_t within = i % per_run;
        convert_element(target + offset.target + 2 * std::int64_t{within},
                        source + offset.source + 4 * std::int64_t{within});
    }
}

WEIGHTSYNC_HD inline void copy_grid(const Segment& row, const GridUnit& unit,
                                    std::int64_t source_base, std::int64_t target_base,
                                    std::uint32_t lane) {
    const auto* source = reinterpret_cast<const unsigned char*>(row.source_ptr + source_base);
    auto* target = reinterpret_cast<unsigned char*>(row.target_ptr + target_base);
    if (row.conversion() == Convert::fp32_to_bf16) {
        convert_grid_elements(row, unit, target, source, lane);
        return;
    }
    std::int64_t mixed = reinterpret_cast<std::int64_t>(source) |
                         reinterpret_cast<std::int64_t>(target) | row.num_bytes;
    for (const SegmentDim& d : row.dims) mixed |= d.source_stride_bytes | d.target_stride_bytes;
    if (mixed % 16 == 0) {
        copy_grid_elements<Vec16>(row, unit, target, source, lane);
    } else if (mixed % 8 == 0) {
        copy_grid_elements<Vec8>(row, unit, target, source, lane);
    } else if (mixed % 4 == 0) {
        copy_grid_elements<std::uint32_t>(row, unit, target, source, lane);
    } else if (mixed % 2 == 0) {
        copy_grid_elements<std::uint16_t>(row, unit, target, source, lane);
    } else {
        copy_grid_elements<std::uint8_t>(row, unit, target, source, lane);
    }
}

// The part of a warp in a copy unit.
template <Convert convert>
WEIGHTSYNC_HD inline void copy_unit(const CopyUnit& unit, const WarpShare& share,
                                    std::int64_t source_base, std::int64_t target_base,
                                    std::uint32_t lane) {
    const std::int64_t begin = std::int64_t{share.share} * kCopyWarpBytes;
    const auto num_bytes =
        share.is_shared ? static_cast<std::uint32_t>(kCopyWarpBytes) : unit.num_bytes;
    const auto* source =
        reinterpret_cast<const unsigned char*>(unit.source_ptr + source_base + begin);
    auto* target = reinterpret_cast<unsigned char*>(unit.target_ptr + target_base +
                                                    converted_bytes(begin, convert));
    if constexpr (convert == Convert::none) {
        copy_piece(target, source, num_bytes, lane);
    } else {
        convert_piece(target, source, num_bytes, lane);
    }
}

}  // namespace weightsync::lanes
