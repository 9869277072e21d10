// The steps of decoding one block by a block of threads that are neither the look nor the codes.
#pragma once

#include "weightsync/delta_decode_batch.hpp"
#include "weightsync/delta_team_decode.hpp"

namespace weightsync::lanes {

// Threads `thread` of `count` clear what is only added to.
template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_clear_maps(const Team&, std::uint32_t thread, std::uint32_t count,
                                           DeltaDecodeBlock* block) {
    for (std::uint32_t i = thread; i < kDecodeMapWords + 2; i += count) block->map[i] = 0;
    for (std::uint32_t i = thread; i < kDecodeExceptionWords; i += count) {
        block->exception_map[i] = 0;
    }
    if (thread == 0) block->state = block->num_found = 0;
}

template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE DeltaEmit<kind> delta_emit_of(const DeltaDecodeRow& row,
                                                   const DeltaParameters& parameters,
                                                   const DeltaDecodeUnit& unit,
                                                   DeltaDecodeBlock* block) {
    DeltaEmit<kind> emit;
    emit.block = block;
    emit.codes = DeltaCodes::at(row.record_ptr + unit.offset, unit.num_bytes);
    emit.place = delta_place_of<kind>(row, 0, unit.block);
    emit.parameters = &parameters;
    emit.cuts = delta_cuts<kind>(parameters);
    emit.out = {reinterpret_cast<std::uint32_t*>(row.positions_ptr),
                reinterpret_cast<unsigned char*>(row.values_ptr), 0,
                unit.block * static_cast<std::uint32_t>(kDeltaBlock)};
    return emit;
}

// By one thread: room for the changes of a block among those of its span, if there is so much.
WEIGHTSYNC_HD_INLINE bool delta_take_output(const DeltaDecodeRow& row, std::uint32_t count,
                                            DeltaDecodeState* state, DeltaDecodeOutput* out) {
#ifdef __CUDA_ARCH__
    out->first = atomicAdd(&state->num_changed, count);
#else
    out->first = state->num_changed;
    state->num_changed += count;
#endif
    const bool fits = std::uint64_t{out->first} + count <= row.num_changed;
    if (!fits) set_bits(&state->state, kDecodeDamaged);
    return fits;
}

// By one thread, once all was looked at. False if that is not what the bits said.
WEIGHTSYNC_HD_INLINE bool delta_all_found(DeltaDecodeBlock* block, DeltaDecodeState* state) {
    const bool are_all = block->num_found == block->num_changed;
    if (!are_all) set_bits(&state->state, kDecodeDamaged);
    return are_all;
}

// By one thread: `sum` is what the changes add to the digest.
WEIGHTSYNC_HD_INLINE void delta_end_block(const DeltaDecodeUnit& unit, std::uint64_t sum,
                                          std::uint32_t block_state, DeltaDecodeState* state,
                                          std::uint64_t* digest) {
    *digest += sum;
    if (delta_block_check(*digest) != unit.check) block_state |= kDecodeDamaged;
    if (block_state != 0) set_bits(&state->state, block_state);
}

}  // namespace weightsync::lanes
