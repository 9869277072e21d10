// One warp's part of attention on tensor cores: sixteen entries against tokens in shared memory.
//
// What is rounded, and in which order, is written out (no contraction is left to the compiler), so
// that the split kernel, the combining one and the tile kernel agree to the bit.
#pragma once

#include <cstdint>

#include "weightsync/cuda_attention.hpp"

namespace weightsync::cuda {

inline __device__ std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; zeros if `is_there` is false.
inline __device__ void copy_async(std::uint32_t target, const void* source, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}
// The same of what nobody reads again: it makes way in the cache for what is.
inline __device__ void copy_async_once(std::uint32_t target, const void* source, bool is_there) {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
                 "l"(source), "r"(is_there ? 16 : 0), "l"(policy)
                 : "memory");
}
inline __device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
inline __device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
inline __device__ void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
inline __device__ void load_matrices_transposed(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// 2^x; exact at 0, and 0 at -infinity.
inline __device__ float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

struct TensorBf16 {
    static constexpr FloatType dtype = FloatType::bf16;
    static inline __device__ void multiply(float (&sum)[4], const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    // Nearest, ties to even; `low` goes to the low half.
    static inline __device__ std::uint32_t pack(float low, float high) {
        std::uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};

struct TensorFp16 {
    static constexpr FloatType dtype = FloatType::fp16;
    static inline __device__ void multiply(float (&sum)[4], const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static inline __device__ std::uint32_t pack(float low, float high) {
        std::uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};

// By what each side of a merge is multiplied. Maxima are in units of scores before scaling.
struct Fold {
    float max;
    float before;
    float chunk;
};

inline __device__ Fold fold_of(float before_max, float chunk_max, float scale_log2) {
    const float max = fmaxf(before_max, chunk_max);
    const float shift = max == -INFINITY ? 0.0f : max;  // nothing seen on either side
    return {max, exp2_fast(__fmul_rn(__fsub_rn(before_max, shift), scale_log2)),
            exp2_fast(__fmul_rn(__fsub_rn(chunk_max, shift), scale_log2))};
}

inline __device__ float folded(float before, float chunk, const Fold& fold) {
    return __fadd_rn(__fmul_rn(before, fold.before), __fmul_rn(chunk, fold.chunk));
}

// A warp's entries as the tensor cores hold them: lane l has rows l / 4 and l / 4 + 8 of the tile
// of sixteen, and of every eight columns 2 * (l % 4) and the next.
template <int kDim>
struct WarpSums {
    float max[2];
    float sum[2];  // of this lane's columns, until sum_columns
    float values[kDim / 8][4];

    __device__ void reset() {
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (auto& block : values) block[0] = block[1] = block[2] = block[3] = 0.0f;
    }

    __device__ void sum_columns() {
#pragma unroll
        for (float& value : sum) {
            value = __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
            value = __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
        }
    }

    // Merges a chunk whose columns are summed.
    __device__ void fold_in(const WarpSums& chunk, float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Fold fold = fold_of(max[half], chunk.max[half], scale_log2);
            max[half] = fold.max;
            sum[half] = folded(sum[half], chunk.sum[half], fold);
#pragma unroll
            for (int block = 0; block < kDim / 8; ++block) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    values[block][i] = folded(values[block][i], chunk.values[block][i], fold);
                }
            }
        }
    }
};

// Queries of a warp's entries, as the left side of a product. Entry e of the sequence is at
// `row_of(e)`; entries that are none are zero.
template <int kDim>
struct WarpQueries {
    std::uint32_t pieces[kDim / 16][4];

    template <typename Locate>
    __device__ void load(Locate&& locate) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint16_t* row = locate(lane / 4 + 8 * half);
#pragma unroll
            for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int element = k * 16 + side * 8 + lane % 4 * 2;
                    pieces[k][half + 2 * side] =
                        row == nullptr ? 0u
                                       : *reinterpret_cast<const std::uint32_t*>(row + element);
                }
            }
        }
    }
};

