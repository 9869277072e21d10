#include "weightsync/delta_kernels.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

namespace weightsync {
namespace {

thread_local bool uses_portable = false;

template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE DeltaMode encode_block(const DeltaScanKernels& kernels,
                                            const DeltaBlock& block, const unsigned char* old,
                                            const unsigned char* current, DeltaScratch* s,
                                            std::uint64_t* digest, std::uint32_t* changed,
                                            std::int64_t* num_bytes) {
    const DeltaParameters& parameters = *block.parameters;
    // In absolute mode a class means nothing, and there is but one.
    const int num_thresholds = block.is_absolute ? 0 : parameters.num_thresholds;
    const std::int64_t num_elements = block.place->block_elements(block.index);
    const std::uint64_t first_byte =
        (block.place->start_element + static_cast<std::uint64_t>(block.first_element())) *
        static_cast<std::uint64_t>(DeltaElement<kind>::bytes);
    delta_scan_begin(num_elements, num_thresholds, &s->scan);
    std::fill(s->found_in_class, s->found_in_class + kDeltaClasses, 0u);
    std::uint32_t count = 0;
    for (std::int64_t first = 0; first < num_elements; first += kDeltaPiece) {
        const std::int64_t piece = std::min(kDeltaPiece, num_elements - first);
        kernels.scan[static_cast<int>(kind)](old, current, first, piece, parameters.thresholds,
                                             &s->scan);
        count = delta_find<kind>(old, current, parameters, block.place->seed, first_byte,
                                 block.word_shift, first / kDeltaChunk,
                                 (first + piece + kDeltaChunk - 1) / kDeltaChunk, count, s, digest);
    }
    *changed = count;
    *num_bytes = 0;
    if (count == 0) return DeltaMode::unchanged;
    if (block.is_absolute) {
        *num_bytes = delta_write_absolute<kind>(current, count, s);
        return DeltaMode::absolute;
    }
    DeltaClasses classes;
    const DeltaMode mode = delta_sort(count, s, &classes);
    delta_prepare(parameters, s, &classes);
    *num_bytes = delta_write(s, classes);
    return mode;
}

template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint64_t decode_absolute(const DeltaBlock& block, const DeltaBits& bits,
                                                   const unsigned char* old, DeltaScratch* s,
                                                   DeltaOutput* out) {
    using Element = DeltaElement<kind>;
    const auto size = static_cast<std::uint32_t>(block.place->block_elements(block.index));
    std::uint64_t bit = 0;
    const std::uint64_t count = bits.take_golomb(&bit, kDeltaCountOrder);
    if (count > size) throw DeltaError("more changes than a block has elements");
    out->reserve(static_cast<std::int64_t>(count));
    const auto changes = static_cast<std::uint32_t>(count);
    std::uint64_t high = bit + delta_low_bits(changes, size);
    delta_take_numbers(bits, bit, &high, changes, size, s->gaps, s->position);
    bits.check(high + count * Element::bits);
    const auto first = static_cast<std::uint32_t>(block.first_element());
    const std::uint64_t start =
        (block.place->start_element + first) * static_cast<std::uint64_t>(Element::bytes);
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < changes; ++i) {
        const auto to = static_cast<std::uint32_t>(bits.peek(high) & Element::mask);
        high += Element::bits;
        out->positions[out->count] = first + s->position[i];
        delta_store<Element::bytes>(out->values, out->count, to);
        ++out->count;
        sum += delta_digest_term(
            block.place->seed, start + std::uint64_t{s->position[i]} * Element::bytes,
            block.word_shift, delta_load<Element::bytes>(old, s->position[i]), to);
    }
    return sum;
}

template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint64_t decode_block(const DeltaScanKernels& kernels,
                                                const DeltaBlock& block, DeltaMode mode,
                                                const DeltaBits& bits, const unsigned char* old,
                                                std::uint64_t* old_digest, DeltaScratch* s,
                                                DeltaOutput* out) {
    const DeltaParameters& parameters = *block.parameters;
    const std::int64_t num_elements = block.place->block_elements(block.index);
    if (mode != DeltaMode::classes && old_digest != nullptr) {
        *old_digest += delta_digest_part(*block.place, old, block.first_element(), 0, num_elements);
    }
    if (mode == DeltaMode::absolute) return decode_absolute<kind>(block, bits, old, s, out);
    DeltaClasses classes;
    if (mode == DeltaMode::classes) {
        delta_scan_begin(num_elements, parameters.num_thresholds, &s->scan);
        for (std::int64_t first = 0; first < num_elements; first += kDeltaPiece) {
            const std::int64_t piece = std::min(kDeltaPiece, num_elements - first);
            if (old_digest != nullptr) {
                *old_digest +=
                    delta_digest_part(*block.place, old, block.first_element(), first, piece);
            }
            kernels.scan[static_cast<int>(kind)](old, nullptr, first, piece, parameters.thresholds,
                                                 &s->scan);
        }
        classes.count = parameters.num_thresholds + 1;
        for (int c = 0; c < classes.count; ++c) classes.size[c] = s->scan.class_size(c);
    } else {
        classes.count = 1;
        classes.size[0] = static_cast<std::uint32_t>(num_elements);
    }
    delta_read<kind>(bits, old, mode, parameters, kernels.locate, s, &classes);
    return delta_emit<kind>(old, *block.place, static_cast<std::uint32_t>(block.first_element()),
                            block.word_shift, classes.begin[classes.count], *s, out);
}

template <DeltaKind kind>
DeltaMode encode_portable(const DeltaBlock& block, const unsigned char* old,
                          const unsigned char* current, DeltaScratch* s, std::uint64_t* digest,
                          std::uint32_t* changed, std::int64_t* num_bytes) {
    return encode_block<kind>(delta_scan_portable(), block, old, current, s, digest, changed,
                              num_bytes);
}

template <DeltaKind kind>
std::uint64_t decode_portable(const DeltaBlock& block, DeltaMode mode, const DeltaBits& bits,
                              const unsigned char* old, std::uint64_t* old_digest, DeltaScratch* s,
                              DeltaOutput* out) {
    return decode_block<kind>(delta_scan_portable(), block, mode, bits, old, old_digest, s, out);
}

constexpr DeltaKernels kPortable = {
    {encode_portable<DeltaKind::bytes>, encode_portable<DeltaKind::float8>,
     encode_portable<DeltaKind::float16>, encode_portable<DeltaKind::float32>},
    {decode_portable<DeltaKind::bytes>, decode_portable<DeltaKind::float8>,
     decode_portable<DeltaKind::float16>, decode_portable<DeltaKind::float32>},
    "portable"};

#if defined(__x86_64__)
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))

