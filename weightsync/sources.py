"""What a sender may be given to send, and how it becomes tensors with addresses."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

from weightsync.errors import ConfigError
from weightsync.layouts.dtensor import Trainer, is_dtensor, local_part
from weightsync.layouts.fsdp2 import gatherers, reshard
from weightsync.layouts.sharded import Sharded
from weightsync.naming import Rule, RuledTensors, apply_rules, check_used, module_tensors, rules_for
from weightsync.tensors import LocalTensors, local_tensors, view_of
from weightsync.types import CastPolicy, TensorMeta, parse_bytes
from weightsync.watch import Look, ModuleWatch, laziness, local_tensors_of, where

#: On a CPU a slot of this size costs little beside its bytes, and two of them fit anywhere.
_AUTO_BUCKET_BYTES = 64 * 2**20


def resolve_bucket(bucket: str | int) -> int:
    """Bytes of a slot: a size ("1GB", "512MiB", a count), or "auto" = 64 MiB."""
    return _AUTO_BUCKET_BYTES if bucket == "auto" else parse_bytes(bucket)


class ModuleSource:
    """A ``torch.nn.Module`` as source; its layout is kept while its tensors stay where they are."""

    def __init__(
        self,
        rules: Sequence[Rule] | None,
        cast: CastPolicy,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rules, self._cast = rules, cast
        self._rank, self._world_size = rank, world_size
        self._module: weakref.ref[Any] | None = None
        self._watch: ModuleWatch | None = None
        self._gatherers: list[Any] = []
        self._kept: tuple[LocalTensors, Mapping[str, str]] | None = None
        #: The rules of the last module, and the indices of those that matched a name on this rank.
        self.rules: Sequence[Rule] = ()
        self.used: frozenset[int] = frozenset()

    def collect(self, module: Any) -> tuple[LocalTensors, Mapping[str, str]]:
        """This rank's tensors after the rules, and what the rules dropped.

        Modules of FSDP2 that a forward pass has left gathered are sharded again, as their own
        ``state_dict()`` does: what is gathered does not follow the optimizer.
        """
        is_same = self._module is not None and self._module() is module
        if is_same:
            reshard(self._gatherers)
        is_changed = self._watch is None or self._watch.has_changed(Look.EVERYTHING)
        if self._kept is None or not is_same or is_changed:
            self.forget()  # what is no longer sent need not stay in memory meanwhile
            wrapped = gatherers(module)
            reshard(wrapped)
            rules = rules_for(module) if self._rules is None else self._rules
            ruled = module_tensors(module, rules, Trainer(self._rank, self._world_size))
            self.rules, self.used = rules, frozenset(ruled.used)
            if self._world_size == 1:  # of several ranks, one may well have none of a rule's names
                check_used(rules, self.used)
            found = local_tensors(
                ruled.named, cast=self._cast, rank=self._rank, world_size=self._world_size
            )
            kept = (found, ruled.dropped)
            if any(_is_lazy(tensor) for _, tensor in ruled.named):
                return kept  # resolved into a copy, which is made anew each time
            self._kept, self._module = kept, weakref.ref(module)
            self._watch = ModuleWatch(module)
            self._gatherers = wrapped
        return self._kept

    def forget(self) -> None:
        """Keep nothing of the last module."""
        self._module = self._kept = self._watch = None
        self._gatherers = []


class NamedSource:
    """A mapping or list as source; its layout is kept while its tensors lie where they did.

    A new state dict of the same model is the same source. No tensor is kept alive.
    """

    def __init__(
        self, rules: Sequence[Rule], cast: CastPolicy, rank: int = 0, world_size: int = 1
    ) -> None:
        self._rules, self._cast = rules, cast
        self._rank, self._world_size = rank, world_size
        self._names: list[str] = []
        self._seen: object = None
        self._kept: tuple[LocalTensors, Mapping[str, str]] | None = None

    def collect(self, listed: Sequence[tuple[str, Any]]) -> tuple[LocalTensors, Mapping[str, str]]:
        """The tensors after the rules, and what the rules dropped. The caller keeps the tensors."""
        names, tensors = list(map(itemgetter(0), listed)), list(map(itemgetter(1), listed))
        seen = (where(tensors), laziness(tensors)) if _are_plain(tensors) else None
        is_same = seen is not None and (names, seen) == (self._names, self._seen)
        if self._kept is not None and is_same:
            return self._kept
        self._kept = None
        ruled = apply_rules(listed, self._rules, Trainer(self._rank, self._world_size))
        local = local_tensors(
            ruled.named, cast=self._cast, rank=self._rank, world_size=self._world_size
        )
        found = (local, ruled.dropped)
        if seen is not None and not any(map(_is_lazy, tensors)):
            self._names, self._seen = names, seen
            self._kept = (replace(local, views={}, shards={}), found[1])
        return found

    def forget(self) -> None:
        """Keep nothing of the last source."""
        self._kept, self._names, self._seen = None, [], None


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Whether they are torch tensors of which it can be asked where they lie."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    locals_ = local_tensors_of(tensors)
    is_plain = set(map(type, locals_)) <= {torch.Tensor, torch.nn.Parameter}
    return is_plain and set(map(attrgetter("layout"), locals_)) <= {torch.strided}


def _is_lazy(tensor: Any) -> bool:
    if isinstance(tensor, Sharded):
        return any(_is_lazy(piece.tensor) for piece in tensor.pieces)
    local = local_part(tensor) if is_dtensor(tensor) else tensor
    return bool(local.is_conj() or local.is_neg())


def listed_pairs(named: Any) -> list[tuple[str, Any]]:
    """All of :func:`pairs`, looked at together: of many tensors a line for each takes longer than a copy."""
    if isinstance(named, Iterable):
        listed = list(named)
        is_pairs = set(map(type, listed)) <= {tuple} and set(map(len, listed)) <= {2}
        if is_pairs and set(map(type, map(itemgetter(0), listed))) <= {str}:
            return listed
        named = listed
    return list(pairs(named))


def pairs(named: Any) -> Iterator[tuple[str, Any]]:
    """Each (name, tensor) of a source, checked. Raises :class:`ConfigError`."""
    hint = "give a module, a mapping or an iterable of (name, tensor) pairs"
    if not isinstance(named, Iterable):
        raise ConfigError(f"{type(named).__name__} cannot be sent; {hint}")
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ConfigError(
                f"a source yields (name, tensor) pairs, got {type(item).__name__}; {hint}"
            )
        yield item


def chunks(
    named: Iterable[tuple[str, Any]],
    rules: Sequence[Rule],
    bucket_bytes: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[RuledTensors]:
    """Gather a generator's tensors, about one bucket at a time, so that few are alive at once.

    What counts is the size of whole tensors, not of this rank's part: ranks whose generators yield the
    same names in the same order cut at the same places.
    """
    gathered, trainer = RuledTensors([], {}), Trainer(rank, world_size)
    size = 0
    for item in pairs(named):
        ruled = apply_rules([item], rules, trainer)
        gathered.dropped.update(ruled.dropped)
        for name, tensor in ruled.named:
            num_bytes = _whole_bytes(name, tensor)
            if gathered.named and size + num_bytes > bucket_bytes:
                yield gathered
                gathered, size = RuledTensors([], {}), 0
            gathered.named.append((name, tensor))
            size += num_bytes
    if gathered.named or gathered.dropped:
        yield gathered


def _whole_bytes(name: str, tensor: Any) -> int:
    if isinstance(tensor, Sharded):
        return TensorMeta(name, tensor.dtype, tensor.shape).num_bytes
    return view_of(tensor, name).num_bytes
