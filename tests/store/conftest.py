"""Both forms in which a store keeps records: packed where that is shorter, and as earlier versions did."""

from __future__ import annotations

import pytest

from weightsync.store import payload


@pytest.fixture(params=["packed", "as they are"])
def record_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is published then: as it is now, or byte for byte as before records were packed."""
    if request.param != "packed":
        monkeypatch.setattr(payload, "MAX_PACKED_RECORD_BYTES", 0)
    return str(request.param)
