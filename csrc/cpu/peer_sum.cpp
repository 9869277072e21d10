#include "weightsync/peer_sum.hpp"

#include <stdexcept>

namespace weightsync {
namespace {

template <FloatType Type>
void add_all(std::int64_t num_bytes, int size, const unsigned char* parts, unsigned char* sum) {
    for (std::int64_t at = 0; at < num_bytes; at += 16) {
        Sums8 sums;
        for (int rank = 0; rank < size; ++rank) {
            Words4 words;
            std::memcpy(&words, parts + rank * num_bytes + at, sizeof(words));
            add_part<Type>(sums, words);
        }
        const Words4 found = rounded_sums<Type>(sums);
        std::memcpy(sum + at, &found, sizeof(found));
    }
}

}  // namespace

void add_parts(FloatType dtype, std::int64_t num_bytes, int size, const void* parts, void* sum) {
    if (num_bytes % 16 != 0) throw std::invalid_argument("add_parts: not a multiple of 16 bytes");
    const auto* from = static_cast<const unsigned char*>(parts);
    auto* to = static_cast<unsigned char*>(sum);
    switch (dtype) {
        case FloatType::fp32:
            return add_all<FloatType::fp32>(num_bytes, size, from, to);
        case FloatType::bf16:
            return add_all<FloatType::bf16>(num_bytes, size, from, to);
        case FloatType::fp16:
            return add_all<FloatType::fp16>(num_bytes, size, from, to);
    }
}

}  // namespace weightsync
