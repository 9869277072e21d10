"""Memory of an engine by tag: given back while nothing runs, taken again at the same addresses.

What comes back is *empty* until somebody fills it: a backup on the host that was asked for, an update
of all weights, the cache that forgets what it had. Nothing runs on what is gone or empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

import torch
from torch import Tensor

from engine_adapter.core.arena import Arena, MemoryTag
from weightsync.errors import ConfigError, ReleasedError


class Backup(StrEnum):
    """What is kept of memory that is given back."""

    NONE = "none"
    PAGEABLE = "pageable"  # a copy in ordinary host memory
    PINNED = "pinned"  # in pinned host memory: faster, and taken from the machine for good


class MemoryState(StrEnum):
    FILLED = "filled"
    RELEASED = "released"
    EMPTY = "empty"  # there, with nothing in it


class Part(Protocol):
    """Memory of one tag."""

    def release(self, backup: Backup) -> int:
        """Give it back; returns measured bytes."""
        ...

    def resume(self) -> int:
        """Take it again; returns measured bytes. Raises :class:`CapacityError`; nothing is then taken."""
        ...

    @property
    def has_backup(self) -> bool:
        """Whether resuming fills it."""
        ...


class ArenaPart:
    """Arenas of one tag, with their backups."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = list(arenas)
        self._copies: list[Tensor] = []

    @property
    def has_backup(self) -> bool:
        return bool(self._copies)

    def release(self, backup: Backup) -> int:
        if backup is not Backup.NONE:
            is_pinned = backup is Backup.PINNED and self._arenas[0].memory.is_cuda
            self._copies = [_copied(arena.memory, is_pinned) for arena in self._arenas]
        return sum(arena.backing.release() for arena in self._arenas)

    def resume(self) -> int:
        total = 0
        for place, arena in enumerate(self._arenas):
            try:
                total += arena.backing.resume()
            except BaseException:
                for taken in self._arenas[:place]:
                    taken.backing.release()
                raise
        for arena, copy in zip(self._arenas, self._copies, strict=False):
            arena.memory.copy_(copy)
        self._copies = []
        return total


def _copied(memory: Tensor, is_pinned: bool) -> Tensor:
    copy = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=is_pinned)
    return copy.copy_(memory)


#: Of tags that nobody fills again: kept unless something else is asked for.
DEFAULT_BACKUPS: Final[Mapping[MemoryTag, Backup]] = {MemoryTag.STATIC: Backup.PAGEABLE}
#: Whose contents nobody needs after a step.
_NEEDS_NO_CONTENTS: Final = frozenset({MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH})


class EngineMemory:
    """The tags of one engine, and the state of each. Used between steps and by their driver only."""

    def __init__(self, parts: Mapping[MemoryTag, Part]) -> None:
        self._parts = dict(parts)
        self.states = dict.fromkeys(self._parts, MemoryState.FILLED)
        self.epoch = 0  # rises whenever memory goes: what was exported of it before is void

    def release(
        self, tags: Sequence[str] = (), backups: Mapping[str, Backup | str] | None = None
    ) -> int:
        """Give back what these tags (default: all) hold; returns measured bytes, 0 for what is gone
        already. Raises :class:`ConfigError` for what is no tag, or no backup, before anything goes."""
        chosen = self._chosen(tags)
        wanted = {**DEFAULT_BACKUPS, **self._backups(backups or {})}
        total = 0
        for tag in chosen:
            if self.states[tag] is MemoryState.RELEASED:
                continue
            # There is nothing to keep of what is empty.
            is_filled = self.states[tag] is MemoryState.FILLED
            backup = wanted.get(tag, Backup.NONE) if is_filled else Backup.NONE
            total += self._parts[tag].release(backup)
            self.states[tag] = MemoryState.RELEASED
            self.epoch += 1
        return total

    def resume(self, tags: Sequence[str] = ()) -> int:
        """Take again what these tags (default: all) held; returns measured bytes, 0 for what is there.

        Raises :class:`CapacityError` saying how much is missing; all that this call took is then given
        back, and every tag is in the state in which it was.
        """
        chosen = [tag for tag in self._chosen(tags) if self.states[tag] is MemoryState.RELEASED]
        total, taken = 0, []
        try:
            for tag in chosen:
                has_backup = self._parts[tag].has_backup
                total += self._parts[tag].resume()
                taken.append((tag, has_backup))
        except BaseException:
            for tag, has_backup in taken:
                self._parts[tag].release(Backup.PAGEABLE if has_backup else Backup.NONE)
            raise
        for tag, has_backup in taken:
            is_filled = has_backup or tag in _NEEDS_NO_CONTENTS
            self.states[tag] = MemoryState.FILLED if is_filled else MemoryState.EMPTY
        return total

    def fill(self, tag: MemoryTag) -> None:
        """Somebody wrote all of it. Raises :class:`ReleasedError` if it is not there."""
        self.require_there(tag, "filling it")
        self.states[tag] = MemoryState.FILLED

    def require_there(self, tag: MemoryTag, purpose: str) -> None:
        """Raises :class:`ReleasedError` if the memory is gone."""
        if self.states.get(tag) is MemoryState.RELEASED:
            raise ReleasedError(
                f"{purpose}: memory {str(tag)!r} was given back; resume_memory([{str(tag)!r}]) first"
            )

    def require_filled(self, purpose: str, tags: Sequence[MemoryTag] = ()) -> None:
        """Raises :class:`ReleasedError` naming what of ``tags`` (default: all) is gone or empty."""
        needed = tags or list(self.states)
        for tag in needed:
            self.require_there(tag, purpose)
        for tag in needed:
            if self.states[tag] is MemoryState.EMPTY:
                raise ReleasedError(
                    f"{purpose}: memory {str(tag)!r} is empty since it was given back without a "
                    "backup; a full update fills it"
                )

    def _chosen(self, tags: Sequence[str]) -> list[MemoryTag]:
        found = []
        for tag in tags or [str(tag) for tag in self._parts]:
            if tag not in self._parts:
                known = ", ".join(self._parts)
                raise ConfigError(f"no memory with tag {tag!r}; this engine has: {known}")
            found.append(MemoryTag(tag))
        return list(dict.fromkeys(found))

    def _backups(self, backups: Mapping[str, Backup | str]) -> dict[MemoryTag, Backup]:
        found = {}
        for tag, backup in backups.items():
            (known,) = self._chosen([tag])
            if backup not in list(Backup):
                kinds = ", ".join(Backup)
                raise ConfigError(f"backup {backup!r} of memory {tag!r}; known: {kinds}")
            found[known] = Backup(backup)
        return found


def arena_parts(arenas: Sequence[Arena]) -> dict[MemoryTag, Part]:
    """By tag, in the order of the tags."""
    return {
        tag: ArenaPart([arena for arena in arenas if arena.tag is tag])
        for tag in MemoryTag
        if any(arena.tag is tag for arena in arenas)
    }
