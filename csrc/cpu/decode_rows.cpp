#include "weightsync/cuda_core.hpp"

namespace weightsync {

void place_rows(const DecodeRows& rows) {
    for (std::int64_t row = 0; row < rows.num_rows; ++row) place_row(rows, row);
}

void advance_rows(const DecodeRows& rows) {
    for (std::int64_t row = 0; row < rows.num_rows; ++row) advance_row(rows, row);
}

}  // namespace weightsync
