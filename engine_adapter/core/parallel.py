"""What ranks of one engine do together, over a ``torch.distributed`` group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weightsync.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Group:
    """The ranks of an engine. Sums run in rank order, so that results repeat bit for bit.

    ``process_group`` None with ``size`` 1: this process alone. Its own timeout bounds every wait;
    a rank that is lost is :class:`PeerLostError`.
    """

    def __init__(
        self, process_group: ProcessGroup | None = None, rank: int = 0, size: int = 1
    ) -> None:
        if process_group is None and size != 1:
            raise ConfigError(f"{size} ranks need a torch.distributed process group")
        self.process_group, self.rank, self.size = process_group, rank, size

    @classmethod
    def of(cls, process_group: ProcessGroup) -> Group:
        """The whole of a process group."""
        import torch.distributed as dist

        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all of one shape and dtype."""
        if self.size == 1:
            return [tensor]
        import torch.distributed as dist

        mine = tensor.contiguous()
        found = [torch.empty_like(mine) for _ in range(self.size)]
        # As bytes: not every backend knows every dtype.
        views = [t.view(torch.uint8) for t in found]
        try:
            dist.all_gather(views, mine.view(torch.uint8), group=self.process_group)
        except RuntimeError as error:
            raise self._lost("all_gather", error) from error
        return found

    def sum_in_order(self, tensor: Tensor) -> Tensor:
        """The sum over ranks: fp32, from rank 0 up, rounded once."""
        first, *rest = self.gather(tensor)
        if not rest:
            return tensor
        total = first.float()
        for part in rest:
            total += part.float()
        return total.to(tensor.dtype)

    def join_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """[R, widths[rank]] of every rank -> [R, sum of widths], in rank order."""
        if self.size == 1:
            return tensor
        missing = max(widths) - tensor.shape[1]
        parts = self.gather(torch.nn.functional.pad(tensor, (0, missing)))
        return torch.cat([p[:, :w] for p, w in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's contents in everybody's ``tensor``, which is also returned."""
        if self.size > 1:
            import torch.distributed as dist

            root = dist.get_global_rank(self.process_group, 0) if self.process_group else 0
            try:
                dist.broadcast(tensor, root, group=self.process_group)
            except RuntimeError as error:
                raise self._lost("broadcast", error) from error
        return tensor

    def _lost(self, what: str, error: Exception) -> PeerLostError:
        return PeerLostError(
            f"{what} over {self.size} ranks of the engine failed on rank {self.rank}: {error}; a "
            "rank of the engine is gone or stuck: restart the engine"
        )


ALONE = Group()
