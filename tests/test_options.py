"""Options as a user writes them: nonsense is refused by name, before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync import config
from weightsync.errors import ConfigError, SlowPathError
from weightsync.options import resolve_options
from weightsync.types import ContractChoice, Placement


def test_words_become_enums() -> None:
    options = resolve_options(2**20, placement="in_place", contract="direct")
    assert options.placement is Placement.IN_PLACE
    assert options.contract is ContractChoice.DIRECT


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"placement": "sideways"}, "known: staged, in_place"),
        ({"colour": "red"}, "unknown options"),
        ({"deadline_s": "5"}, "deadline_s='5'"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"lease_s": float("nan")}, "lease_s=nan"),
        ({"lease_s": True}, "lease_s=True"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"num_threads": 0}, "num_threads=0"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_options(2**20, **options)


def test_a_bucket_holds_at_least_one_unit() -> None:
    with pytest.raises(ConfigError, match="bucket of 255 B"):
        resolve_options(255)


def test_a_slow_path_is_a_warning_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    resolve_options(2**20).warn_slow("on foot")
    assert "on foot" in caplog.text
    with pytest.raises(SlowPathError, match="on foot"):
        resolve_options(2**20, strict=True).warn_slow("on foot")


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5"])
def test_a_thread_count_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEIGHTSYNC_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="WEIGHTSYNC_NUM_THREADS"):
        config.num_threads()
