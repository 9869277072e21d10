#include "weightsync/transpose.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "weightsync/convert_run.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace weightsync {
namespace {

// A rectangle of elements: rows go along the target's dense dim in memory order of the target.
struct Rectangle {
    unsigned char* target;
    const unsigned char* source;
    std::int64_t num_rows;     // along the source's dense dim
    std::int64_t num_columns;  // along the target's dense dim
    SegmentDim row;
    SegmentDim column;
    Convert convert;
    StreamCopy stream;  // null: write through the cache
};

template <typename Element>
void copy_scalar(const Rectangle& r) {
    for (std::int64_t i = 0; i < r.num_rows; ++i) {
        unsigned char* to = r.target + i * r.row.target_stride_bytes;
        const unsigned char* from = r.source + i * r.row.source_stride_bytes;
        for (std::int64_t j = 0; j < r.num_columns; ++j) {
            Element element;
            std::memcpy(&element, from + j * r.column.source_stride_bytes, sizeof(Element));
            unsigned char* place = to + j * r.column.target_stride_bytes;
            if constexpr (sizeof(Element) == 4) {
                if (r.convert == Convert::fp32_to_bf16) {
                    const std::uint16_t half = fp32_bits_to_bf16(element);
                    std::memcpy(place, &half, sizeof(half));
                    continue;
                }
            }
            std::memcpy(place, &element, sizeof(Element));
        }
    }
}

// Side of the square that transpose_square turns in registers.
template <typename Element>
constexpr std::int64_t kSquare = sizeof(Element) <= 2 ? 8 : (sizeof(Element) == 4 ? 4 : 2);

#if defined(__x86_64__)

inline __m128i load8(const unsigned char* ptr) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(ptr));
}
inline __m128i load16(const unsigned char* ptr) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(ptr));
}
inline void store16(unsigned char* ptr, __m128i value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ptr), value);
}
inline void store_halves(unsigned char* ptr, std::int64_t stride, __m128i value) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(ptr), value);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(ptr + stride), _mm_unpackhi_epi64(value, value));
}

// to[i][j] = from[j][i] over one square; strides are of the two row pointers. SSE2 only, which
// every x86-64 CPU has.
template <typename Element>
void transpose_square(unsigned char* to, std::int64_t to_stride, const unsigned char* from,
                      std::int64_t from_stride) {
    if constexpr (sizeof(Element) == 1) {
        __m128i pairs[4];
        for (int i = 0; i < 4; ++i) {
            pairs[i] = _mm_unpacklo_epi8(load8(from + 2 * i * from_stride),
                                         load8(from + (2 * i + 1) * from_stride));
        }
        const __m128i quads[4] = {
            _mm_unpacklo_epi16(pairs[0], pairs[1]), _mm_unpackhi_epi16(pairs[0], pairs[1]),
            _mm_unpacklo_epi16(pairs[2], pairs[3]), _mm_unpackhi_epi16(pairs[2], pairs[3])};
        store_halves(to, to_stride, _mm_unpacklo_epi32(quads[0], quads[2]));
        store_halves(to + 2 * to_stride, to_stride, _mm_unpackhi_epi32(quads[0], quads[2]));
        store_halves(to + 4 * to_stride, to_stride, _mm_unpacklo_epi32(quads[1], quads[3]));
        store_halves(to + 6 * to_stride, to_stride, _mm_unpackhi_epi32(quads[1], quads[3]));
    } else if constexpr (sizeof(Element) == 2) {
        __m128i low[4];
        __m128i high[4];
        for (int i = 0; i < 4; ++i) {
            const __m128i even = load16(from + 2 * i * from_stride);
            const __m128i odd = load16(from + (2 * i + 1) * from_stride);
            low[i] = _mm_unpacklo_epi16(even, odd);
            high[i] = _mm_unpackhi_epi16(even, odd);
        }
        const auto finish = [&](const __m128i* pairs, unsigned char* rows) {
            const __m128i a = _mm_unpacklo_epi32(pairs[0], pairs[1]);
            const __m128i b = _mm_unpackhi_epi32(pairs[0], pairs[1]);
            const __m128i c = _mm_unpacklo_epi32(pairs[2], pairs[3]);
            const __m128i d = _mm_unpackhi_epi32(pairs[2], pairs[3]);
            store16(rows, _mm_unpacklo_epi64(a, c));
            store16(rows + to_stride, _mm_unpackhi_epi64(a, c));
            store16(rows + 2 * to_stride, _mm_unpacklo_epi64(b, d));
            store16(rows + 3 * to_stride, _mm_unpackhi_epi64(b, d));
        };
        finish(low, to);
        finish(high, to + 4 * to_stride);
    } else if constexpr (sizeof(Element) == 4) {
        const __m128i r0 = load16(from);
        const __m128i r1 = load16(from + from_stride);
        const __m128i r2 = load16(from + 2 * from_stride);
        const __m128i r3 = load16(from + 3 * from_stride);
        const __m128i a = _mm_unpacklo_epi32(r0, r1);
        const __m128i b = _mm_unpackhi_epi32(r0, r1);
        const __m128i c = _mm_unpacklo_epi32(r2, r3);
        const __m128i d = _mm_unpackhi_epi32(r2, r3);
        store16(to, _mm_unpacklo_epi64(a, c));
        store16(to + to_stride, _mm_unpackhi_epi64(a, c));
        store16(to + 2 * to_stride, _mm_unpacklo_epi64(b, d));
        store16(to + 3 * to_stride, _mm_unpackhi_epi64(b, d));
    } else {
        const __m128i r0 = load16(from);
        const __m128i r1 = load16(from + from_stride);
        store16(to, _mm_unpacklo_epi64(r0, r1));
        store16(to + to_stride, _mm_unpackhi_epi64(r0, r1));
    }
}

