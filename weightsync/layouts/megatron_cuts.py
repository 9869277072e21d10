"""Boxes of each way in which Megatron lays a tensor out over ranks (:class:`Cut`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from weightsync.errors import LayoutError
from weightsync.layouts.megatron_names import Cut, MegatronName
from weightsync.layouts.rules import part_along
from weightsync.layouts.sharded import Sharded, join_pieces

if TYPE_CHECKING:
    from weightsync.layouts.megatron import MegatronRules

Named = Iterable[tuple[str, Sharded]]


def cut_tensor(
    rules: MegatronRules, line: MegatronName, local: Sharded, name: str, targets: tuple[str, ...]
) -> Named:
    """Boxes of ``targets`` that a local tensor holds. Raises :class:`LayoutError` naming ``name``."""
    if not isinstance(line.cut, Cut):
        return line.cut(rules, local, name, targets)
    tp = rules.place.expert_tp if line.is_expert else (rules.place.tp_rank, rules.place.tp_size)
    return _CUTS[line.cut](rules, tp, local, name, targets)


Tp = tuple[int, int]  # rank, size
_CutMethod = Callable[["MegatronRules", Tp, Sharded, str, tuple[str, ...]], Named]


def _replicated(
    _: MegatronRules, __: Tp, local: Sharded, ___: str, targets: tuple[str, ...]
) -> Named:
    yield targets[0], local


def _rows(_: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]) -> Named:
    yield targets[0], part_along(local, 0, *tp, name=name)


def _columns(
    _: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]
) -> Named:
    if local.ndim != 2:
        raise LayoutError(f"{name!r}: a matrix is cut by columns, this has shape {local.shape}")
    yield targets[0], part_along(local, 1, *tp, name=name)


def _vocabulary(
    rules: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]
) -> Named:
    vocab, rows = rules.model.vocab_size, local.shape[0]
    padding = rows * tp[1] - vocab
    if not 0 <= padding < rules.model.vocab_divisor * tp[1]:
        raise LayoutError(
            f"{name!r}: {rows} rows on each of {tp[1]} ranks are {rows * tp[1]}, the vocabulary has "
            f"{vocab}; padding may be up to {rules.model.vocab_divisor * tp[1] - 1} rows (vocab_divisor=)"
        )
    yield targets[0], part_along(local, 0, *tp, extent=vocab, name=name)


def _gated(_: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]) -> Named:
    half, rest = divmod(local.shape[0], 2)
    if rest:
        raise LayoutError(
            f"{name!r}: {local.shape[0]} rows are not a gate above an up of equal size"
        )
    yield targets[0], part_along(local[:half], 0, *tp, name=name)
    yield targets[1], part_along(local[half:], 0, *tp, name=name)


def _qkv(
    rules: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]
) -> Named:
    model, (rank, size) = rules.model, tp
    groups, queries = model.num_kv_heads // size, model.num_heads // model.num_kv_heads
    group_rows = (queries + 2) * model.head_dim
    if local.shape[0] != groups * group_rows:
        raise LayoutError(
            f"{name!r}: {local.shape[0]} rows; {groups} groups of {queries} query heads, a key and a value "
            f"of {model.head_dim} are {groups * group_rows}"
        )
    row = 0
    for target, heads in zip(targets, (queries, 1, 1), strict=True):
        rows = heads * model.head_dim
        shape = (model.num_kv_heads * rows, *local.shape[1:])
        rest = (0,) * (local.ndim - 1)
        parts = [
            local[g * group_rows + row : g * group_rows + row + rows].within(
                shape, ((rank * groups + g) * rows, *rest)
            )
            for g in range(groups)
        ]
        yield target, join_pieces(parts, target)
        row += rows


def _stack(rules: MegatronRules, local: Sharded, name: str, is_gated: bool) -> Sharded:
    """[hidden, experts * n] as [experts, hidden, n] or [experts * n, hidden] as [experts, n, hidden].

    Both are the same memory in another shape, whatever the matrix seems to say.
    """
    count = rules.num_local_experts
    if len(local.pieces) != 1 or local.pieces[0].tensor.shape != local.shape or local.ndim != 2:
        raise LayoutError(
            f"{name!r}: grouped experts are one whole matrix, got shape {local.shape}"
        )
    if not count or local.shape[0] * local.shape[1] % count:
        raise LayoutError(f"{name!r}: {local.shape} is no stack of {count} experts")
    tensor = local.pieces[0].tensor
    is_array = hasattr(tensor, "flags")  # of NumPy
    if not (tensor.flags.c_contiguous if is_array else tensor.is_contiguous()):
        raise LayoutError(f"{name!r}: grouped experts are one dense matrix, this one has gaps")
    sizes = (count, local.shape[0], -1) if is_gated else (count, -1, local.shape[1])
    return Sharded.whole(tensor.reshape(sizes))


def _stacked(
    rules: MegatronRules, tp: Tp, local: Sharded, name: str, targets: tuple[str, ...]
) -> Iterator[tuple[str, Sharded]]:
    stack = _stack(rules, local, name, is_gated=len(targets) == 2)
    first = rules.first_expert
    for e in range(stack.shape[0]):
        named = tuple(t.replace(f".experts.{first}.", f".experts.{first + e}.") for t in targets)
        expert = stack[e].T  # [outputs, inputs], as files have it
        yield from (_gated if len(targets) == 2 else _columns)(rules, tp, expert, name, named)


_CUTS: Mapping[Cut, _CutMethod] = {
    Cut.REPLICATED: _replicated,
    Cut.ROWS: _rows,
    Cut.COLUMNS: _columns,
    Cut.VOCABULARY: _vocabulary,
    Cut.GATED: _gated,
    Cut.QKV: _qkv,
    Cut.STACKED_GATED: _stacked,
    Cut.STACKED_DOWN: _stacked,
}
