#include "weightsync/convert_run.hpp"

#include <cstring>

#include "weightsync/convert.hpp"

namespace weightsync {
namespace {

// One body, compiled once for each instruction set; the loop is written for the auto-vectoriser.
inline __attribute__((always_inline)) void convert_body(unsigned char* target,
                                                        const unsigned char* source,
                                                        std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, source + 4 * i, 4);
        const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        const auto half = static_cast<std::uint16_t>(is_nan ? 0x7FC0u : rounded);
        std::memcpy(target + 2 * i, &half, 2);
    }
}

void convert_portable(unsigned char* target, const unsigned char* source, std::int64_t count) {
    convert_body(target, source, count);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void convert_avx2(unsigned char* target,
                                                  const unsigned char* source, std::int64_t count) {
    convert_body(target, source, count);
}
#endif

using ConvertRun = void (*)(unsigned char*, const unsigned char*, std::int64_t);

ConvertRun pick_convert() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return convert_avx2;
#endif
    return convert_portable;
}

}  // namespace

void fp32_to_bf16_run(void* target, const void* source, std::int64_t count) {
    static const ConvertRun convert = pick_convert();
    convert(static_cast<unsigned char*>(target), static_cast<const unsigned char*>(source), count);
}

}  // namespace weightsync