// The queries of 16 entries in shared memory, swizzled, as the left side of a product.
template <int kDim>
inline __device__ void load_queries(std::uint32_t (&out)[4], std::uint32_t rows, int k) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 8 % 2 * 8 + lane % 8;
    load_matrices(out, rows + swizzled<kDim / 8>(row, k * 2 + lane / 16) * 16);
}

// Products of kTiles times sixteen entries with kTokenTile tokens' K. `query_at(out, tile, k)`
// gives the entries' part at elements 16 k.
template <typename Tensor, int kDim, int kTiles, typename QueryAt>
inline __device__ void score_tokens(QueryAt&& query_at, std::uint32_t keys,
                                    float (&scores)[kTiles][kTokenTile / 8][4]) {
    constexpr int kPieces = kDim / 8;
    const int lane = threadIdx.x % 32;
    const int token = lane / 16 * 8 + lane % 8;
    const int side = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        std::uint32_t a[kTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) query_at(a[tile], tile, k);
#pragma unroll
        for (int pair = 0; pair < kTokenTile / 16; ++pair) {
            std::uint32_t b[4];
            load_matrices(b, keys + swizzled<kPieces>(pair * 16 + token, k * 2 + side) * 16);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                Tensor::multiply(scores[tile][2 * pair], a[tile], b[0], b[1]);
                Tensor::multiply(scores[tile][2 * pair + 1], a[tile], b[2], b[3]);
            }
        }
    }
}

// Leaves out what the lane's two entries do not see: of a tile, tokens from seen[half] on.
inline __device__ void mask_scores(const int (&seen)[2], float (&scores)[kTokenTile / 8][4]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < kTokenTile / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (block * 8 + column + i % 2 >= seen[i / 2]) scores[block][i] = -INFINITY;
        }
    }
}

// Scores become weights, and what was found before counts by the new maximum.
template <int kDim>
inline __device__ void weigh_scores(float (&scores)[kTokenTile / 8][4], float scale_log2,
                                    WarpSums<kDim>& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float max = -INFINITY;
#pragma unroll
        for (const auto& block : scores) {
            max = fmaxf(max, fmaxf(block[2 * half], block[2 * half + 1]));
        }
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 2));
        max = fmaxf(max, sums.max[half]);
        const float shift = max == -INFINITY ? 0.0f : max;
        const float decay = exp2_fast(__fmul_rn(__fsub_rn(sums.max[half], shift), scale_log2));
        sums.max[half] = max;
        const float scaled_shift = __fmul_rn(shift, scale_log2);
        float total = 0.0f;
#pragma unroll
        for (auto& block : scores) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                block[i] = exp2_fast(__fmaf_rn(block[i], scale_log2, -scaled_shift));
                total = __fadd_rn(total, block[i]);
            }
        }
        sums.sum[half] = __fmaf_rn(sums.sum[half], decay, total);
#pragma unroll
        for (auto& value : sums.values) {
            value[2 * half] = __fmul_rn(value[2 * half], decay);
            value[2 * half + 1] = __fmul_rn(value[2 * half + 1], decay);
        }
    }
}

