"""The trainer and the engine of the fault tests, as processes: small, single-threaded, without torch.

The weights of a version are a pure function of its number, so whoever sees a label knows every bit
that must stand behind it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from processes import Child, Pipe, num_maps, open_fds, resident_bytes

from engine_adapter.fake import FakeEngine
from weightsync import faults, link
from weightsync.digest import digest_tensors
from weightsync.errors import TaintedError, UpdateFailedError, WeightSyncError
from weightsync.receiver import Receiver
from weightsync.report import UpdateReport
from weightsync.sender import Sender

Array = npt.NDArray[Any]
Commands = Mapping[str, Callable[..., Any]]

OPAQUE = ("opaque.a", "opaque.b")
#: Slots this small cut the weights below into about ten buckets.
BUCKET_BYTES = 8192
NUM_LAYERS = 6
#: For a machine under load; nothing waits that long when all is well.
LIMIT_S = 60.0


def weights(version: int) -> dict[str, Array]:
    """Of one version: dense, strided, 0-dim and empty tensors, and two that are opaque."""
    rng = np.random.default_rng([7, version])
    found: dict[str, Array] = {
        f"layers.{i}.weight": rng.standard_normal((48, 40), dtype=np.float32)
        for i in range(NUM_LAYERS)
    }
    found["strided.rows"] = rng.standard_normal((60, 24), dtype=np.float32)[::2, ::3]
    found["strided.turned"] = rng.integers(0, 2**31, (40, 36), dtype=np.int32).T
    found["scale"] = np.array(rng.standard_normal(), dtype=np.float64)
    found["empty"] = np.zeros((0, 4), dtype=np.float16)
    for name in OPAQUE:
        found[name] = rng.integers(-128, 128, (33, 17), dtype=np.int8)
    return found


def fill(target: Mapping[str, Array], version: int) -> None:
    """Give arrays that stay where they are the weights of another version."""
    for name, array in weights(version).items():
        target[name][...] = array


def wait_until(is_true: Callable[[], bool], limit_s: float, status: Callable[[], Any]) -> None:
    end_s, pace = time.monotonic() + limit_s, threading.Event()
    while not is_true():
        if time.monotonic() > end_s:
            raise WeightSyncError(f"not within {limit_s} s; now {status()}")
        pace.wait(0.01)


def root_of(digests: Mapping[str, int]) -> str:
    """One word for a whole set of weights."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


@functools.cache
def root(version: int) -> str:
    """What a version digests to; 0 is what an engine starts with."""
    return root_of(digest_tensors(weights(version).items()))


class Witness:
    """Generates all the time, and remembers every distinct thing it saw.

    What it saw is ``[label, root, published]``: the engine's own label, the digest of the weights it
    used, and the version that its receiver had published at that moment.
    """

    def __init__(self, engine: FakeEngine, receiver: Receiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._seen: set[tuple[int | None, str, int | None]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="witness", daemon=True).start()

    def look(self) -> tuple[int | None, str, int | None]:
        with self._engine.step(limit_s=600.0):
            label, digests = self._engine.generate()
            return label, root_of(digests), self._receiver.version

    def _run(self) -> None:
        pace = threading.Event()
        while not pace.wait(0.01):
            try:
                found = self.look()
            except TaintedError:
                continue
            with self._lock:
                self._seen.add(found)

    def take(self) -> list[tuple[int | None, str, int | None]]:
        with self._lock:
            found, self._seen = list(self._seen), set()
        return found


def footprint() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "fds": len(open_fds()),
        "maps": num_maps(),
        "threads": threading.active_count(),
        "resident": resident_bytes(),
    }


def serve(pipe: Pipe, commands: Commands) -> None:
    """Answer commands until the parent is gone; an error is answered by its name and text."""
    while True:
        name, *args = pipe.receive(3600.0)
        try:
            pipe.send({"result": commands[name](*args)})
        except WeightSyncError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
            answer["notes"] = "\n".join(getattr(error, "__notes__", ()))
            if isinstance(error, UpdateFailedError) and error.report is not None:
                answer |= report_json(error.report)
            pipe.send(answer)


def report_json(report: UpdateReport) -> dict[str, Any]:
    engine = report.engines[0]
    return {
        "outcome": engine.outcome.value,
        "detail": engine.detail,
        "session_id": engine.session_id,
        "version": engine.version,
    }


def ask(child: Child, *command: Any) -> Any:
    """A parent's question to a process; its error fails the test."""
    child.send(command)
    return answer_of(child)


def answer_of(child: Child) -> Any:
    answer = child.receive(LIMIT_S)
    if "error" in answer:
        raise AssertionError(f"{answer['error']}: {answer['message']}")
    return answer["result"]


