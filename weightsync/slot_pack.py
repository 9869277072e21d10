"""What fills one slot of a stream at every refit: a segment copy, and words that describe it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from weightsync.device_tables import SegmentCopy, Table, segment_copy, write_bytes
from weightsync.native import CancelFlag

#: Words begin at a multiple of their own alignment, behind the tensor bytes.
_WORD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class SlotPack:
    """``words`` (see ``encode_entries`` in binding.py) lie ``words_offset_bytes`` into the slot."""

    copy: SegmentCopy
    words: bytes
    data_bytes: int
    device: str
    #: Equal for packs that fill a slot with the same bytes from the same memory.
    identity: bytes = b""

    @classmethod
    def make(cls, rows: Table, words: bytes, device: str) -> SlotPack:
        """``rows``: sources are addresses on ``device``, targets are offsets within the slot."""
        cuts = np.frombuffer(words, dtype="<i8").reshape(-1, 4)
        data_bytes = int((cuts[:, 2] + cuts[:, 3]).max(initial=0))
        identity = hashlib.blake2b(rows.tobytes(), digest_size=16)
        identity.update(words)
        return cls(segment_copy(rows, device), words, data_bytes, device, identity.digest())

    @property
    def words_offset_bytes(self) -> int:
        return -(-self.data_bytes // _WORD_ALIGNMENT_BYTES) * _WORD_ALIGNMENT_BYTES

    def fill(
        self, slot_ptr: int, *, num_threads: int, cancel: CancelFlag | None, max_blocks: int = 0
    ) -> None:
        """On return the slot is filled, unless ``cancel`` was set. ``max_blocks``: of a device, 0 for all."""
        self.copy.run(num_threads, target_base=slot_ptr, max_blocks=max_blocks, cancel=cancel)
        write_bytes(slot_ptr + self.words_offset_bytes, self.words, self.device)
