"""What is known about an update afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weightsync.errors import ProtocolError
from weightsync.types import Contract, Outcome, format_bytes


@dataclass(frozen=True)
class EngineReport:
    """One engine's part. ``phases`` are seconds of wall time by name: those of stages, of what goes before
    them, of parts of them on the engine (``engine_``), and ``session``, from begin to commit with whatever
    the trainer did between its requests."""

    url: str
    session_id: str
    outcome: Outcome
    detail: str = ""
    version: int | None = None  # what the engine serves now, as far as known
    num_tensors: int = 0
    num_bytes: int = 0
    contract: Contract | None = None
    path: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    pause_s: float = 0.0
    root: str = ""  # digest over everything that was sent


@dataclass(frozen=True)
class UpdateReport:
    """An update over all engines of a sender."""

    version: int
    run_id: str
    engines: tuple[EngineReport, ...]
    seconds: float = 0.0
    dropped: Mapping[str, str] = field(default_factory=dict)  # name -> the rule that dropped it

    @property
    def is_committed(self) -> bool:
        return all(e.outcome is Outcome.COMMITTED for e in self.engines)

    def __str__(self) -> str:
        lines = [f"version {self.version}: {self.seconds:.3f} s"]
        for e in self.engines:
            size = format_bytes(e.num_bytes)
            line = (
                f"  {e.url}: {e.outcome}, {e.num_tensors} tensors, {size}, {e.contract} ({e.path})"
            )
            lines.append(f"{line} {e.detail}".rstrip())
        return "\n".join(lines)


def report_to_json(report: UpdateReport) -> dict[str, Any]:
    """Plain JSON, for the other ranks of a trainer; :func:`report_from_json` is its inverse."""
    return asdict(report)


def report_from_json(value: Any) -> UpdateReport:
    """Raises :class:`ProtocolError`."""
    try:
        engines = tuple(
            EngineReport(
                **{
                    **engine,
                    "outcome": Outcome(engine["outcome"]),
                    "contract": None
                    if engine["contract"] is None
                    else Contract(engine["contract"]),
                }
            )
            for engine in value["engines"]
        )
        return UpdateReport(**{**value, "engines": engines})
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed report: {error!r}") from error
