"""Sparse deltas of spans by the native core, on addresses; see ``csrc/include/weightsync/delta*.hpp``.

A span is up to ``SPAN_ELEMENTS`` elements of one dense tensor. Every call releases the interpreter
lock and runs on the calling thread.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple

from weightsync import native
from weightsync.errors import IntegrityError

BLOCK_ELEMENTS: Final = native.extension.DELTA_BLOCK
SPAN_ELEMENTS: Final = native.extension.DELTA_SPAN


class Kind(Enum):
    """How elements are coded; the value is the native code."""

    BYTES = 0  # any dtype, byte by byte
    FLOAT8 = 1
    FLOAT16 = 2  # bf16 and fp16
    FLOAT32 = 3

    def __init__(self, code: int) -> None:
        self.code = code  # looked up faster than the value
        self.element_bytes = (1, 1, 2, 4)[code]


class Place(NamedTuple):
    """A span: where its elements stand in their tensor and in the digest of that.

    ``start_element`` and ``num_elements`` count elements of ``kind``; ``word_bytes`` (1, 2 or 4) and
    ``seed`` are those of the tensor's digest.
    """

    kind: Kind
    start_element: int
    num_elements: int
    seed: int
    word_bytes: int

    @property
    def columns(self) -> tuple[int, int, int, int, int]:
        return (self.kind.code, *self[1:])

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.kind.element_bytes

    @property
    def num_blocks(self) -> int:
        return -(-self.num_elements // BLOCK_ELEMENTS)


class TensorForm(NamedTuple):
    """What packed records do not say of their tensor; ``num_elements`` counts elements of ``kind``,
    ``digest`` is that of the new ones."""

    kind: Kind
    word_bytes: int
    num_elements: int
    digest: int

    @property
    def columns(self) -> tuple[int, int, int, int]:
        return (self.kind.code, *self[1:])


def record_capacity(place: Place) -> int:
    """Bytes that the front of any record of this span fits in."""
    return native.extension.delta_record_capacity(place.columns)


def encode(
    place: Place,
    pointers: tuple[int, int],
    outputs: tuple[int, int, int],
    *,
    is_absolute: bool,
    is_dense: bool,
) -> tuple[int, int]:
    """Codes old and new (``pointers``) into record, dense elements and block digests (``outputs``).

    Returns the bytes of the record before its dense section, and the number of dense elements. The
    digests (uint64, one a block) are those of the old blocks and become those of the new ones.
    """
    return native.extension.delta_encode(place.columns, *pointers, is_absolute, is_dense, *outputs)


def decode(
    place: Place,
    record: tuple[int, int],
    dense: tuple[int, int],
    old_ptr: int,
    outputs: tuple[int, int, int],
    digests: tuple[int, bool],
) -> tuple[int, int, int]:
    """What a record changes; nothing is applied.

    ``record`` is (address, bytes), ``dense`` (address, elements), ``outputs`` (positions uint32,
    values, capacity in elements), ``digests`` (address, whether they hold those of the old blocks).
    Returns (changes, digest of the old span, digest of the new one). Raises
    :class:`IntegrityError` for a record that is damaged or does not fit the base.
    """
    try:
        return native.extension.delta_decode(
            place.columns, *record, *dense, old_ptr, digests[1], *outputs, digests[0]
        )
    except native.extension.DeltaError as error:
        raise IntegrityError(f"elements from {place.start_element}: {error}") from error


def block_digests(place: Place, data_ptr: int, digests_ptr: int) -> None:
    """The parts of the tensor's digest that the blocks of a span make up, as uint64."""
    native.extension.delta_block_digests(place.columns, data_ptr, digests_ptr)


def checksum(record_ptr: int, num_bytes: int) -> int:
    """The checksum over a record with its sections, the field of it apart."""
    return native.extension.delta_checksum(record_ptr, num_bytes)


def pack(form: TensorForm, records: bytes) -> bytes:
    """All records of a tensor, packed; empty if that takes no less, or they would not come back."""
    return native.extension.delta_pack(form.columns, records)


def unpack(form: TensorForm, packed: Any, records: Any) -> None:
    """The inverse. Both are dense uint8; ``records`` is written to, and exactly their size.

    Raises :class:`IntegrityError` for what cannot be packed records of this tensor.
    """
    try:
        native.extension.delta_unpack(form.columns, packed, records)
    except native.extension.DeltaError as error:
        raise IntegrityError(str(error)) from error


def scatter(
    kind: Kind, target: tuple[int, int], positions_ptr: int, values_ptr: int, count: int
) -> None:
    """Writes ``count`` values to their positions in ``target`` (address, elements).

    Raises :class:`IntegrityError` before the first write if a position lies outside.
    """
    try:
        native.extension.delta_scatter(
            kind.element_bytes, *target, positions_ptr, values_ptr, count
        )
    except native.extension.DeltaError as error:
        raise IntegrityError(f"scatter: {error}") from error


def exchange(
    element_bytes: int,
    target: tuple[int, int],
    positions_ptr: int,
    values_ptr: int,
    former_ptr: int,
    count: int,
) -> None:
    """:func:`scatter` that puts what was there to ``former_ptr``."""
    try:
        native.extension.delta_exchange(
            element_bytes, *target, positions_ptr, values_ptr, former_ptr, count
        )
    except native.extension.DeltaError as error:
        raise IntegrityError(f"scatter: {error}") from error


def count_different(
    element_bytes: int, target: tuple[int, int], positions_ptr: int, values_ptr: int, count: int
) -> int:
    """How many of the elements at these positions do not hold these values."""
    return native.extension.delta_count_different(
        element_bytes, *target, positions_ptr, values_ptr, count
    )


def kernel() -> str:
    """The instruction set in use: "avx2" or "portable"."""
    return native.extension.delta_kernel()


def use_portable(is_portable: bool) -> None:
    """For tests: plain C++ in this thread from now on."""
    native.extension.delta_use_portable(is_portable)
