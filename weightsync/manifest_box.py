"""Manifests that come beside the exchange whose prepare needs them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

#: Of so many sessions, the newest: one is open, and one may be on its way.
_NUM_SESSIONS: Final = 2
_POLL_S: Final = 0.05


class ManifestBox:
    """By session; any thread may put and wait. They stay, for an exchange may be made again."""

    def __init__(self) -> None:
        self._manifests: OrderedDict[str, list[Any]] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, session_id: str, manifests: list[Any]) -> None:
        with self._changed:
            self._manifests.pop(session_id, None)
            self._manifests[session_id] = manifests
            while len(self._manifests) > _NUM_SESSIONS:
                self._manifests.popitem(last=False)
            self._changed.notify_all()

    def wait(
        self, session_id: str, until_s: float, is_over: Callable[[], bool]
    ) -> list[Any] | None:
        """Those of a session; None if they did not come until that moment of the monotonic clock, or
        before the session was over."""
        with self._changed:
            while session_id not in self._manifests:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or is_over():
                    return None
                self._changed.wait(min(left_s, _POLL_S))
            return self._manifests[session_id]
