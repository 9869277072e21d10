"""Whatever a user sends, as tensors with addresses, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightsync.naming import Rule, check_used
from weightsync.sources import ModuleSource, NamedSource, chunks, listed_pairs
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.types import CastPolicy, RegionKind


class Collector:
    """What one rank of a trainer sends, in a layout of all its ranks."""

    def __init__(
        self,
        rules: Sequence[Rule] | None,
        cast: CastPolicy,
        bucket_bytes: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rules, self._cast, self._bucket_bytes = rules, cast, bucket_bytes
        self._rank, self._world_size = rank, world_size
        self._module = ModuleSource(rules, cast, rank, world_size)
        self._named = NamedSource(rules or (), cast, rank, world_size)
        self._is_module = False

    @property
    def used_rules(self) -> frozenset[int] | None:
        """Which rules matched a name of this rank's part of a module; None: no module was collected."""
        return self._module.used if self._is_module else None

    def check_used_together(self, others: Sequence[frozenset[int] | None]) -> None:
        """With what other ranks used: raises :class:`ConfigError` for a rule that matched nowhere."""
        everyone = [self.used_rules, *others]
        found = [used for used in everyone if used is not None]
        if len(found) == len(everyone):  # a mapping need not have all that a rule speaks of
            check_used(self._module.rules, frozenset().union(*found))

    @staticmethod
    def is_one_part(source: Any) -> bool:
        """Whether all of a source is collected at once."""
        is_mapping = hasattr(source, "items") or isinstance(source, list | tuple)
        return is_mapping or hasattr(source, "named_parameters")

    def collect(self, source: Any) -> Iterator[tuple[LocalTensors, Mapping[str, str]]]:
        """Each part with what the rules dropped of it. Modules, mappings and lists are one part; a
        generator is one for each bucket. Raises :class:`ConfigError` for what cannot be sent."""
        self._is_module = hasattr(source, "named_parameters")
        if self._is_module:
            yield self._module.collect(source)
            return
        if hasattr(source, "items") or isinstance(source, list | tuple):
            named = source.items() if hasattr(source, "items") else source
            listed = listed_pairs(named)  # kept alive here until they were sent
            yield self._named.collect(listed)
            return
        place = {"rank": self._rank, "world_size": self._world_size}
        for ruled in chunks(source, self._rules or (), self._bucket_bytes, **place):
            gathered = local_tensors(
                ruled.named, cast=self._cast, kind=RegionKind.TEMPORARY, **place
            )
            yield gathered, ruled.dropped
            del gathered, ruled  # before the next part is gathered

    def forget(self) -> None:
        """Keep nothing of what was sent."""
        self._module.forget()
        self._named.forget()
