// Records of many spans decoded at once where their old values lie: blocks by a device (or its CPU
// twin), what is around them by the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weightsync/delta_span.hpp"

namespace weightsync {

// A span of a dense tensor and its record. `old_ptr` is a multiple of 16; 16 bytes behind the
// record may be read. Positions (uint32, in the span) and values have room for what the record says
// that it changes. All but the record of `DeltaDecodeInput` is memory of who decodes.
struct DeltaDecodeRow {
    std::uint64_t old_ptr;
    std::uint64_t record_ptr;
    std::uint64_t positions_ptr;
    std::uint64_t values_ptr;
    std::uint64_t kind;
    std::uint64_t start_element;
    std::uint64_t num_elements;
    std::uint64_t seed;
    std::uint64_t word_bytes;
    std::uint64_t num_changed;  // filled from the record

    DeltaPlace place() const;
};

// The record of a row in memory of the host.
struct DeltaDecodeInput {
    const unsigned char* record;
    std::int64_t num_bytes;
};

// What became of a span.
enum class DeltaDecodeOutcome : std::int64_t {
    done = 0,
    host_form = 1,     // dense or absolute blocks
    host_crowded = 2,  // a block changes more than a device takes at once
    host_damaged = 3,  // it cannot be, or does not fit its base: the host's decoder says how
};

struct DeltaDecodeUnit {
    std::uint32_t row;
    std::uint32_t block;   // of its span
    std::uint32_t offset;  // of its bits in the record
    std::uint32_t num_bytes;
    std::uint32_t check;
    std::uint32_t is_gaps;
};

// What all blocks of a span add to.
struct DeltaDecodeState {
    std::uint32_t num_changed;
    std::uint32_t state;  // bits of kDecode...
};

struct DeltaDecodeBatch {
    std::vector<DeltaDecodeRow> rows;
    std::vector<std::int64_t> first_block;  // by row, and the number of all blocks
    std::vector<DeltaParameters> parameters;
    std::vector<DeltaDecodeUnit> units[4];  // by kind
    std::vector<std::uint64_t> results;     // digests that the records promise, by row
    std::vector<DeltaDecodeOutcome> outcomes;

    std::int64_t num_blocks() const { return first_block.back(); }
};

// Looks into the records: checksums, headers, parameters, indices. Whatever is wrong with one is
// its outcome. Throws std::invalid_argument for a row that cannot be.
DeltaDecodeBatch delta_decode_batch(const DeltaDecodeRow* rows, const DeltaDecodeInput* inputs,
                                    std::int64_t num_rows, int num_threads);

// Outcomes from what the blocks added, by row, and the digests of all blocks as they would become.
void delta_decode_settle(DeltaDecodeBatch* batch, const DeltaDecodeState* states,
                         const std::uint64_t* digests);

// Of one record, for delta_decode_batch: false if a device cannot take its form. Throws DeltaError.
bool delta_record_units(const DeltaPlace& place, const DeltaDecodeInput& input,
                        DeltaParameters* parameters, std::vector<DeltaDecodeUnit>* units,
                        std::uint32_t* num_changed, std::uint64_t* result_digest);

// The CPU's twin of the launches, for tests: rows of this process's memory. `digests` of the old
// blocks become those of the new ones.
void run_delta_decode(DeltaDecodeBatch* batch, std::uint64_t* digests);

// Decodes on a device; see cuda_tables.hpp for what holds of streams and errors. Keeps its memory
// from run to run.
class CudaDeltaDecoder {
  public:
    explicit CudaDeltaDecoder(int device);
    ~CudaDeltaDecoder();

    // `digests` are memory of the host.
    void run(DeltaDecodeBatch* batch, std::uint64_t* digests, std::uintptr_t stream);
    // Seconds of the last run: tables to the device, blocks, digests to the host.
    std::vector<double> seconds() const;
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace weightsync
