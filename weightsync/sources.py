"""What a sender may be given to send, and how it becomes tensors with addresses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightsync.errors import ConfigError
from weightsync.naming import Rule, RuledTensors, apply_rules, module_tensors, rules_for
from weightsync.tensors import LocalTensors, local_tensors, view_of
from weightsync.types import CastPolicy, parse_bytes

#: On a CPU a slot of this size costs little beside its bytes, and two of them fit anywhere.
_AUTO_BUCKET_BYTES = 64 * 2**20


def resolve_bucket(bucket: str | int) -> int:
    """Bytes of a slot: a size ("1GB", "512MiB", a count), or "auto" = 64 MiB."""
    return _AUTO_BUCKET_BYTES if bucket == "auto" else parse_bytes(bucket)


class ModuleSource:
    """A ``torch.nn.Module`` as source; its layout is kept while its tensors stay where they are."""

    def __init__(self, rules: Sequence[Rule] | None, cast: CastPolicy) -> None:
        self._rules, self._cast = rules, cast
        self._module: weakref.ref[Any] | None = None
        self._seen: list[tuple[Any, ...]] = []
        self._kept: tuple[LocalTensors, Mapping[str, str]] | None = None

    def collect(self, module: Any) -> tuple[LocalTensors, Mapping[str, str]]:
        """Its tensors after the rules, and what the rules dropped."""
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        seen = [
            (n, t.data_ptr(), t.dtype, t.shape, t.stride(), t.untyped_storage().nbytes())
            for n, t in named
        ]
        is_lazy = any(t.is_conj() or t.is_neg() for _, t in named)  # resolved into copies
        is_same = self._module is not None and self._module() is module and seen == self._seen
        if self._kept is None or not is_same or is_lazy:
            rules = rules_for(module) if self._rules is None else self._rules
            ruled = module_tensors(module, rules)
            self._kept = (local_tensors(ruled.named, cast=self._cast), ruled.dropped)
            self._module, self._seen = weakref.ref(module), seen
        return self._kept


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
    named: Iterable[tuple[str, Any]], rules: Sequence[Rule], bucket_bytes: int
) -> Iterator[RuledTensors]:
    """Gather a generator's tensors, about one bucket at a time, so that few are alive at once."""
    gathered = RuledTensors([], {})
    size = 0
    for item in pairs(named):
        ruled = apply_rules([item], rules)
        gathered.dropped.update(ruled.dropped)
        for name, tensor in ruled.named:
            num_bytes = view_of(tensor, name).num_bytes
            if gathered.named and size + num_bytes > bucket_bytes:
                yield gathered
                gathered, size = RuledTensors([], {}), 0
            gathered.named.append((name, tensor))
            size += num_bytes
    if gathered.named or gathered.dropped:
        yield gathered
