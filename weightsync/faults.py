"""Named points at which a process under test ends or stops itself.

``$WEIGHTSYNC_FAULT`` arms one: ``point=kill`` or ``point=stop``, with ``@3`` for the third time it is
reached. Unarmed, a point costs one comparison.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from weightsync import config
from weightsync.errors import ConfigError

#: name -> where it is
FAULT_POINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stream.acquire": "trainer: about to take a free slot",
        "stream.submit": "trainer: a slot is filled, its header not yet sent",
        "stream.announced": "trainer: the header of a slot was sent, its broadcast not yet begun",
        "stream.submitted": "trainer: the header of a slot was sent",
        "stream.flush": "trainer: about to wait for the last releases",
        "stream.reset": "trainer: asked the engine to drop what an unclean end left",
        "stream.landing": "engine: about to take part in the broadcast of a slot",
        "stream.receive": "engine: about to wait for a slot",
        "stream.received": "engine: holds a filled slot",
        "stream.release": "engine: about to give a slot back",
        "group.invited": "trainer: the members of a broadcast group were asked to join",
        "group.join": "engine: about to join a broadcast group",
        "direct.publish": "trainer: about to publish regions",
        "direct.published": "trainer: regions are published",
        "direct.withdraw": "trainer: about to withdraw its regions",
        "direct.open": "engine: about to open published regions",
        "direct.read": "engine: about to read",
        "direct.read_done": "engine: everything was read",
        "trainer.connected": "trainer: the engine accepted the run, no transport yet",
        "trainer.attached": "trainer: the transport is attached",
        "trainer.planned": "trainer: the engine agreed to a plan",
        "trainer.begin": "trainer: about to ask for a session",
        "trainer.begun": "trainer: the session is open, nothing asked of it yet",
        "trainer.move": "trainer: about to ask the engine to pull",
        "trainer.bucket": "trainer: one more slot was handed over",
        "trainer.moved": "trainer: the engine has read everything",
        "trainer.manifest": "trainer: has asked for everything, about to send the manifests by themselves",
        "trainer.prepare": "trainer: about to send the manifest",
        "trainer.prepared": "trainer: about to ask for the commit (of one engine, with the manifest)",
        "trainer.committed": "trainer: the commit was confirmed",
        "engine.attach": "engine: about to attach the transport",
        "engine.attached": "engine: attached, not yet answered",
        "engine.planned": "engine: took a plan, not yet answered",
        "engine.open": "engine: about to open a session",
        "engine.opened": "engine: the session is open, not yet answered",
        "engine.move": "engine: about to pull",
        "engine.bucket": "engine: one more slot landed",
        "engine.moved": "engine: everything landed, not yet answered",
        "engine.prepare": "engine: about to verify",
        "engine.prepared": "engine: verified, not yet answered",
        "engine.place": "engine: decided, about to park",
        "engine.half_placed": "engine: half of the slots hold the new version",
        "engine.placed": "engine: every slot holds the new version, not yet read back or published",
        "engine.resume": "engine: published, about to resume",
        "engine.resumed": "engine: resumed, the trainer not yet answered",
        "engine.discard": "engine: about to give a session up",
        "store.payload": "publisher: one more payload file is durable",
        "store.manifest": "publisher: all payload is durable, the manifest about to be linked",
        "store.committed": "publisher: the version is visible, the snapshot not yet advanced",
        "store.collected": "collector: a manifest is withdrawn, its payload still there",
        "follow.landed": "engine: one more tensor of a full version, or piece of one, landed",
        "local.seeded": "puller: a full version is copied, not yet current",
        "local.decoded": "puller: everything is decoded and checked, the redo log not yet durable",
        "local.logged": "puller: the redo log is durable, the state still the old version",
        "local.applying": "puller: the state says applying, nothing is written yet",
        "local.half": "puller: one more span is written",
        "local.written": "puller: everything is written and durable, not yet verified",
        "local.ready": "puller: the state says the new version, the redo log still there",
    }
)

_SIGNALS: Final = MappingProxyType({"kill": signal.SIGKILL, "stop": signal.SIGSTOP})


class _Fault:
    def __init__(self, text: str) -> None:
        point, _, action = text.partition("=")
        action, _, times = action.partition("@")
        known = ", ".join(FAULT_POINTS)
        if point not in FAULT_POINTS:
            raise ConfigError(f"WEIGHTSYNC_FAULT={text!r}: unknown point {point!r}; known: {known}")
        if action not in _SIGNALS or not (times or "1").isdecimal() or times == "0":
            raise ConfigError(f"WEIGHTSYNC_FAULT={text!r}: expected point=kill[@times] or stop")
        self._point = point
        self._signal = _SIGNALS[action]
        self._left = int(times or "1")
        self._lock = threading.Lock()

    def hit(self, point: str) -> None:
        if point not in FAULT_POINTS:
            raise ConfigError(f"fault point {point!r} is not in FAULT_POINTS")
        if point != self._point:
            return
        with self._lock:
            self._left -= 1
            is_due = self._left == 0
        if is_due:
            # Directed at this thread: a signal to the process may find another one first, and then
            # this one would go on past its point before everything stands still.
            signal.pthread_kill(threading.get_ident(), self._signal)


def _armed() -> _Fault | None:
    text = config.armed_fault()
    return None if text is None else _Fault(text)


_FAULT: Final = _armed()


def reach(point: str) -> None:
    """Mark a place where a test may end this process."""
    if _FAULT is not None:
        _FAULT.hit(point)
