"""Every error of weightsync, as one tree.

::

    WeightSyncError
    ├── ConfigError                  a setting or argument that cannot be (also ValueError)
    │   └── MissingDependencyError   a package of an extra is absent (also ImportError)
    ├── LayoutError                  names, shapes, dtypes, boxes that do not fit
    │   ├── UnknownNameError         a tensor that the other side does not have
    │   ├── MissingNameError         a tensor in scope that was not sent
    │   ├── ShapeMismatchError
    │   └── DTypeMismatchError
    ├── ProtocolError                a message that is malformed or of another protocol
    │   ├── AuthError                no token, or a wrong one
    │   └── TooLargeError            a message above its limit
    ├── SessionError                 the engine refuses, or has ended, a session
    │   ├── BusyError                another session or another run holds the engine
    │   ├── VersionError             a version that goes back
    │   ├── ScopeError               a full update is needed
    │   ├── EpochError               the engine was restarted since the handshake
    │   └── CancelledError           work was stopped because its session was given up
    ├── TransportError               bytes could not be moved
    │   ├── UnavailableError         this transport cannot be used here, and why
    │   └── SlowPathError            a slow path where ``--strict`` asked for a fast one
    ├── PeerLostError                the other process is gone (also ConnectionError)
    ├── DeadlineError                a wait ran out (also TimeoutError)
    ├── CapacityError                not enough memory or space (also OSError)
    ├── ReleasedError                memory that is needed was given back, or is empty since
    ├── IntegrityError               digests differ
    ├── TaintedError                 the engine refuses to generate until a full update succeeds
    ├── RequestFailedError           requests of an engine failed; carries all outputs
    └── UpdateFailedError            an update did not commit; carries the report

Errors cross the control wire as ``{"error": code, "message": text}``; :func:`to_wire` and
:func:`from_wire` are the only border.
"""

from __future__ import annotations

from typing import Any


class WeightSyncError(Exception):
    """Root of every error that weightsync raises on purpose."""


class ConfigError(WeightSyncError, ValueError):
    """A setting or an argument that cannot be."""


class MissingDependencyError(ConfigError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str = "", why: str = "") -> None:
        if extra:  # rebuilt from the wire with the finished text only
            reason = f" ({why})" if why else ""
            text = f"{package!r} is not installed{reason}; run: pip install 'weightsync[{extra}]'"
        else:
            text = package
        super().__init__(text)


class LayoutError(WeightSyncError, ValueError):
    """Names, shapes, dtypes or boxes that do not fit each other."""


class UnknownNameError(LayoutError):
    """A tensor was offered that the other side does not have."""


class MissingNameError(LayoutError):
    """A tensor (or a part of one) in scope did not arrive."""


class ShapeMismatchError(LayoutError):
    """Two sides disagree about a shape."""


class DTypeMismatchError(LayoutError):
    """Two sides disagree about a dtype and no declared cast joins them."""


class ProtocolError(WeightSyncError):
    """A message that is malformed, or of another protocol version."""


class AuthError(ProtocolError):
    """No token, or a wrong one."""


class TooLargeError(ProtocolError):
    """A message above the size limit; names limit and size."""


class SessionError(WeightSyncError):
    """The engine refuses, or has ended, a session."""


class BusyError(SessionError):
    """Another session or another run holds the engine; the message names the holder."""


class VersionError(SessionError):
    """A version that does not rise within its run."""


class ScopeError(SessionError):
    """A partial update where a full one is needed."""


class EpochError(SessionError):
    """The engine was restarted since the handshake; connect again."""


class CancelledError(SessionError):
    """Work was stopped because its session was given up."""


class TransportError(WeightSyncError):
    """Bytes could not be moved."""


class UnavailableError(TransportError):
    """A transport or contract cannot be used here; the message says why and what to do."""


class SlowPathError(TransportError):
    """A slow path would be taken although ``strict`` forbids it."""


class PeerLostError(WeightSyncError, ConnectionError):
    """The process at the other end is gone."""

    #: What was waited for then, once the message says so; see :meth:`weightsync.deadline.Deadline.lost`.
    stage = ""


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait ran out. The message names peer, stage, limit and elapsed time (seconds)."""

    def __init__(
        self, peer: str, stage: str = "", limit_s: float = 0.0, elapsed_s: float = 0.0
    ) -> None:
        if stage:
            text = (
                f"{peer}: no answer in stage {stage!r} after {elapsed_s:.1f} s "
                f"(limit {limit_s:.1f} s); look whether it still runs, or allow more time"
            )
        else:
            text = peer
        super().__init__(text)


class CapacityError(WeightSyncError, OSError):
    """Not enough memory or space; the message says how much is needed and how much there is."""


class ReleasedError(WeightSyncError):
    """Memory that this needs was given back, or is empty since; names the tag and what helps."""


class IntegrityError(WeightSyncError):
    """Digests differ: the bytes that landed are not the bytes that were sent."""


class TaintedError(WeightSyncError):
    """The engine refuses to generate until a full update succeeds."""


class RequestFailedError(WeightSyncError):
    """Requests of an engine failed, by name; ``outputs`` holds those of all that ran with them."""

    def __init__(self, message: str, outputs: Any = None) -> None:
        super().__init__(message)
        self.outputs = outputs


class UpdateFailedError(WeightSyncError):
    """An update did not commit on every engine; ``report`` lists each engine's outcome."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


def _tree(root: type[WeightSyncError]) -> dict[str, type[WeightSyncError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def to_wire(error: BaseException) -> dict[str, str]:
    """The JSON form of an error; anything not of our tree travels as ``WeightSyncError``."""
    if isinstance(error, WeightSyncError):
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "WeightSyncError", "message": f"{type(error).__name__}: {error}"}


def from_wire(message: object) -> WeightSyncError:
    """The error that :func:`to_wire` wrote; an unknown code becomes a plain ``WeightSyncError``."""
    if not isinstance(message, dict):
        return ProtocolError(f"an error message must be an object, got {type(message).__name__}")
    kind = _tree(WeightSyncError).get(str(message.get("error")), WeightSyncError)
    return kind(str(message.get("message", "no message")))