// Adds tokens' values by their weights: elements of each, from those of piece `first_piece` on, as
// many as `sums` have.
template <typename Tensor, int kDim, int kTiles, int kColumns>
inline __device__ void add_values(const float (&scores)[kTiles][kTokenTile / 8][4],
                                  std::uint32_t values, int first_piece,
                                  WarpSums<kColumns> (&sums)[kTiles]) {
    constexpr int kPieces = kDim / 8;
    const int lane = threadIdx.x % 32;
    const int token = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < kTokenTile / 16; ++k) {
        std::uint32_t weights[kTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const float (&low)[4] = scores[tile][2 * k];
            const float (&high)[4] = scores[tile][2 * k + 1];
            weights[tile][0] = Tensor::pack(low[0], low[1]);
            weights[tile][1] = Tensor::pack(low[2], low[3]);
            weights[tile][2] = Tensor::pack(high[0], high[1]);
            weights[tile][3] = Tensor::pack(high[2], high[3]);
        }
#pragma unroll
        for (int pair = 0; pair < kColumns / 16; ++pair) {
            std::uint32_t b[4];
            const int piece = first_piece + pair * 2 + lane / 16;
            load_matrices_transposed(b, values + swizzled<kPieces>(k * 16 + token, piece) * 16);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                Tensor::multiply(sums[tile].values[2 * pair], weights[tile], b[0], b[1]);
                Tensor::multiply(sums[tile].values[2 * pair + 1], weights[tile], b[2], b[3]);
            }
        }
    }
}

// kTokenTile tokens' K and V, swizzled, against a warp's queries. `seen` is how many of them, from
// the first, each of the lane's entries sees; it may be negative or too large.
template <typename Tensor, int kDim, int kTiles, typename QueryAt>
inline __device__ void attend_tokens(QueryAt&& query_at, std::uint32_t keys, std::uint32_t values,
                                     const int (&seen)[kTiles][2], float scale_log2,
                                     WarpSums<kDim> (&sums)[kTiles]) {
    float scores[kTiles][kTokenTile / 8][4] = {};
    score_tokens<Tensor, kDim, kTiles>(query_at, keys, scores);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        // A lone tile is masked without a branch, which would keep what follows from beginning.
        const bool sees_all = min(seen[tile][0], seen[tile][1]) >= kTokenTile;
        if (kTiles == 1 || !__all_sync(0xFFFFFFFFu, sees_all))
            mask_scores(seen[tile], scores[tile]);
        weigh_scores<kDim>(scores[tile], scale_log2, sums[tile]);
    }
    add_values<Tensor, kDim, kTiles, kDim>(scores, values, 0, sums);
}

// Bytes of kTokenTile tokens' K and V in shared memory.
template <int kDim>
inline constexpr int kTileBytes = 2 * kTokenTile * kDim * 2;

// Copies K and V of kTokenTile tokens of one KV head into a stage, by kLoaders threads of which
// this is number `loader`; `slot_at(i)` is the slot of the stage's token i, negative for none.
template <int kDim, int kLoaders, bool kIsReadOnce, typename SlotAt>
inline __device__ void load_tokens(const AttentionStep& step, std::int32_t kv_head,
                                   std::uint32_t stage, int loader, SlotAt&& slot_at) {
    constexpr int kPieces = kDim / 8;
    constexpr int kTokensAtOnce = kLoaders / kPieces;
    static_assert(kLoaders % kPieces == 0 && kTokenTile % kTokensAtOnce == 0);
    const std::int64_t slot_elements = step.num_kv_heads * kDim;
    const int piece = loader % kPieces;
    const std::int64_t offset = kv_head * kDim + piece * 8;
    const auto* keys = static_cast<const std::uint16_t*>(step.cache_keys) + offset;
    const auto* values = static_cast<const std::uint16_t*>(step.cache_values) + offset;
#pragma unroll
    for (int i = 0; i < kTokenTile / kTokensAtOnce; ++i) {
        const int token = i * kTokensAtOnce + loader / kPieces;
        const std::int32_t slot = slot_at(i, token);
        const std::int64_t place = slot < 0 ? 0 : slot * slot_elements;
        const std::uint32_t target = stage + swizzled<kPieces>(token, piece) * 16;
        const std::uint32_t of_values = target + kTileBytes<kDim> / 2;
        if constexpr (kIsReadOnce) {
            copy_async_once(target, keys + place, slot >= 0);
            copy_async_once(of_values, values + place, slot >= 0);
        } else {
            copy_async(target, keys + place, slot >= 0);
            copy_async(of_values, values + place, slot >= 0);
        }
    }
}

}  // namespace weightsync::cuda