#else

template <typename Element>
void transpose_square(unsigned char* to, std::int64_t to_stride, const unsigned char* from,
                      std::int64_t from_stride) {
    for (std::int64_t i = 0; i < kSquare<Element>; ++i) {
        for (std::int64_t j = 0; j < kSquare<Element>; ++j) {
            std::memcpy(to + i * to_stride + j * sizeof(Element),
                        from + j * from_stride + i * sizeof(Element), sizeof(Element));
        }
    }
}

#endif

// Asks for the source of the next tile while this one is turned: its lines lie a row apart, where
// no hardware prefetcher looks.
void prefetch_columns(const Rectangle& r, std::int64_t first_column, std::int64_t num_columns,
                      std::int64_t line_bytes) {
    const unsigned char* from = r.source + first_column * r.column.source_stride_bytes;
    for (std::int64_t j = 0; j < num_columns; ++j) {
        for (std::int64_t offset = 0; offset < line_bytes; offset += 64) {
            __builtin_prefetch(from + offset);
        }
        from += r.column.source_stride_bytes;
    }
}

void write_row(const Rectangle& r, unsigned char* to, const unsigned char* row,
               std::int64_t num_bytes) {
    if (r.convert == Convert::fp32_to_bf16) {
        fp32_to_bf16_run(to, row, num_bytes / 4);
    } else if (r.stream != nullptr && num_bytes == kTileRowBytes &&
               reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
        r.stream(to, row, kTileRowBytes, nullptr);
    } else {
        std::memcpy(to, row, static_cast<std::size_t>(num_bytes));
    }
}

// A tile is turned in a buffer that stays in the first-level cache and then written in whole rows:
// written directly, target rows a power of two apart would evict each other's half-filled lines.
template <typename Element>
void copy_tile(const Rectangle& r) {
    constexpr std::int64_t size = sizeof(Element);
    constexpr std::int64_t square = kSquare<Element>;
    constexpr std::int64_t pitch = kTileRowBytes;
    alignas(64) unsigned char tile[tile_elements(size) * pitch];
    std::int64_t whole_rows = 0;
    std::int64_t whole_columns = 0;
    if (r.row.source_stride_bytes == size) {
        whole_rows = r.num_rows / square * square;
        whole_columns = r.num_columns / square * square;
        for (std::int64_t j = 0; j < whole_columns; j += square) {
            for (std::int64_t i = 0; i < whole_rows; i += square) {
                transpose_square<Element>(tile + i * pitch + j * size, pitch,
                                          r.source + i * size + j * r.column.source_stride_bytes,
                                          r.column.source_stride_bytes);
            }
        }
    }
    // What the squares left: the right edge of every row, and all of the last rows.
    Rectangle rest = r;
    rest.row.target_stride_bytes = pitch;
    rest.column.target_stride_bytes = size;
    rest.convert = Convert::none;
    const auto fill = [&](std::int64_t first_row, std::int64_t first_column,
                          std::int64_t num_rows) {
        rest.target = tile + first_row * pitch + first_column * size;
        rest.source = r.source + first_row * r.row.source_stride_bytes +
                      first_column * r.column.source_stride_bytes;
        rest.num_rows = num_rows;
        rest.num_columns = r.num_columns - first_column;
        copy_scalar<Element>(rest);
    };
    fill(0, whole_columns, whole_rows);
    fill(whole_rows, 0, r.num_rows - whole_rows);
    for (std::int64_t i = 0; i < r.num_rows; ++i) {
        write_row(r, r.target + i * r.row.target_stride_bytes, tile + i * pitch,
                  r.num_columns * size);
    }
}

