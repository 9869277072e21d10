#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "weightsync/delta_sample.hpp"

namespace weightsync {
namespace {

constexpr int kMaxBins = 48;
constexpr double kClassBits = 16;  // counts of a class in a block
// Every threshold costs encoder and decoder a look at all elements: it must be worth this much.
constexpr double kClassWorth = 0.98;

struct Sample {
    std::uint32_t all[256] = {};
    std::uint32_t changed[256] = {};
    std::uint32_t steps[256][kDeltaMaxTypical + 1] = {};  // of changed; 0 holds the longer ones
    std::int64_t num_counted = 0;
    std::int64_t num_compared = 0;
};

template <DeltaKind kind>
std::uint32_t load(const unsigned char* ptr, std::int64_t i) {
    std::uint32_t u = 0;
    std::memcpy(&u, ptr + i * DeltaElement<kind>::bytes, DeltaElement<kind>::bytes);
    return u;
}

template <DeltaKind kind>
void count_change(std::uint32_t from, std::uint32_t to, Sample* sample) {
    std::uint32_t down = 0;
    const std::uint32_t step = DeltaElement<kind>::step(from, to, &down);
    const std::uint32_t key = DeltaElement<kind>::key(from);
    ++sample->changed[key];
    ++sample->steps[key][step <= kDeltaMaxTypical ? step : 0];
}

template <DeltaKind kind>
void look(const unsigned char* old, const unsigned char* current, std::int64_t begin,
          std::int64_t end, std::int64_t counted_end, Sample* sample) {
    constexpr int bytes = DeltaElement<kind>::bytes;
    constexpr std::int64_t per_word = 8 / bytes;
    std::int64_t i = begin;
    while (i < end) {  // equal words are skipped whole
        if (i + per_word <= end) {
            std::uint64_t a = 0;
            std::uint64_t b = 0;
            std::memcpy(&a, old + i * bytes, 8);
            std::memcpy(&b, current + i * bytes, 8);
            if (a == b) {
                i += per_word;
                continue;
            }
        }
        const std::int64_t stop = std::min(end, i + per_word);
        for (; i < stop; ++i) {
            const std::uint32_t from = load<kind>(old, i);
            const std::uint32_t to = load<kind>(current, i);
            if (from != to) count_change<kind>(from, to, sample);
        }
    }
    for (i = begin; i < counted_end; ++i)
        ++sample->all[DeltaElement<kind>::key(load<kind>(old, i))];
    sample->num_compared += end - begin;
    sample->num_counted += counted_end - begin;
}

template <DeltaKind kind>
void take_sample(const DeltaPlace& place, const unsigned char* old, const unsigned char* current,
                 Sample* sample) {
    for (std::int64_t i = 0; i < delta_sample_pieces(place.num_elements); ++i) {
        const DeltaSamplePiece piece = delta_sample_piece(place.num_elements, i);
        look<kind>(old, current, piece.begin, piece.end, piece.counted_end, sample);
    }
}

struct Bin {
    int first_key;
    double all;
    double changed;
};

std::vector<Bin> bins_of(const DeltaSampleCounts& sample) {
    const double scale = static_cast<double>(sample.num_compared) /
                         static_cast<double>(std::max<std::uint32_t>(sample.num_counted, 1));
    std::vector<Bin> bins;
    int width = 1;
    do {
        bins.clear();
        for (int key = 0; key < 256; key += width) {
            Bin bin{key, 0, 0};
            for (int i = key; i < std::min(key + width, 256); ++i) {
                bin.all += sample.all[i] * scale;
                bin.changed += sample.changed[i];
            }
            bin.all = std::max(bin.all, bin.changed);
            if (bin.all > 0) bins.push_back(bin);
        }
        width *= 2;
    } while (static_cast<int>(bins.size()) > kMaxBins);
    return bins;
}

// Bits that tell which `changed` of `all` did.
double position_bits(double all, double changed) {
    if (changed <= 0 || changed >= all) return 0;
    const double p = changed / all;
    return -changed * std::log2(p) - (all - changed) * std::log2(1 - p);
}

// The cut of rising bins into classes that takes the fewest bits.
void choose_thresholds(const std::vector<Bin>& bins, double class_bits, DeltaParameters* out) {
    const auto n = static_cast<int>(bins.size());
    if (n < 2) return;
    constexpr double infinite = 1e300;
    std::vector<double> cost(static_cast<std::size_t>((n + 1) * (n + 1)), infinite);
    const auto at = [n](int i, int j) { return static_cast<std::size_t>(i * (n + 1) + j); };
    for (int i = 0; i < n; ++i) {
        double all = 0;
        double changed = 0;
        for (int j = i; j < n; ++j) {
            all += bins[static_cast<std::size_t>(j)].all;
            changed += bins[static_cast<std::size_t>(j)].changed;
            cost[at(i, j + 1)] = position_bits(all, changed) + class_bits;
        }
    }
    // best[c][j]: bins before j in c + 1 classes; from[c][j]: where the last of them begins.
    std::vector<double> best[kDeltaClasses];
    std::vector<int> from[kDeltaClasses];
    int classes = 0;
    for (int c = 0; c < kDeltaClasses; ++c) {
        best[c].assign(static_cast<std::size_t>(n + 1), infinite);
        from[c].assign(static_cast<std::size_t>(n + 1), 0);
        for (int j = 1; j <= n; ++j) {
            for (int i = c; i < (c == 0 ? 1 : j); ++i) {
                const double before = c == 0 ? 0 : best[c - 1][static_cast<std::size_t>(i)];
                const double total = before + cost[at(i, j)];
                if (total < best[c][static_cast<std::size_t>(j)]) {
                    best[c][static_cast<std::size_t>(j)] = total;
                    from[c][static_cast<std::size_t>(j)] = i;
                }
            }
        }
        if (best[c].back() < best[classes].back() * kClassWorth) classes = c;
    }
    out->num_thresholds = classes;
    int end = n;
    for (int c = classes; c > 0; --c) {
        end = from[c][static_cast<std::size_t>(end)];
        out->thresholds[c - 1] =
            static_cast<std::uint8_t>(bins[static_cast<std::size_t>(end)].first_key);
    }
}

}  // namespace

DeltaParameters delta_parameters(const DeltaPlace& place, const unsigned char* old,
                                 const unsigned char* current) {
    Sample sample;
    switch (place.kind) {
        case DeltaKind::bytes:
            take_sample<DeltaKind::bytes>(place, old, current, &sample);
            break;
        case DeltaKind::float8:
            take_sample<DeltaKind::float8>(place, old, current, &sample);
            break;
        case DeltaKind::float16:
            take_sample<DeltaKind::float16>(place, old, current, &sample);
            break;
        case DeltaKind::float32:
            take_sample<DeltaKind::float32>(place, old, current, &sample);
            break;
    }
    DeltaSampleCounts counts;
    std::memcpy(counts.all, sample.all, sizeof(counts.all));
    std::memcpy(counts.changed, sample.changed, sizeof(counts.changed));
    for (int key = 0; key < 256; ++key) counts.typical[key] = delta_typical_step(sample.steps[key]);
    counts.num_counted = static_cast<std::uint32_t>(sample.num_counted);
    counts.num_compared = static_cast<std::uint32_t>(sample.num_compared);
    return delta_parameters_of(place.num_elements, counts);
}

DeltaParameters delta_parameters_of(std::int64_t num_elements, const DeltaSampleCounts& counts) {
    DeltaParameters parameters;
    // A class costs its counts in every block; the sample stands for a part of them.
    const double blocks = static_cast<double>(num_elements) / kDeltaBlock;
    const double share = static_cast<double>(counts.num_compared) /
                         static_cast<double>(std::max<std::int64_t>(num_elements, 1));
    choose_thresholds(bins_of(counts), kClassBits * std::max(blocks, 1.0) * share, &parameters);
    std::memcpy(parameters.typical, counts.typical, sizeof(parameters.typical));
    return parameters;
}

}  // namespace weightsync
