"""One line of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    SLOW = "slow"
    NO = "no"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""