def check_seen(seen: list[list[Any]], *versions: int) -> None:
    """Whatever was generated came from a whole version, under its own label."""
    for label, found, published in seen:
        assert found == root(label or 0)
        assert label == published
        assert (label or 0) in versions


class EngineCommands:
    """What a parent may ask an engine."""

    def __init__(self, receiver: Receiver, witness: Witness) -> None:
        self._receiver = receiver
        self._witness = witness

    def url(self) -> str:
        return self._receiver.url

    def now(self) -> Any:
        """``[label, root, published]``, or the words with which it refuses."""
        try:
            return self._witness.look()
        except TaintedError as error:
            return str(error)

    def seen(self) -> Any:
        return self._witness.take()

    def status(self) -> Any:
        return self._receiver._status(None)

    def settle(self, limit_s: float) -> Any:
        """Wait until no session is open and no run holds the engine; its status then."""

        def is_settled() -> bool:
            status = self._receiver._status(None)
            return status["phase"] == "idle" and status["holder"] is None

        wait_until(is_settled, limit_s, self.status)
        return self.status()

    def settled(self, limit_s: float) -> Any:
        """Wait until no session is open, whoever holds the engine; its status then."""
        wait_until(lambda: self._receiver._status(None)["phase"] == "idle", limit_s, self.status)
        return self.status()

    def released(self, limit_s: float) -> None:
        """Wait until nothing is attached any more."""
        wait_until(lambda: not self._receiver._work.endpoints, limit_s, self.status)

    def close(self) -> None:
        self._receiver.close()


def arm(fault: str) -> None:
    """As ``WEIGHTSYNC_FAULT`` would, but from here on."""
    faults._FAULT = faults._Fault(fault)  # type: ignore[misc]


def commands_of(target: Any) -> Commands:
    found = {n: getattr(target, n) for n in dir(target) if not n.startswith("_")}
    return {**found, "arm": arm, "footprint": footprint}


def engine(pipe: Pipe) -> None:
    """An engine with the weights of version 0 on the port that its parent names."""
    port = pipe.receive()
    fake = FakeEngine(weights(0), OPAQUE)
    receiver = Receiver(fake, listen=f"127.0.0.1:{port}").start()
    pipe.send(receiver.url)
    serve(pipe, commands_of(EngineCommands(receiver, Witness(fake, receiver))))


class TrainerCommands:
    """What a parent may ask a trainer. Its tensors stay where they are."""

    def __init__(self) -> None:
        self._source = weights(0)
        self._sender: Sender | None = None
        self._report: UpdateReport | None = None

    def _connected(self) -> Sender:
        if self._sender is None:
            raise WeightSyncError("not connected")
        return self._sender

    def connect(self, url: str | list[str], options: dict[str, Any]) -> None:
        urls = [url] if isinstance(url, str) else url
        self._sender = Sender.connect(urls, bucket=BUCKET_BYTES, **options)

    def update(self, version: int) -> dict[str, Any]:
        """A full update. The report is kept, also of one that fails."""
        fill(self._source, version)
        update = self._connected().update(version=version)
        try:
            with update:
                update.send(self._source)
        finally:
            self._report = update.report
        return report_json(update.report) if update.report is not None else {}

    def send_manifests_apart(self) -> None:
        """As those of many tensors are."""
        link._FEW_TENSORS = 0

    def update_weights(self, version: int) -> dict[str, Any]:
        """The same in one call."""
        fill(self._source, version)
        report = self._connected().update_weights(self._source, version=version)
        return report_json(report)

    def refits(self, first: int, count: int) -> None:
        """Many full updates, with other bytes each time."""
        fill(self._source, first)
        for version in range(first, first + count):
            self._source["layers.0.weight"][...] = version
            with self._connected().update(version=version) as update:
                update.send(self._source)

    def report(self) -> dict[str, Any]:
        return {} if self._report is None else report_json(self._report)

    def close(self) -> None:
        self._connected().close()


def trainer(pipe: Pipe) -> None:
    """A trainer that does what its parent says."""
    serve(pipe, commands_of(TrainerCommands()))


class BothCommands(TrainerCommands):
    """A trainer and its engine in one process."""

    def connect(self, url: str | list[str], options: dict[str, Any]) -> None:
        self._receiver = Receiver(FakeEngine(weights(0), OPAQUE)).start()
        engine: Any = self._receiver if url == "here" else self._receiver.url
        self._sender = Sender.connect([engine], bucket=BUCKET_BYTES, **options)


def both(pipe: Pipe) -> None:
    """Trainer and engine in one process."""
    serve(pipe, commands_of(BothCommands()))
