"""Which part of the model a rank holds: pure arithmetic, no process group.

Tensor parallel splits attention heads, dense MLPs and the vocabulary; expert parallel gives whole
experts to ranks. Each spans all ranks of the engine or is off (size 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shards:
    """The place of one rank. ``tp_size`` and ``ep_size`` are 1 or ``world_size``."""

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        n = self.world_size
        if not 0 <= self.rank < n:
            raise ConfigError(f"rank {self.rank} of an engine of {n} ranks")
        if {self.tp_size, self.ep_size} - {1, n} or (n > 1 and self.tp_size == self.ep_size == 1):
            raise ConfigError(
                f"tp_size {self.tp_size} and ep_size {self.ep_size} on {n} ranks: each must be 1 "
                f"or {n}, and one of them {n}"
            )

    @property
    def tp_rank(self) -> int:
        return self.rank if self.tp_size > 1 else 0

    @property
    def ep_rank(self) -> int:
        return self.rank if self.ep_size > 1 else 0

    def tp_range(self, extent: int) -> tuple[int, int]:
        """This rank's half-open part of an extent that tensor parallel splits."""
        return part_of_range(extent, self.tp_rank, self.tp_size)

    def ep_range(self, num_experts: int) -> tuple[int, int]:
        """This rank's experts."""
        return part_of_range(num_experts, self.ep_rank, self.ep_size)

    def expert_width_range(self, width: int) -> tuple[int, int]:
        """This rank's part of every expert it has: all of it under expert parallel."""
        return (0, width) if self.ep_size > 1 else self.tp_range(width)

    def heads(self, num_heads: int) -> tuple[int, int]:
        """This rank's query heads. Raises :class:`ConfigError` if they do not divide evenly."""
        if num_heads % self.tp_size:
            raise ConfigError(
                f"{num_heads} attention heads cannot be split over tp_size {self.tp_size} evenly; "
                "choose a divisor"
            )
        return self.tp_range(num_heads)

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """This rank's key and value heads; several ranks share one where there are fewer heads."""
        if num_kv_heads % self.tp_size == 0:
            return self.tp_range(num_kv_heads)
        if self.tp_size % num_kv_heads:
            raise ConfigError(
                f"{num_kv_heads} key heads and tp_size {self.tp_size}: one must divide the other"
            )
        head = self.tp_rank // (self.tp_size // num_kv_heads)
        return head, head + 1


def part_of_range(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Part ``rank`` of ``size`` nearly equal parts of ``range(extent)``, as (start, stop)."""
    return rank * extent // size, (rank + 1) * extent // size
