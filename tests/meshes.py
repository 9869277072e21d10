"""Random meshes of ranks, and clusters of a trainer and engines whose tensors lie over them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from layouts import Held, Model, build, fill

from weightsync.types import Availability, Box, Capabilities, Contract, CostConstants

CAN = Capabilities(
    "fake",
    {c: Availability(True) for c in Contract},
    {c: CostConstants(0.0, 1e9) for c in Contract},
    True,
)
Array = np.ndarray[Any, Any]


def cuts(draw: st.DrawFn, extent: int, parts: int) -> list[tuple[int, int]]:
    """A dimension in ``parts`` ranges: even, in chunks rounded up (the last ones short or empty), or
    anywhere."""
    how = draw(st.sampled_from(["even", "ceil", "any"]))
    if how == "ceil":
        size = -(-extent // parts)
        stops = [min((i + 1) * size, extent) for i in range(parts)]
    elif how == "even":
        stops = [(i + 1) * extent // parts for i in range(parts)]
    else:
        inner = sorted(
            draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
        )
        stops = [*inner, extent]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def interleaved(extent: int, parts: int, groups: int) -> list[list[tuple[int, int]]]:
    """Part i has the i-th slice of each group, as fused and interleaved projections are cut."""
    size = -(-extent // groups)
    found: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for g in range(groups):
        low, high = min(g * size, extent), min((g + 1) * size, extent)
        for i in range(parts):
            a = low + i * (high - low) // parts
            found[i].append((a, low + (i + 1) * (high - low) // parts))
    return found


@st.composite
def mesh(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[Held]:
    """One tensor over ``world`` ranks: cut along up to two dimensions, the rest of the ranks replicas.

    Boxes without an element stay in: ranks with nothing of a tensor do declare that.
    """
    if not shape:
        return [Held(r, Box((), ()), ()) for r in range(world)]
    outer = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    inner = draw(
        st.sampled_from([n for n in range(1, world // outer + 1) if world // outer % n == 0])
    )
    d, e = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
    groups = draw(st.integers(1, 3))
    first = interleaved(shape[d], outer, groups)
    if groups == 1:
        first = [[part] for part in cuts(draw, shape[d], outer)]
    second = cuts(draw, shape[e], inner) if e != d else [(0, shape[e])] * inner
    replicas_first = draw(st.booleans())
    found = []
    for rank in range(world):
        place = rank // (world // (outer * inner)) if replicas_first else rank % (outer * inner)
        for low, high in first[place // inner]:
            start, stop = [0] * len(shape), list(shape)
            start[d], stop[d] = low, high
            if e != d:
                start[e], stop[e] = second[place % inner]
            order = tuple(draw(st.permutations(range(len(shape)))))
            found.append(Held(rank, Box(tuple(start), tuple(stop)), order))
    return found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Model, list[Model], dict[str, Array]]:
    """A trainer, one to three engines, and what the tensors hold."""
    worlds = [draw(st.integers(1, 8)) for _ in range(draw(st.integers(2, 4)))]
    tensors: list[dict[str, Any]] = [{} for _ in worlds]
    reference = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = draw(st.sampled_from(["int8", "uint16", "float32"]))
        reference[f"t{i}"] = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        for side, world in zip(tensors, worlds, strict=True):
            side[f"t{i}"] = (dtype, shape, draw(mesh(shape, world)))
    source, *targets = (build(w, t) for w, t in zip(worlds, tensors, strict=True))
    fill(source, reference)
    return source, targets, reference
