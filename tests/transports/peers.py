"""The far end of a pair as a process of its own: it does what its parent tells it, line by line."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from processes import Pipe

from transports.wire import addresses, deadline, header, random_bytes, row, table, view
from weightsync.errors import WeightSyncError
from weightsync.memory import SharedArena
from weightsync.transports.base import RingOptions, Transport
from weightsync.transports.ipc import DirectPath, IpcTransport


def ipc_memfd() -> Transport:
    """``ipc`` as it is where one process may not read another."""
    return IpcTransport(DirectPath.MEMFD)


Commands = dict[str, Callable[..., Any]]


def _transport(pipe: Pipe) -> Transport:
    module, _, name = str(pipe.receive()).partition(":")
    transport: Transport = getattr(importlib.import_module(module), name)()
    return transport


def _serve(pipe: Pipe, commands: Commands) -> None:
    """Run commands until the parent is gone; what fails is answered by the name of its error."""
    while True:
        name, *args = pipe.receive(600.0)
        start_s = time.monotonic()
        try:
            answer = {"result": commands[name](*args)}
        except WeightSyncError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        pipe.send({**answer, "seconds": time.monotonic() - start_s})


def fork_sleeper() -> int:
    """A forked child that shares every descriptor of this process, and waits to be killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def part(number: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What slot ``number`` of a move holds."""
    return random_bytes(num_bytes, number + 1000)


def source(pipe: Pipe) -> None:
    """The trainer's end."""
    with _transport(pipe).open_source() as endpoint:
        arena = SharedArena(64 * 2**20)
        memory = arena.empty((32 * 2**20,), "uint8")
        pipe.send(dict(endpoint.descriptor()))
        endpoint.accept(deadline())

        def move(session: str, slots: int, slot_bytes: int, parts: int, limit_s: float) -> None:
            ring = endpoint.stream(RingOptions(slots, slot_bytes), deadline(limit_s))
            ring.begin_move(session, deadline(limit_s, "begin"))
            for n in range(parts):
                slot = ring.acquire(deadline(limit_s, "acquire"))
                view(slot.ptr, slot_bytes)[:] = part(n, slot_bytes)
                ring.submit(slot, header(slot_bytes, n, session, is_last=n == parts - 1))
            ring.flush(deadline(limit_s, "flush"))

        def publish(num_bytes: int, seed: int) -> Any:
            memory[:num_bytes] = random_bytes(num_bytes, seed)
            return dict(endpoint.direct().publish(addresses([memory[:num_bytes]])))

        commands: Commands = {
            "move": move,
            "publish": publish,
            "withdraw": lambda: endpoint.direct().withdraw(),
            "fork": fork_sleeper,
            "lost": endpoint.lost,
            "close": endpoint.close,
        }
        _serve(pipe, commands)


def target(pipe: Pipe) -> None:
    """The engine's end."""
    transport = _transport(pipe)
    with transport.open_target(pipe.receive(), deadline()) as endpoint:
        memory = np.zeros(32 * 2**20, dtype=np.uint8)

        def move(session: str, parts: int, limit_s: float) -> bool:
            ring = endpoint.stream(deadline(limit_s))
            ring.begin_move(session)
            is_right = True
            for n in range(parts):
                head, slot = ring.receive(deadline(limit_s, "receive"))
                found = view(slot.ptr, slot.num_bytes)
                is_right &= head.sequence == n and np.array_equal(found, part(n, slot.num_bytes))
                ring.release(slot)
            return bool(is_right)

        def read(descriptor: Any, num_bytes: int, seed: int) -> bool:
            local = memory[:num_bytes]
            local[:] = 0
            direct = endpoint.direct()
            ptr = direct.open(descriptor, addresses([local]), deadline())[0]
            prepared = direct.prepare(table(row(ptr, int(local.ctypes.data), num_bytes)))
            direct.read(prepared, deadline(stage="read"))
            return bool(np.array_equal(local, random_bytes(num_bytes, seed)))

        commands: Commands = {
            "move": move,
            "read": read,
            "probe": lambda: endpoint.probe_direct(deadline()).is_usable,
            "fork": fork_sleeper,
            "lost": endpoint.lost,
            "close": endpoint.close,
        }
        _serve(pipe, commands)
