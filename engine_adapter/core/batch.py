"""One model step, as tensors: the words that scheduler, model and attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

#: Rows of every matrix product are padded to a multiple of this: below it, libraries choose kernels
#: by the number of rows, and a row's bits would depend on what else is in the batch.
ROW_PAD: Final = 16

#: Slot of a row that nothing is written for.
NO_SLOT: Final = -1


def padded_rows(num_rows: int) -> int:
    """``num_rows`` rounded up to a multiple of :data:`ROW_PAD`."""
    return -(-num_rows // ROW_PAD) * ROW_PAD


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What the host knows of a step, so that nothing need be asked of a device."""

    num_rows: int  # without padding
    most_rows: int  # of a sequence
    num_chunks: int  # of ATTENTION_CHUNK tokens, over the contexts of all sequences


@dataclass(frozen=True, slots=True)
class StepBatch:
    """R rows (tokens) of S sequences; rows of one sequence are adjacent, in position order.

    A sequence's rows are the last ``query_starts[s + 1] - query_starts[s]`` of its
    ``context_lens[s]`` tokens. Rows from ``query_starts[S]`` on are padding.
    """

    token_ids: Tensor  # int64 [R]; R is a multiple of ROW_PAD; padding is token 0
    positions: Tensor  # int64 [R]; 0 for padding
    slot_mapping: Tensor  # int64 [R]; page * page_size + offset of the row's K and V, or NO_SLOT
    query_starts: Tensor  # int32 [S + 1]; rows of each sequence
    context_lens: Tensor  # int32 [S]; tokens in the cache once this step's rows are written
    block_tables: Tensor  # int32 [S, P]; pages of each sequence, -1 beyond
    logit_rows: Tensor  # int64 [L]; rows whose logits are wanted
    counts: StepCounts | None = None  # None: nobody counted

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])
