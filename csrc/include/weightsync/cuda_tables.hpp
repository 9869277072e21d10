// Tables that live on a CUDA device and are launched again and again.
#pragma once

#include <cstdint>
#include <memory>

#include "weightsync/cuda_units.hpp"

namespace weightsync {

// A table is cut, uploaded once, and replayed: a launch allocates nothing, waits for nothing and
// may be captured in a graph, which then must not outlive the table. Constructors and close() do
// both. Streams are cudaStream_t as integers; 0 is the legacy default stream. Every call throws
// CudaError if CUDA refuses. Calls on one table must not overlap.

class CudaSegmentTable {
  public:
    CudaSegmentTable(const SegmentUnits& units, int device);
    ~CudaSegmentTable();

    // The bases are added to the table's pointers. With `max_blocks` above 0 no kernel for dense
    // pieces has more blocks: slower, and easy on whatever else the device does meanwhile.
    void launch(std::uintptr_t stream, std::int64_t source_base, std::int64_t target_base,
                std::uint32_t max_blocks);
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

class CudaDigestTable {
  public:
    CudaDigestTable(const DigestUnits& units, int device);
    ~CudaDigestTable();

    void launch(std::uintptr_t stream);
    // Waits for `stream` and writes the digest of each owner to `out`.
    void read(std::uintptr_t stream, std::uint64_t* out);
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

class CudaCopyDigestTable {
  public:
    CudaCopyDigestTable(const CopyDigestUnits& units, int device);
    ~CudaCopyDigestTable();

    void launch(std::uintptr_t stream);
    void read(std::uintptr_t stream, std::uint64_t* out);
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace weightsync