template <DeltaKind kind>
WEIGHTSYNC_AVX2 DeltaMode encode_avx2(const DeltaBlock& block, const unsigned char* old,
                                      const unsigned char* current, DeltaScratch* s,
                                      std::uint64_t* digest, std::uint32_t* changed,
                                      std::int64_t* num_bytes) {
    return encode_block<kind>(delta_scan_kernels(), block, old, current, s, digest, changed,
                              num_bytes);
}

template <DeltaKind kind>
WEIGHTSYNC_AVX2 std::uint64_t decode_avx2(const DeltaBlock& block, DeltaMode mode,
                                          const DeltaBits& bits, const unsigned char* old,
                                          std::uint64_t* old_digest, DeltaScratch* s,
                                          DeltaOutput* out) {
    return decode_block<kind>(delta_scan_kernels(), block, mode, bits, old, old_digest, s, out);
}

constexpr DeltaKernels kAvx2 = {{encode_avx2<DeltaKind::bytes>, encode_avx2<DeltaKind::float8>,
                                 encode_avx2<DeltaKind::float16>, encode_avx2<DeltaKind::float32>},
                                {decode_avx2<DeltaKind::bytes>, decode_avx2<DeltaKind::float8>,
                                 decode_avx2<DeltaKind::float16>, decode_avx2<DeltaKind::float32>},
                                "avx2"};
#endif

}  // namespace

void delta_use_portable(bool is_portable) { uses_portable = is_portable; }

const DeltaKernels& delta_kernels() {
#if defined(__x86_64__)
    static const bool has_avx2 = delta_scan_kernels().name != delta_scan_portable().name;
    if (has_avx2 && !uses_portable && __builtin_cpu_supports("popcnt")) return kAvx2;
#endif
    return kPortable;
}

DeltaScratch* delta_scratch() {
    thread_local const std::unique_ptr<DeltaScratch> scratch(new DeltaScratch);
    return scratch.get();
}

const char* delta_kernel_name() { return delta_kernels().name; }

}  // namespace weightsync
