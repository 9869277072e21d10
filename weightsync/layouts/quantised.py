"""Wire forms of slots that an engine keeps quantised: what may travel, before any kernel exists.

The checkpoint form of block fp8 is the one that DeepSeek-V3 publishes: ``NAME`` as ``float8_e4m3fn`` and
``NAME_scale_inv``, fp32, one scale for each block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weightsync.errors import ConfigError
from weightsync.layouts.roles import place_of
from weightsync.types import Box, SlotKind, TensorMeta

FP8 = "float8_e4m3fn"
FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
#: Dtypes of weights that are quantised when asked; anything else is left as it is.
_WIDE = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Wired:
    """A tensor of an engine: its wire forms, the most natural first, and what its slot accepts."""

    forms: tuple[TensorMeta, ...]
    kind: SlotKind = SlotKind.AFFINE
    weight: TensorMeta | None = None  # set for scales: the weight whose blocks they are of

    def scale_box(self, box: Box) -> Box:
        """The scales of all blocks that ``box`` of the weight touches."""
        start = tuple(a // FP8_BLOCK for a in box.start)
        stop = tuple(-(-b // FP8_BLOCK) if b > a else a // FP8_BLOCK for a, b in
                     zip(box.start, box.stop, strict=True))  # fmt: skip
        return Box(start, stop)


def is_projection(meta: TensorMeta) -> bool:
    """Whether block fp8 checkpoints quantise it: matrices in layers, but routers."""
    name = meta.name
    return (
        len(meta.shape) == 2
        and place_of(name).layer is not None
        and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    )


def scale_meta(weight: TensorMeta) -> TensorMeta:
    """The scales of a block fp8 weight."""
    shape = tuple(-(-n // FP8_BLOCK) for n in weight.shape)
    return TensorMeta(weight.name + SCALE_SUFFIX, "float32", shape)


def fp8_metas(metas: Sequence[TensorMeta]) -> tuple[TensorMeta, ...]:
    """A model's tensors in block fp8 checkpoint form: what a trainer that quantises would send."""
    return tuple(wired.forms[0] for wired in wire_metas(metas, "fp8"))


def wire_metas(metas: Sequence[TensorMeta], wire: str) -> list[Wired]:
    """What an engine declares for the tensors of a checkpoint.

    ``bfloat16`` (or ``bf16``): each as it is, affine. ``fp8`` (or ``float8_e4m3fn``): a projection is
    opaque and takes its checkpoint form, fp8 with scales beside it, or the dtype of its meta, which the
    engine then quantises; the scales are opaque too and needed only with the first. Metas that are in
    checkpoint form already stay so. Raises :class:`ConfigError` for another word.
    """
    paired = paired_metas(metas)
    if wire in ("bfloat16", "bf16"):
        return paired
    if wire not in ("fp8", FP8):
        raise ConfigError(f"wire {wire!r} is not known; known: bfloat16, fp8")
    found = []
    for wired in paired:
        meta = wired.forms[0]
        if wired.weight is not None or meta.dtype == FP8:
            found.append(replace(wired, kind=SlotKind.OPAQUE))
        elif not is_projection(meta) or meta.dtype not in _WIDE:
            found.append(wired)
        else:
            quantised = TensorMeta(meta.name, FP8, meta.shape)
            found.append(Wired((quantised, meta), SlotKind.OPAQUE))
            found.append(Wired((scale_meta(meta),), SlotKind.OPAQUE, quantised))
    return found


def paired_metas(metas: Sequence[TensorMeta]) -> list[Wired]:
    """Each as it is, affine; the scales of a block fp8 checkpoint know their weights."""
    fp8 = {meta.name + SCALE_SUFFIX: meta for meta in metas if meta.dtype == FP8}
    found = []
    for meta in metas:
        weight = fp8.get(meta.name)
        if weight is not None and meta.shape != scale_meta(weight).shape:
            raise ConfigError(
                f"{meta.name!r} has shape {meta.shape}; blocks of {FP8_BLOCK} x {FP8_BLOCK} of "
                f"{weight.shape} have {scale_meta(weight).shape}"
            )
        found.append(Wired((meta,), weight=weight))
    return found
