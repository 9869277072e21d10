"""What ranks of one engine do together, over a ``torch.distributed`` group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weightsync.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from engine_adapter.core.peer_sum import PeerSum


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
        self._peers: PeerSum | None = None

    def open_mailboxes(self, device: torch.device) -> None:
        """Let small sums on a CUDA device go by memory that ranks map, if they can; all ranks together."""
        from engine_adapter.core.peer_sum import open_mailboxes

        if self._peers is None and self.is_nccl(device):
            self._peers = open_mailboxes(self, device)

    @classmethod
    def of(cls, process_group: ProcessGroup) -> Group:
        """The whole of a process group."""
        import torch.distributed as dist

        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))

    def is_nccl(self, device: torch.device) -> bool:
        """Whether NCCL joins what lies on ``device``."""
        if self.process_group is None:
            return False
        import torch.distributed as dist

        if not dist.is_nccl_available():
            return False
        try:
            backend = self.process_group._get_backend(device)
        except RuntimeError:  # none for that kind of device
            return False
        return isinstance(backend, dist.ProcessGroupNCCL)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all of one shape and dtype."""
        if self.size == 1:
            return [tensor]
        import torch.distributed as dist

        mine = tensor.contiguous()
        whole = mine.new_empty((self.size, *mine.shape))
        # As bytes: not every backend knows every dtype.
        parts = whole.view(torch.uint8).flatten(), mine.view(torch.uint8).flatten()
        try:
            dist.all_gather_into_tensor(*parts, group=self.process_group)
        except RuntimeError as error:
            raise self._lost("all_gather", error) from error
        return list(whole.unbind(0))

    def sum_in_order(self, tensor: Tensor) -> Tensor:
        """The sum over ranks: fp32, from rank 0 up, rounded once."""
        if self._peers is not None and (total := self._peers.sum(tensor)) is not None:
            return total
        first, *rest = self.gather(tensor)
        if not rest:
            return tensor
        if len(rest) == 1:  # torch adds two in fp32 and rounds once
            return first + rest[0]
        total = first.float()
        for part in rest:
            total += part.float()
        return total.to(tensor.dtype)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each place's largest value over the ranks, by way of the host."""
        if self.size == 1:
            return list(values)
        found = self.gather(torch.tensor(values, dtype=torch.float64))
        return torch.stack(found).amax(0).tolist()

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
        return self.lost(f"{what} over {self.size} ranks of the engine failed: {error}")

    def lost(self, what: str) -> PeerLostError:
        """The error of this rank when ``what`` happened. Of two it is clear which one is meant."""
        other = f"rank {1 - self.rank}" if self.size == 2 else f"one of {self.size - 1} other ranks"
        return PeerLostError(
            f"{what} (seen by rank {self.rank}); {other} of the engine is gone or stuck: restart the "
            "engine"
        )


ALONE = Group()
