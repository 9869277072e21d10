"""The table of ``docs/protocol.md`` that says what holds after a process ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
_HEAD = "| point | process | contract | staged | in place |"
CONTRACTS = ("stream", "direct")
PLACEMENTS = ("staged", "in_place")
UNREACHED = "–"
AFTERMATHS = ("old", "new", "refuses")


@dataclass(frozen=True)
class Row:
    """One point: which process ends there, and what its engine does then, by placement."""

    point: str
    process: str
    contracts: tuple[str, ...]
    after: dict[str, str]


@dataclass(frozen=True)
class Case:
    """One test of a row."""

    point: str
    contract: str
    placement: str
    after: str = ""
    transport: str = "ipc"

    def __str__(self) -> str:
        return "-".join((self.point, self.transport, self.contract, self.placement))


def rows() -> list[Row]:
    """The table, checked for form."""
    lines = iter(DOCUMENT.read_text().splitlines())
    if _HEAD not in lines:
        raise ValueError(f"{DOCUMENT} has no table {_HEAD!r}")
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            return found
        found.append(_row(line))
    return found


def _row(line: str) -> Row:
    point, process, contract, *after = (cell.strip() for cell in line.strip("|").split("|"))
    if not re.fullmatch(r"`[a-z_.]+`", point) or process not in ("trainer", "engine"):
        raise ValueError(f"kill table: {line!r}")
    contracts = CONTRACTS if contract == "both" else (contract,)
    known = (*AFTERMATHS, UNREACHED) if process == "trainer" else ("", UNREACHED)
    if not set(contracts) <= set(CONTRACTS) or len(after) != 2 or not set(after) <= set(known):
        raise ValueError(f"kill table: {line!r}")
    return Row(point.strip("`"), process, contracts, dict(zip(PLACEMENTS, after, strict=True)))


def cases(process: str) -> list[Case]:
    """Every point of one process, by each contract and placement that reaches it."""
    return [
        Case(row.point, contract, placement, after)
        for row in rows()
        if row.process == process
        for contract in row.contracts
        for placement, after in row.after.items()
        if after != UNREACHED
    ]
