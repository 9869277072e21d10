"""An engine that follows a store of versions: no trainer speaks to it.

Rank 0 opens sessions of its own at the engine's leader, so everything that holds of a trainer's update
holds here: the ranks fetch and verify while the engine generates, the leader decides once, a version is
published when every rank holds it whole. A delta is decoded first and written under a pause; anything
that fails before the version is published is taken back.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from weightsync.errors import (
    ConfigError,
    IntegrityError,
    LayoutError,
    SessionError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.session import (
    Abort,
    Begin,
    Close,
    Commit,
    Connect,
    LeaderEvent,
    Move,
    Prepare,
    Scope,
    SessionSpec,
    Version,
)
from weightsync.store import Store, VersionKind, VersionManifest
from weightsync.store.chain import chain_source, checkpoint_source
from weightsync.store.object_path import place_of
from weightsync.store.version import Identity
from weightsync.types import PauseMode, Placement, VerifyMode

_LOG = logging.getLogger(__name__)

_ASK_S: Final = 60.0
#: How the run of an engine is called whose store went back to an earlier version.
_LINEAGE: Final = "~"


@dataclass(frozen=True)
class FollowOptions:
    """``placement`` is that of full versions; times are seconds. ``poll_s``: how often ``watch`` looks.

    ``verify`` is of full versions. Of a delta every live tensor is digested before it is decided, and
    every written element is read back under the pause.
    """

    placement: Placement = Placement.STAGED
    verify: VerifyMode = VerifyMode.READ_BACK
    pause_mode: PauseMode = PauseMode.RETRACT
    poll_s: float = 0.5
    lease_s: float = 600.0
    deadline_s: float = 600.0
    commit_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", Placement(self.placement))
        object.__setattr__(self, "verify", VerifyMode(self.verify))
        object.__setattr__(self, "pause_mode", PauseMode(self.pause_mode))
        if self.placement is Placement.DELTA:
            raise ConfigError("placement is that of full versions: staged or in_place")
        for name in ("poll_s", "lease_s", "deadline_s", "commit_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: it must be > 0 (seconds)")


@dataclass(frozen=True)
class PullReport:
    """What one pull did. ``kinds`` are those of the versions it took, in order; none: the engine was
    there already. ``payload_bytes`` count what was read, ``pause_s`` how long no step ran."""

    version: int
    root: str
    kinds: tuple[str, ...] = ()
    payload_bytes: int = 0
    num_changed: int = 0
    seconds: float = 0.0
    pause_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def bits_per_changed_element(self) -> float | None:
        """Of deltas; None if nothing changed or a full version was read."""
        if not self.num_changed:
            return None
        return 8 * self.payload_bytes / self.num_changed


class Engine(Protocol):
    """What a follower needs of a :class:`weightsync.Receiver`."""

    @property
    def epoch(self) -> str: ...

    @property
    def label(self) -> Version | None: ...

    def newest_of(self, run_id: str) -> int | None: ...

    def ask(
        self, event_of_number: Callable[[int], LeaderEvent], wait_s: float
    ) -> Mapping[str, Any]: ...

    def update_stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Held:
    """What the follower has put into the engine: the label it got, and what that is in the store."""

    label: Version
    store_run: str
    identity: Identity


class StoreFollower:
    """Keeps one engine at versions of a store. One thread at a time, but ``stop`` from any.

    ``run_id`` None: the run that was published to last, looked for at each pull, so that a trainer that
    starts anew under another run id is followed too.
    """

    def __init__(
        self, engine: Engine, directory: Path | str, run_id: str | None, options: FollowOptions
    ) -> None:
        self._engine, self._options = engine, options
        self._directory, self._run_id = place_of(directory), run_id
        self._held: _Held | None = None
        self._stopping = threading.Event()
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: WeightSyncError | None = None  # of the last look of ``watch``
        self.reports: list[PullReport] = []  # of ``watch``, newest last, at most 256

    # --- once ---------------------------------------------------------------------------------------

    def pull(self, version: int | None = None) -> PullReport:
        """Bring the engine to a version (None: the newest), by the cheapest way there is.

        From what the engine holds if this follower put it there and nobody else has updated since; from
        a full version otherwise: of a foreign run, a higher version or another root it starts anew,
        never "done already". A version whose files are missing or torn is gone round. Raises
        :class:`UnavailableError` or :class:`IntegrityError` if no way is left; the engine then serves
        what it had, or says that it is tainted.
        """
        store = self._store()
        wanted = store.latest() if version is None else version
        if wanted is None:
            raise UnavailableError(f"{store.path} holds no version")
        broken: dict[str, WeightSyncError] = {}
        is_base_good = True
        while True:
            have = self._base_in(store) if is_base_good else None
            try:
                way = store.route(have, wanted, without=broken)
            except UnavailableError as error:
                raise next(iter(broken.values()), error) from error
            if not way and have is not None:
                return PullReport(have.version, have.root)
            try:
                return self._take(store, way)
            except (IntegrityError, UnavailableError, LayoutError) as error:
                culprit = _culprit(store, way)
                if culprit is not None:
                    broken[culprit] = error
                elif not way[0].is_full and is_base_good:
                    _LOG.warning("starting anew from a full version: %s", error)
                    is_base_good = False
                else:
                    raise
            except ConfigError as error:
                if way[0].is_full or not is_base_good:
                    raise
                _LOG.warning("no delta can be applied to this engine: %s", error)
                is_base_good = False

    def _store(self) -> Store:
        if self._run_id is not None:
            return Store(self._directory, self._run_id)
        run_id = Store.newest_run(self._directory)
        if run_id is None:
            raise UnavailableError(f"{self._directory} holds no run with a version")
        return Store(self._directory, run_id)

    def _base_in(self, store: Store) -> Identity | None:
        """What the engine holds, if that is a version of this store which nobody has changed since."""
        held = self._held
        if held is None or held.store_run != store.run_id or self._engine.label != held.label:
            return None
        return held.identity

    def _take(self, store: Store, way: list[VersionManifest]) -> PullReport:
        start_s = time.perf_counter()
        target = way[-1].target
        is_full = way[0].is_full
        placement = self._options.placement if is_full else Placement.DELTA
        label = Version(self._lineage(store.run_id, target.version), target.version)
        run_session(self._engine, label, placement, chain_source(store, way), self._options)
        self._held = _Held(label, store.run_id, target)
        stats = self._engine.update_stats()
        return PullReport(
            version=target.version,
            root=target.root,
            kinds=tuple(manifest.kind.value for manifest in way),
            payload_bytes=stats["num_bytes"],
            num_changed=stats["num_changed"],
            seconds=time.perf_counter() - start_s,
            pause_s=stats["pause_s"],
            phases=stats["phases"],
        )

    def _lineage(self, run_id: str, version: int) -> str:
        """The run as the engine knows it: its versions only rise, so a store that went back, or was
        made anew under its old name, becomes another run there."""
        held = self._held
        number = 0
        if held is not None and held.store_run == run_id:
            number = int(held.label.run_id.partition(_LINEAGE)[2] or 0)
        while True:
            name = run_id if number == 0 else f"{run_id}{_LINEAGE}{number}"
            newest = self._engine.newest_of(name)
            if newest is None or newest < version:
                return name
            number += 1

    # --- following ------------------------------------------------------------------------------------

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Follow the newest version until :meth:`stop`, or until ``until()`` after a look.

        What fails is logged, kept in ``error``, and tried again at the next look.
        """
        while not self._stopping.is_set():
            self._look()
            if until():
                return
            self._stopping.wait(self._options.poll_s)

    def start(self) -> StoreFollower:
        """:meth:`watch` on a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.watch, name="weightsync-follow", daemon=True
            )
            self._thread.start()
        return self

    def wait_for(self, version: int, limit_s: float) -> bool:
        """Whether the engine holds ``version`` or a higher one within ``limit_s`` seconds."""

        def is_there() -> bool:
            return self._held is not None and self._held.identity.version >= version

        with self._moved:
            return self._moved.wait_for(is_there, timeout=limit_s)

    def stop(self, limit_s: float = 30.0) -> None:
        """End :meth:`watch`; an update that is under way is finished first. Idempotent."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def __enter__(self) -> StoreFollower:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _look(self) -> None:
        try:
            report = self.pull()
        except WeightSyncError as error:
            is_waiting = self._held is None and isinstance(error, UnavailableError)
            if str(error) != str(self.error):  # nothing published yet is no fault
                level = logging.INFO if is_waiting else logging.WARNING
                _LOG.log(level, "following %s: %s", self._directory, error)
            self.error = error
            return
        self.error = None
        if report.kinds:
            with self._moved:
                self.reports = [*self.reports, report][-256:]
                self._moved.notify_all()


