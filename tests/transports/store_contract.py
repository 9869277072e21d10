"""What every store must do: versions that are visible whole, in order, and never change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from weightsync.errors import UnavailableError, WeightSyncError
from weightsync.transports import get_transport
from weightsync.transports.base import StoreSource, StoreTarget
from weightsync.types import Contract


class StoreContract(ABC):
    """Inherited by the test of each transport with the store contract."""

    transport = ""

    @abstractmethod
    def payload(self, version: int) -> Any:
        """What is published as that version."""

    @abstractmethod
    def read(self, target: StoreTarget, way: Any) -> dict[str, bytes]:
        """The bytes that a way leads to, starting from nothing."""

    @abstractmethod
    def expected(self, version: int) -> dict[str, bytes]:
        """The bytes of a version."""

    def ends(self, directory: Path) -> tuple[StoreSource, StoreTarget]:
        transport = get_transport(self.transport)
        source = transport.open_store_source(str(directory), "run")
        return source, transport.open_store_target(str(directory), "run")

    def test_it_says_what_it_can(self) -> None:
        have = get_transport(self.transport).capabilities()
        assert have.contracts[Contract.STORE].is_usable
        assert have.is_usable

    def test_there_is_nothing_before_the_first_version(self, tmp_path: Path) -> None:
        _, target = self.ends(tmp_path)
        assert target.latest() is None
        with pytest.raises(WeightSyncError):
            target.fetch(0)
        with pytest.raises(UnavailableError):
            get_transport(self.transport).open_store_target(str(tmp_path / "none"))

    def test_every_version_can_be_fetched(self, tmp_path: Path) -> None:
        source, target = self.ends(tmp_path)
        for version in (0, 1, 3):
            source.publish(version, self.payload(version))
            assert target.latest() == version
        for version in (0, 1, 3):
            assert self.read(target, target.fetch(version)) == self.expected(version)

    def test_from_the_version_before_the_way_is_shorter(self, tmp_path: Path) -> None:
        source, target = self.ends(tmp_path)
        first = source.publish(0, self.payload(0))
        source.publish(1, self.payload(1))
        assert len(target.fetch(1, first.target)) < len(target.fetch(1))
        assert not target.fetch(0, first.target)

    def test_nothing_is_visible_before_the_commit(self, tmp_path: Path) -> None:
        source, target = self.ends(tmp_path)
        source.publish(0, self.payload(0))
        payload = self.payload(1)
        pending = source.encode(1, payload)
        assert target.latest() == 0
        for weight in payload.values():  # may change from here on
            weight.data[:] = 0
        source.commit(pending)
        assert self.read(target, target.fetch(1)) == self.expected(1)

    def test_numbers_only_rise(self, tmp_path: Path) -> None:
        source, target = self.ends(tmp_path)
        source.publish(4, self.payload(0))
        for version in (4, 3):
            with pytest.raises(WeightSyncError):
                source.publish(version, self.payload(1))
        assert target.latest() == 4
        assert self.read(target, target.fetch(4)) == self.expected(0)

    def test_a_second_publisher_does_not_overwrite(self, tmp_path: Path) -> None:
        source, target = self.ends(tmp_path)
        other, _ = self.ends(tmp_path)
        pending = other.encode(0, self.payload(1))
        source.publish(0, self.payload(0))
        with pytest.raises(WeightSyncError):
            other.commit(pending)
        assert self.read(target, target.fetch(0)) == self.expected(0)

    def test_there_is_no_live_peer(self) -> None:
        transport = get_transport(self.transport)
        with pytest.raises(UnavailableError, match="no live peer"):
            transport.open_source()


def test_transports_between_peers_keep_no_versions() -> None:
    for name in ("ipc", "loopback"):
        with pytest.raises(UnavailableError, match="keeps no versions"):
            get_transport(name).open_store_source("/nowhere", "run")
        with pytest.raises(UnavailableError, match="keeps no versions"):
            get_transport(name).open_store_target("/nowhere")
