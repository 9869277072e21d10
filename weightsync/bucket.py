"""FlattenedTensorBucket: many tensors as one flat run of bytes that describes itself.

Bytes travel, not dtypes: any torch dtype, any strides, empty and 0-dim tensors. Every tensor starts
at a multiple of 256 bytes; packing and unpacking are one segment copy each. A tensor larger than the
limit is cut by byte range, so that no bucket is larger than its limit. Tied tensors travel once and
come back tied.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import CapacityError, ConfigError, LayoutError, ProtocolError
from weightsync.tables import dense_strides, segment_rows, table
from weightsync.tensors import TensorView, check_writable, view_of
from weightsync.types import (
    BUCKET_ALIGNMENT_BYTES,
    TensorMeta,
    format_bytes,
    item_bytes,
    range_boxes,
)

METADATA_VERSION = 1

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes ``[start_bytes, start_bytes + num_bytes)`` of item ``item`` at ``offset_bytes`` of a bucket."""

    item: int
    start_bytes: int
    num_bytes: int
    offset_bytes: int


def align(num_bytes: int) -> int:
    """Rounded up to the bucket alignment."""
    return -(-num_bytes // BUCKET_ALIGNMENT_BYTES) * BUCKET_ALIGNMENT_BYTES


def cut_buckets(
    sizes: Iterable[int], bucket_bytes: int, max_cuts: int | None = None
) -> Iterator[list[Cut]]:
    """Assign items of ``sizes`` bytes, in order, to buckets of at most ``bucket_bytes``.

    Padding counts. An item larger than a bucket is cut at multiples of the alignment (which every
    element size divides); empty items take a cut of no bytes. ``max_cuts`` limits a bucket's entries.
    Lazy: a bucket is yielded as soon as it is full.
    """
    _check_limit(bucket_bytes)
    return _cut(sizes, lambda _: bucket_bytes, max_cuts)


def cut_stream(
    sizes: Sequence[int], bucket_bytes: int, max_cuts: int | None = None
) -> Iterator[list[Cut]]:
    """Likewise, for buckets that are filled, moved and emptied one behind the other.

    Nothing moves while the first is filled, nor while the last is emptied; so the first ones grow to
    ``bucket_bytes`` and the last ones shrink from it, unless they are small anyhow.
    """
    _check_limit(bucket_bytes)
    total_bytes = sum(align(size) for size in sizes)
    least_bytes = min(bucket_bytes, max(bucket_bytes // _RAMP, _LEAST_RAMP_BYTES))

    def limit(done_bytes: int) -> int:
        grown = _RAMP_GROWTH * done_bytes
        return min(bucket_bytes, max(least_bytes, min(grown, (total_bytes - done_bytes) // 2)))

    return _cut(sizes, limit, max_cuts)


#: The share of a full bucket that the first and the last are; a bucket that is a multiple of all before
#: it is filled while they move, for filling and emptying are some five times as fast as a link.
_RAMP, _RAMP_GROWTH = 8, 3
#: Below this a bucket's own cost is more than what it hides.
_LEAST_RAMP_BYTES = 16 * 2**20


def _check_limit(bucket_bytes: int) -> None:
    if bucket_bytes < BUCKET_ALIGNMENT_BYTES:
        raise ConfigError(
            f"a bucket of {bucket_bytes} B is too small; at least {BUCKET_ALIGNMENT_BYTES} B"
        )


def _cut(
    sizes: Iterable[int], limit_of: Callable[[int], int], max_cuts: int | None
) -> Iterator[list[Cut]]:
    """``limit_of``: the size of the next bucket, by the bytes of all before it."""
    cuts: list[Cut] = []
    used = full_bytes = 0

    def next_limit() -> int:
        return limit_of(full_bytes) // BUCKET_ALIGNMENT_BYTES * BUCKET_ALIGNMENT_BYTES

    limit = next_limit()
    for item, size in enumerate(sizes):
        done = 0
        while True:
            is_full = max_cuts is not None and len(cuts) >= max_cuts
            # An item that fits a bucket of its own is not cut: it moves on whole.
            if cuts and (
                is_full or (used + size - done > limit and (size <= limit or used == limit))
            ):
                yield cuts
                full_bytes += used
                cuts, used, limit = [], 0, next_limit()
            part = min(size - done, limit - used)
            cuts.append(Cut(item, done, part, used))
            used = align(used + part)
            done += part
            if done == size:
                break
    if cuts:
        yield cuts


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A byte range of one tensor's dense wire form, at ``offset_bytes`` of the bucket."""

    meta: TensorMeta
    start_bytes: int
    num_bytes: int
    offset_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.start_bytes == 0 and self.num_bytes == self.meta.num_bytes


@dataclass(frozen=True, slots=True)
class BucketMetadata:
    """What lies where in a flattened tensor; serialises as plain JSON."""

    entries: tuple[BucketEntry, ...]
    num_bytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name -> name that travels

    def to_json(self) -> dict[str, Any]:
        rows = [
            [e.meta.name, e.meta.dtype, e.meta.shape, e.start_bytes, e.num_bytes, e.offset_bytes]
            for e in self.entries
        ]
        return {
            "version": METADATA_VERSION,
            "num_bytes": self.num_bytes,
            "entries": rows,
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, value: Any) -> BucketMetadata:
        """Parse and check every offset. Raises :class:`ProtocolError` or :class:`LayoutError`."""
        try:
            if value["version"] != METADATA_VERSION:
                raise ProtocolError(
                    f"bucket metadata of version {value['version']!r}; this side speaks "
                    f"{METADATA_VERSION}"
                )
            entries = tuple(
                BucketEntry(
                    TensorMeta(str(name), str(dtype), tuple(map(int, shape))),
                    int(a),
                    int(n),
                    int(o),
                )
                for name, dtype, shape, a, n, o in value["entries"]
            )
            aliases = {str(k): str(v) for k, v in value["aliases"].items()}
            metadata = cls(entries, int(value["num_bytes"]), aliases)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise ProtocolError(f"malformed bucket metadata: {error!r}") from error
        metadata._check()
        return metadata

    def _check(self) -> None:
        end = 0
        for e in sorted(self.entries, key=lambda e: (e.offset_bytes, e.num_bytes)):
            item = item_bytes(e.meta.dtype)
            is_sane = (
                e.offset_bytes >= end
                and e.num_bytes >= 0
                and e.offset_bytes % item == 0
                and e.start_bytes % item == 0
                and e.num_bytes % item == 0
                and 0 <= e.start_bytes <= e.meta.num_bytes - e.num_bytes
            )
            if not is_sane:
                raise ProtocolError(f"bucket metadata: entry {e} overlaps or is misaligned")
            end = e.offset_bytes + e.num_bytes
        if end > self.num_bytes:
            raise ProtocolError(f"bucket metadata: entries end at {end} of {self.num_bytes} B")
        self._check_names()

    def _check_names(self) -> None:
        """A name is one tensor, of which no byte comes twice; an alias names a tensor that is here."""
        parts: dict[str, list[BucketEntry]] = {}
        for e in self.entries:
            parts.setdefault(e.meta.name, []).append(e)
        for name, found in parts.items():
            found.sort(key=lambda e: e.start_bytes)
            for a, b in itertools.pairwise(found):
                if a.meta != b.meta or b.start_bytes < a.start_bytes + max(a.num_bytes, 1):
                    raise ProtocolError(f"bucket metadata: {name!r} is listed twice: {a}, {b}")
        for alias, name in self.aliases.items():
            if name not in parts or alias in parts:
                raise ProtocolError(
                    f"bucket metadata: {alias!r} is not an alias of an entry ({name!r})"
                )


def cut_rows(
    view: TensorView, cut: Cut, base_ptr: int, *, is_packing: bool
) -> list[tuple[int, ...]]:
    """Segment rows between a tensor and its cut in a bucket at ``base_ptr``."""
    item = item_bytes(view.dtype)
    first = cut.start_bytes // item
    rows: list[tuple[int, ...]] = []
    at = base_ptr + cut.offset_bytes
    for box in range_boxes(view.shape, first, first + cut.num_bytes // item):
        ptr = view.ptr + sum(i * s for i, s in zip(box.start, view.strides_bytes, strict=True))
        tensor = (ptr, view.strides_bytes, item)
        flat = (at, dense_strides(box.shape, item), item)
        pair = (tensor, flat) if is_packing else (flat, tensor)
        rows += segment_rows(box.shape, source=pair[0], target=pair[1])
        at += box.num_elements * item
    return rows


class FlattenedTensorBucket:
    """A flattened tensor (1-dim uint8) and its metadata.

    ``pack`` many named tensors, ship ``flattened_tensor`` and ``metadata`` (JSON), and rebuild with
    ``FlattenedTensorBucket(flattened_tensor, metadata)``; ``unpack`` then yields named views of it,
    which are valid as long as its memory is: whoever keeps one past the next reuse must copy.
    """

    def __init__(self, flattened_tensor: Any, metadata: BucketMetadata) -> None:
        view = _flat_view(flattened_tensor, "flattened_tensor")
        if view.num_bytes < metadata.num_bytes:
            raise ProtocolError(
                f"a flattened tensor of {view.num_bytes} B for metadata of {metadata.num_bytes} B"
            )
        self.flattened_tensor = flattened_tensor
        self.metadata = metadata
        self._view = view

    @classmethod
    def pack(
        cls,
        named_tensors: Iterable[tuple[str, Any]],
        *,
        out: Any = None,
        num_threads: int = 1,
    ) -> FlattenedTensorBucket:
        """Pack whole tensors into one bucket, in one segment copy.

        ``out`` is reusable memory (1-dim uint8, larger than needed is fine), else NumPy memory is
        made. Raises :class:`CapacityError` when ``out`` is too small.
        """
        packer = _Packer(named_tensors)
        buckets = list(cut_buckets((v.num_bytes for v in packer.views), 2**62))
        return packer.fill(buckets[0] if buckets else [], out, num_threads)

    @classmethod
    def pack_all(
        cls,
        named_tensors: Iterable[tuple[str, Any]],
        bucket_bytes: int,
        *,
        out: Any = None,
        num_threads: int = 1,
    ) -> Iterator[FlattenedTensorBucket]:
        """Pack into as many buckets of at most ``bucket_bytes`` as are needed; at least one.

        With ``out`` every bucket uses the same memory: take what you need before the next.
        """
        packer = _Packer(named_tensors)
        buckets = list(cut_buckets((v.num_bytes for v in packer.views), bucket_bytes)) or [[]]
        for cuts in buckets:
            yield packer.fill(cuts, out, num_threads)

    def unpack(self) -> list[tuple[str, Any]]:
        """Named views of the bucket, tied names after those that travelled.

        torch tensors for a torch flattened tensor (or where NumPy lacks the dtype), else NumPy.
        Raises :class:`LayoutError` for a tensor of which the bucket holds only a part: collect such
        with :func:`unpack_all`.
        """
        found: dict[str, Any] = {}
        for e in self.metadata.entries:
            if not e.is_whole:
                raise LayoutError(
                    f"{e.meta.name!r}: the bucket holds bytes {e.start_bytes}:"
                    f"{e.start_bytes + e.num_bytes} of {e.meta.num_bytes}; use unpack_all"
                )
            part = self.flattened_tensor[e.offset_bytes : e.offset_bytes + e.num_bytes]
            found[e.meta.name] = as_dtype(part, e.meta)
        for alias, name in self.metadata.aliases.items():
            if name in found:
                found[alias] = found[name]
        return list(found.items())

    def unpack_into(self, targets: Mapping[str, Any], num_threads: int = 1) -> None:
        """Copy every entry, whole or part, into the tensor of its name, in one segment copy."""
        from weightsync import native

        rows: list[tuple[int, ...]] = []
        views: list[TensorView] = []
        for e in self.metadata.entries:
            if e.meta.name not in targets:
                raise LayoutError(f"no target for {e.meta.name!r}")
            view = view_of(targets[e.meta.name], e.meta.name)
            check_writable(view, e.meta.name)
            if (view.dtype, view.shape) != (e.meta.dtype, e.meta.shape):
                raise LayoutError(
                    f"{e.meta.name!r}: bucket has {e.meta.dtype}{e.meta.shape}, target is "
                    f"{view.dtype}{view.shape}"
                )
            cut = Cut(0, e.start_bytes, e.num_bytes, e.offset_bytes)
            rows += cut_rows(view, cut, self._view.ptr, is_packing=False)
            views.append(view)
        _check_devices(views, self._view)
        native.copy_segments(table(rows, 13), num_threads=num_threads)


def unpack_all(
    buckets: Iterable[FlattenedTensorBucket], num_threads: int = 1
) -> Iterator[tuple[str, Any]]:
    """Named tensors, in order, from buckets that may share memory: every tensor is a copy.

    A cut tensor is collected until it is complete. Raises :class:`LayoutError` if one never is and
    :class:`ProtocolError` for parts that are repeated or out of order.
    """
    parts: dict[str, tuple[Bytes, TensorMeta, int]] = {}  # memory, what it becomes, bytes so far
    for bucket in buckets:
        whole = {}
        for e in bucket.metadata.entries:
            if e.meta.name not in parts:
                memory, meta, done = np.empty(e.meta.num_bytes, dtype=np.uint8), e.meta, 0
            else:
                memory, meta, done = parts.pop(e.meta.name)
            if meta != e.meta or e.start_bytes != done:
                raise ProtocolError(
                    f"{e.meta.name!r}: bytes from {e.start_bytes} on of {e.meta} arrived after "
                    f"{done} B of {meta}"
                )
            flat = np.asarray(bucket.flattened_tensor)
            data = flat[e.offset_bytes : e.offset_bytes + e.num_bytes]
            memory[e.start_bytes : e.start_bytes + e.num_bytes] = data
            done += e.num_bytes
            if done < meta.num_bytes:
                parts[meta.name] = (memory, meta, done)
                continue
            whole[e.meta.name] = as_dtype(memory, e.meta)
        yield from whole.items()
        yield from ((a, whole[n]) for a, n in bucket.metadata.aliases.items() if n in whole)
    if parts:
        raise LayoutError(f"never complete: {', '.join(map(repr, parts))}")


class _Packer:
    """Views of named tensors, tied ones once."""

    def __init__(self, named_tensors: Iterable[tuple[str, Any]]) -> None:
        self.metas: list[TensorMeta] = []
        self.views: list[TensorView] = []
        self.aliases: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        seen: set[str] = set()
        for name, tensor in named_tensors:
            if name in seen:
                raise LayoutError(f"{name!r} was given twice")
            seen.add(name)
            view = view_of(tensor, name)
            same = first.setdefault(view.identity, name) if view.num_bytes else name
            if same != name:
                self.aliases[name] = same
                continue
            self.metas.append(TensorMeta(name, view.dtype, view.shape))
            self.views.append(view)

    def fill(self, cuts: Sequence[Cut], out: Any, num_threads: int) -> FlattenedTensorBucket:
        from weightsync import native

        used = max((c.offset_bytes + c.num_bytes for c in cuts), default=0)
        memory: Any = np.empty(used, dtype=np.uint8) if out is None else out
        target = _flat_view(memory, "out")
        check_writable(target, "out")
        if target.num_bytes < used:
            raise CapacityError(
                f"the bucket needs {format_bytes(used)}, its memory has "
                f"{format_bytes(target.num_bytes)}"
            )
        rows = [
            r for c in cuts for r in cut_rows(self.views[c.item], c, target.ptr, is_packing=True)
        ]
        _check_devices([self.views[c.item] for c in cuts], target)
        native.copy_segments(table(rows, 13), num_threads=num_threads)
        entries = tuple(
            BucketEntry(self.metas[c.item], c.start_bytes, c.num_bytes, c.offset_bytes)
            for c in cuts
        )
        names = {e.meta.name for e in entries}
        aliases = {a: n for a, n in self.aliases.items() if n in names}
        return FlattenedTensorBucket(memory, BucketMetadata(entries, used, aliases))


def _flat_view(memory: Any, name: str) -> TensorView:
    view = view_of(memory, name)
    is_dense = view.strides_bytes == (1,) or not view.num_bytes
    if view.dtype != "uint8" or len(view.shape) != 1 or not is_dense:
        raise LayoutError(
            f"{name}: a flattened tensor is dense 1-dim uint8, got {view.dtype}{view.shape} with "
            f"strides {view.strides_bytes}"
        )
    return view


def _check_devices(views: Sequence[TensorView], target: TensorView) -> None:
    for view in (*views, target):
        if view.device != "cpu":
            raise LayoutError(f"a tensor on {view.device}: buckets are packed from CPU memory only")


def as_dtype(flat: Any, meta: TensorMeta) -> Any:
    """1-dim uint8 memory seen as the tensor ``meta``: torch if ``flat`` is, or if NumPy cannot.

    torch cannot view memory at an offset that the element size does not divide: that is copied.
    """
    torch = sys.modules.get("torch")
    if isinstance(flat, np.ndarray):
        try:
            return flat.view(np.dtype(meta.dtype)).reshape(meta.shape)
        except TypeError:
            if torch is None:
                raise LayoutError(
                    f"{meta.name!r}: NumPy has no dtype {meta.dtype!r}; import torch (or ml_dtypes)"
                ) from None
            flat = torch.from_numpy(flat)
    if torch is None:  # cannot be: only torch makes such memory
        raise LayoutError("the flattened tensor is not NumPy memory and torch is not imported")
    if not meta.num_elements:
        return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=flat.device)
    if flat.storage_offset() % item_bytes(meta.dtype):
        flat = flat.clone()
    return flat.view(getattr(torch, meta.dtype)).reshape(meta.shape)


__all__ = [
    "BucketEntry",
    "BucketMetadata",
    "Cut",
    "FlattenedTensorBucket",
    "cut_buckets",
    "cut_stream",
    "unpack_all",
]