template <typename Element>
void copy_rectangle(const Rectangle& r) {
    const bool is_transposed =
        std::abs(r.row.source_stride_bytes) < std::abs(r.column.source_stride_bytes);
    const auto target_size = converted_bytes(static_cast<std::int64_t>(sizeof(Element)), r.convert);
    const bool is_dense = r.column.target_stride_bytes == target_size;
    if (!is_transposed) {
        copy_scalar<Element>(r);
        return;
    }
    constexpr std::int64_t side = tile_elements(sizeof(Element));
    const std::int64_t line_bytes = r.num_rows * std::abs(r.row.source_stride_bytes);
    for (std::int64_t j = 0; j < r.num_columns; j += side) {
        if (line_bytes <= kTileRowBytes) {
            const std::int64_t next = std::min(j + side, r.num_columns);
            prefetch_columns(r, next, std::min(side, r.num_columns - next), line_bytes);
        }
        Rectangle tile = r;
        tile.target += j * r.column.target_stride_bytes;
        tile.source += j * r.column.source_stride_bytes;
        tile.num_columns = std::min(side, r.num_columns - j);
        is_dense ? copy_tile<Element>(tile) : copy_scalar<Element>(tile);
    }
}

}  // namespace

ElementGrid::ElementGrid(const Segment& segment) : segment_(segment) {
    SegmentDim dims[kSegmentDims];
    std::copy(std::begin(segment.dims), std::end(segment.dims), dims);
    // Dims of count 1 sort last, whatever their stride says.
    const auto rank = [](const SegmentDim& d, std::int64_t stride) {
        return d.count == 1 ? INT64_MAX : std::abs(stride);
    };
    for (int i = 1; i < kSegmentDims; ++i) {
        if (rank(dims[i], dims[i].target_stride_bytes) <
            rank(dims[0], dims[0].target_stride_bytes)) {
            std::swap(dims[0], dims[i]);
        }
    }
    if (rank(dims[2], dims[2].source_stride_bytes) < rank(dims[1], dims[1].source_stride_bytes)) {
        std::swap(dims[1], dims[2]);
    }
    target_dim_ = dims[0];
    source_dim_ = dims[1];
    outer_ = dims[2];
    block_ = std::min(tile_elements(segment.num_bytes), source_dim_.count);
}

std::int64_t ElementGrid::copy_units(std::int64_t begin, std::int64_t end,
                                     StreamCopy stream) const {
    std::int64_t num_elements = 0;
    while (begin < end) {
        const std::int64_t panel = begin / target_dim_.count;
        const std::int64_t column = begin % target_dim_.count;
        const std::int64_t row = panel % num_blocks() * block_;
        const std::int64_t outer = panel / num_blocks();
        Rectangle r;
        r.num_rows = std::min(block_, source_dim_.count - row);
        r.num_columns = std::min(end - begin, target_dim_.count - column);
        r.target = reinterpret_cast<unsigned char*>(
            segment_.target_ptr + outer * outer_.target_stride_bytes +
            row * source_dim_.target_stride_bytes + column * target_dim_.target_stride_bytes);
        r.source = reinterpret_cast<const unsigned char*>(
            segment_.source_ptr + outer * outer_.source_stride_bytes +
            row * source_dim_.source_stride_bytes + column * target_dim_.source_stride_bytes);
        r.row = source_dim_;
        r.column = target_dim_;
        r.convert = segment_.conversion();
        r.stream = stream;
        switch (segment_.num_bytes) {
            case 1:
                copy_rectangle<std::uint8_t>(r);
                break;
            case 2:
                copy_rectangle<std::uint16_t>(r);
                break;
            case 4:
                copy_rectangle<std::uint32_t>(r);
                break;
            default:
                copy_rectangle<std::uint64_t>(r);
        }
        num_elements += r.num_rows * r.num_columns;
        begin += r.num_columns;
    }
    return num_elements * segment_.num_bytes;
}

}  // namespace weightsync
