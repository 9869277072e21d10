"""An engine in memory, without torch: for tests, and to see an adapter whole on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_adapter.base import Fingerprint
from engine_adapter.tensors import TensorEngine, fingerprint_of
from weightsync.deadline import Deadline
from weightsync.digest import digest_tensors
from weightsync.errors import WeightSyncError
from weightsync.session import SessionSpec, Version
from weightsync.tensors import view_of
from weightsync.types import PauseMode
from weightsync.watch import Look

Array = npt.NDArray[Any]


class FakeEngine(TensorEngine):
    """Named NumPy arrays; ``generate()`` answers with what a real engine's output depends on.

    ``fail_in`` makes the named protocol call raise; ``calls`` records them all, in order.
    """

    def __init__(
        self, weights: Mapping[str, Array], opaque: Sequence[str] = (), fail_in: str = ""
    ) -> None:
        self.weights = dict(weights)
        self.fail_in = fail_in
        self.calls: list[str] = []
        super().__init__(self.weights.items(), opaque)

    def fingerprint(self) -> Mapping[str, Fingerprint]:
        """Of what the engine holds *now*: an array that was replaced shows."""
        return {name: fingerprint_of(view_of(w, name)) for name, w in self.weights.items()}

    def moved(self, look: Look) -> Sequence[str]:
        return self._moved_by_fingerprint()

    def generate(self) -> tuple[int | None, dict[str, int]]:
        """(version label, digest of each weight) as seen in one step."""
        with self.step(limit_s=30.0):
            version = None if self.version is None else self.version.number
            return version, digest_tensors(self.weights.items())

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_in == name:
            raise WeightSyncError(f"the fake engine was told to fail in {name}")

    def begin_update(self, spec: SessionSpec) -> None:
        self._called("begin_update")

    def write(self, name: str, tensor: Any) -> None:
        self._called("write")
        np.copyto(self.weights[name], tensor)

    def prepare(self) -> None:
        self._called("prepare")

    def commit(self, version: Version) -> None:
        self._called("commit")
        super().commit(version)

    def abort(self) -> None:
        self._called("abort")

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self._called("pause")
        super().pause(mode, deadline)
