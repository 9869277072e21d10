"""What a sender was told, checked and resolved once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weightsync import config
from weightsync.errors import ConfigError, SlowPathError
from weightsync.types import (
    BUCKET_ALIGNMENT_BYTES,
    CastPolicy,
    ContractChoice,
    PauseMode,
    Placement,
    VerifyMode,
)

_LOG = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Sizes in bytes, times in seconds. See :meth:`weightsync.Sender.connect`."""

    bucket_bytes: int
    num_threads: int
    num_slots: int = 2
    placement: Placement = Placement.STAGED
    contract: ContractChoice = ContractChoice.AUTO
    verify: VerifyMode = VerifyMode.READ_BACK
    pause_mode: PauseMode = PauseMode.RETRACT
    cast: CastPolicy = CastPolicy.FP32_TO_BF16
    strict: bool = False
    # longer than a lease: a restarted trainer waits for its old run
    connect_timeout_s: float = 60.0
    request_timeout_s: float = 60.0
    lease_s: float = 30.0
    deadline_s: float = 600.0
    commit_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < BUCKET_ALIGNMENT_BYTES:
            raise ConfigError(
                f"a bucket of {self.bucket_bytes} B is too small; at least {BUCKET_ALIGNMENT_BYTES} B"
            )
        if self.placement is Placement.DELTA:
            raise ConfigError(
                "placement 'delta' is of versions in a store (transport 'disk-delta'); a trainer that "
                "speaks to its engines places 'staged' or 'in_place'"
            )
        for name in ("num_slots", "num_threads"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}={count!r}: it must be a count of at least 1")
        for name in (
            "connect_timeout_s", "request_timeout_s", "lease_s", "deadline_s", "commit_timeout_s",
        ):  # fmt: skip
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < 7 * 86_400:
                raise ConfigError(
                    f"{name}={value!r}: it must be > 0 and less than a week (seconds)"
                )

    def warn_slow(self, message: str) -> None:
        """A slow path instead of a fast one: a warning, or an error where ``strict``."""
        if self.strict:
            raise SlowPathError(message)
        _LOG.warning(message)


_ENUMS: dict[str, type[StrEnum]] = {
    "placement": Placement,
    "contract": ContractChoice,
    "verify": VerifyMode,
    "pause_mode": PauseMode,
    "cast": CastPolicy,
}


def resolve_options(bucket_bytes: int, **options: Any) -> SenderOptions:
    """Options as a user writes them (``placement="in_place"``), checked.

    Raises :class:`ConfigError` that lists the names or values there are.
    """
    unknown = options.keys() - set(SenderOptions.__dataclass_fields__)
    if unknown:
        known = ", ".join(SenderOptions.__dataclass_fields__)
        raise ConfigError(f"unknown options {sorted(unknown)}; known: {known}")
    for name, kind in _ENUMS.items():
        if name in options:
            try:
                options[name] = kind(options[name])
            except ValueError:
                raise ConfigError(
                    f"{name}={options[name]!r}; known: {', '.join(k.value for k in kind)}"
                ) from None
    options.setdefault("num_threads", config.num_threads())
    return SenderOptions(bucket_bytes=bucket_bytes, **options)