def load_checkpoint(
    engine: Engine, directory: Path | str, version: int, run_id: str, options: FollowOptions
) -> PullReport:
    """Any Hugging Face directory of safetensors into a running engine: one full version, as one update.

    Nobody said its digests, so what is proven is that what landed is what was read. Raises
    :class:`VersionError` if the run has published that version already.
    """
    start_s = time.perf_counter()
    folder = Path(directory).expanduser().resolve()
    label = Version(run_id, version)
    run_session(engine, label, options.placement, checkpoint_source(folder), options)
    stats = engine.update_stats()
    return PullReport(
        version, "", (VersionKind.FULL.value,), stats["num_bytes"], 0,
        time.perf_counter() - start_s, stats["pause_s"], stats["phases"],
    )  # fmt: skip


def run_session(
    engine: Engine,
    label: Version,
    placement: Placement,
    source: Mapping[str, Any],
    options: FollowOptions,
) -> None:
    """One transaction of the engine's own: take what ``source`` names, and serve it as ``label``.

    Raises what the ranks raised; the engine then serves what it had, or is tainted.
    """
    run_id, session_id = label.run_id, f"store-{secrets.token_hex(8)}"
    spec = SessionSpec(
        session_id, run_id, label.number, Scope(), placement, options.deadline_s,
        options.commit_timeout_s, options.verify, options.pause_mode,
    )  # fmt: skip
    limit_s = options.deadline_s + 2 * options.commit_timeout_s
    connected = _until_answered(engine, lambda n: Connect(n, run_id, options.lease_s), limit_s)
    epoch = str(connected["epoch"])
    try:
        steps: tuple[Callable[[int], LeaderEvent], ...] = (
            lambda n: Begin(n, epoch, spec),
            lambda n: Move(n, session_id, 0, {"store": dict(source)}),
            lambda n: Prepare(n, session_id),
            lambda n: Commit(n, session_id),
        )
        for step in steps:
            _until_answered(engine, step, limit_s)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with suppress(WeightSyncError):
            _until_answered(engine, lambda n: Abort(n, session_id, reason), limit_s)
        raise
    finally:
        with suppress(WeightSyncError):
            engine.ask(lambda n: Close(n, run_id), _ASK_S)


def _until_answered(
    engine: Engine, event: Callable[[int], LeaderEvent], limit_s: float
) -> Mapping[str, Any]:
    """Ask again, which attaches to what is under way, as long as the answer is that it is pending."""
    end_s = time.monotonic() + limit_s
    while True:
        answer = engine.ask(event, min(_ASK_S, max(end_s - time.monotonic(), 0.01)))
        if not answer.get("pending"):
            return answer
        if time.monotonic() >= end_s:
            raise SessionError(
                f"the engine did not answer within {limit_s:.0f} s; it is {answer.get('phase')!r}"
            )


def _culprit(store: Store, way: list[VersionManifest]) -> str | None:
    """The manifest among these whose files are missing or not what it says."""
    for manifest in way:
        try:
            store.check_files(manifest)
        except (UnavailableError, IntegrityError):
            return manifest.file_name
    return None


__all__ = ["FollowOptions", "PullReport", "StoreFollower", "load_checkpoint", "run_session"]
