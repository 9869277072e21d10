// Decoded changes onto live memory, and back.

#include <algorithm>
#include <cstring>
#include <string>

#include "weightsync/delta_kernels.hpp"

namespace weightsync {
namespace {

// Changed elements lie some hundred bytes apart: each is a cache line of its own, asked for early.
constexpr std::int64_t kAhead = 24;

void check_positions(const std::uint32_t* positions, std::int64_t count,
                     std::int64_t num_elements) {
    std::uint32_t highest = 0;
    for (std::int64_t i = 0; i < count; ++i) highest = std::max(highest, positions[i]);
    if (count > 0 && static_cast<std::int64_t>(highest) >= num_elements) {
        throw DeltaError("position " + std::to_string(highest) + " of " +
                         std::to_string(num_elements));
    }
}

// `act` on the type whose size an element has.
template <typename Act>
void with_element(int element_bytes, Act act) {
    switch (element_bytes) {
        case 1:
            act(std::uint8_t{});
            break;
        case 2:
            act(std::uint16_t{});
            break;
        default:
            act(std::uint32_t{});
            break;
    }
}

// Tensors in mapped files may lie at any byte.
template <typename T>
T load(const unsigned char* data, std::int64_t i) {
    T value;
    std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
}

template <typename T>
void store(unsigned char* data, std::int64_t i, T value) {
    std::memcpy(data + i * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

// `act(i, position)` for every changed element.
template <typename T, bool is_write, typename Act>
void for_each(const unsigned char* target, const std::uint32_t* positions, std::int64_t count,
              Act act) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) {
            __builtin_prefetch(
                target + std::int64_t{positions[i + kAhead]} * static_cast<std::int64_t>(sizeof(T)),
                is_write ? 1 : 0);
        }
        act(i, std::int64_t{positions[i]});
    }
}

}  // namespace

void delta_scatter(int element_bytes, unsigned char* target, std::int64_t num_elements,
                   const std::uint32_t* positions, const unsigned char* values,
                   std::int64_t count) {
    check_positions(positions, count, num_elements);
    with_element(element_bytes, [&](auto element) {
        using T = decltype(element);
        for_each<T, true>(target, positions, count, [&](std::int64_t i, std::int64_t at) {
            store<T>(target, at, load<T>(values, i));
        });
    });
}

void delta_exchange(int element_bytes, unsigned char* target, std::int64_t num_elements,
                    const std::uint32_t* positions, const unsigned char* values,
                    unsigned char* former, std::int64_t count) {
    check_positions(positions, count, num_elements);
    with_element(element_bytes, [&](auto element) {
        using T = decltype(element);
        for_each<T, true>(target, positions, count, [&](std::int64_t i, std::int64_t at) {
            store<T>(former, i, load<T>(target, at));
            store<T>(target, at, load<T>(values, i));
        });
    });
}

std::int64_t delta_count_different(int element_bytes, const unsigned char* target,
                                   std::int64_t num_elements, const std::uint32_t* positions,
                                   const unsigned char* values, std::int64_t count) {
    check_positions(positions, count, num_elements);
    std::int64_t different = 0;
    with_element(element_bytes, [&](auto element) {
        using T = decltype(element);
        for_each<T, false>(target, positions, count, [&](std::int64_t i, std::int64_t at) {
            different += load<T>(target, at) != load<T>(values, i) ? 1 : 0;
        });
    });
    return different;
}

}  // namespace weightsync
