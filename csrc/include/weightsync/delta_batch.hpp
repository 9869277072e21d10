// Many spans coded at once where they lie: blocks by a device (or its CPU twin), records from them
// by the host. The bytes are those of delta_encode and its seal.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weightsync/delta_sample.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync {

// A span of a dense tensor in both versions; addresses are multiples of 16.
struct DeltaSpanRow {
    std::uint64_t old_ptr;
    std::uint64_t new_ptr;
    std::uint64_t kind;
    std::uint64_t start_element;
    std::uint64_t num_elements;
    std::uint64_t seed;
    std::uint64_t word_bytes;

    DeltaPlace place() const;
};

// Why the host must code a span.
enum class DeltaOutcome : std::int64_t {
    unchanged = 0,
    coded = 1,
    dense_block = 2,  // a block is smaller as its elements
    dense_span = 3,   // the record takes more than a quarter: the dense one has to be tried
};

enum class DeltaBlockStatus : std::uint32_t {
    done = 0,
    crowded = 1,  // more changes or bits than there is room for: another launch, with more
    dense = 2,
};

struct DeltaBlockResult {
    std::uint64_t digest;
    std::uint64_t offset;  // of its bytes in the arena
    std::uint32_t num_bytes;
    std::uint32_t num_changed;
    DeltaBlockStatus status;
    std::uint32_t mode;  // a DeltaMode
};
static_assert(sizeof(DeltaBlockResult) == 32);

// A block of the batch, as a launch takes it.
struct DeltaBlockUnit {
    std::uint32_t row;
    std::uint32_t block;  // of its span
};

struct DeltaBatch {
    std::vector<DeltaSpanRow> rows;
    std::vector<std::int64_t> first_block;  // by row, and the number of all blocks
    std::vector<DeltaParameters> parameters;
    // Of all blocks; of whoever coded them, like the arena.
    DeltaBlockResult* results = nullptr;
    const unsigned char* arena = nullptr;  // of the host

    std::int64_t num_blocks() const { return first_block.back(); }
    // Filled by delta_batch_layout, by row.
    std::vector<DeltaOutcome> outcomes;
    std::vector<std::int64_t> offsets;  // of records in the payload, and its size
};

// Throws std::invalid_argument for a row that cannot be. Its results and arena are still to come.
DeltaBatch delta_batch(const DeltaSpanRow* rows, std::int64_t num_rows);

// Blocks of one kind, in order.
std::vector<DeltaBlockUnit> delta_units(const DeltaBatch& batch, DeltaKind kind);

// What becomes of each span, and where its record goes; returns the bytes of the payload.
std::int64_t delta_batch_layout(DeltaBatch* batch, int num_threads);

// Writes all records, and the digests (one a block of the batch) of what was coded.
void delta_batch_write(const DeltaBatch& batch, unsigned char* payload, std::uint64_t* digests,
                       int num_threads);

// Parameters of all spans from what was counted of them.
void delta_batch_choose(DeltaBatch* batch, const DeltaSampleCounts* counts, int num_threads);

// The CPU's twin of the launches, for tests: rows of this process's memory. `capacity` is that of a
// warp's stage: what is crowded there is done again with room for all, as on a device.
void run_delta_batch(DeltaBatch* batch, const std::uint64_t* digests, std::uint32_t capacity,
                     std::vector<DeltaBlockResult>* results, std::vector<unsigned char>* arena);

// Codes on a device; see cuda_tables.hpp for what holds of streams and errors. Keeps its memory
// from run to run.
class CudaDeltaEncoder {
  public:
    explicit CudaDeltaEncoder(int device);
    ~CudaDeltaEncoder();

    // Fills parameters, results and the arena, which is valid until the next run. Parameters are
    // chosen from a sample that is taken on a stream of its own: one that goes first, so that
    // blocks of others which run meanwhile do not keep this one waiting.
    void run(DeltaBatch* batch, const std::uint64_t* digests, std::uintptr_t stream,
             std::uintptr_t sample_stream, int num_threads);
    // Seconds of the last run: sample, choice, blocks, copy to the host.
    std::vector<double> seconds() const;
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace weightsync
