"""``weightsync doctor``: every contract is really tried, and what fails says why."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync import native
from weightsync.cli import doctor_constants, doctor_transports, versions
from weightsync.cli.doctor_findings import Finding, Verdict
from weightsync.cli.doctor_transports import devices_here, transport_findings
from weightsync.cli.main import main
from weightsync.cost.constants import Constants, read_constants
from weightsync.errors import MissingDependencyError, PeerLostError
from weightsync.transports import transport_names


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync.cli.main", "doctor", *arguments],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_transports, "_PROBE_BYTES", {"cpu": 2**20, "cuda": 2**20})


@pytest.mark.usefixtures("quick")
def test_every_contract_on_the_host_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_transports, "transport_names", lambda: ["ipc", "loopback"])
    found = {f.what: f for f in transport_findings("cpu")}
    assert list(found) == ["ipc stream", "ipc direct", "loopback stream", "loopback direct"]
    for what in ("ipc stream", "ipc direct"):
        assert found[what].verdict is Verdict.OK
        assert "GB/s by" in found[what].detail


@pytest.mark.usefixtures("quick")
def test_what_fails_or_is_missing_says_so_and_the_rest_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = doctor_transports._best_update

    def fail(name: str, contract: str, url: str, tensor: object) -> object:
        if contract == "stream":
            raise PeerLostError("the wire was cut")
        logging.getLogger("weightsync.options").warning("a slow path, because")
        return real(name, contract, url, tensor)  # type: ignore[arg-type]

    def missing(name: str) -> object:
        if name == "p2p":
            raise MissingDependencyError("nixl-cu13", "p2p", "it moves the bytes")
        return real_transport(name)

    real_transport = doctor_transports.get_transport
    monkeypatch.setattr(doctor_transports, "_best_update", fail)
    monkeypatch.setattr(doctor_transports, "get_transport", missing)
    monkeypatch.setattr(doctor_transports, "transport_names", lambda: ["ipc", "p2p"])
    stream, direct, *absent = transport_findings("cpu")
    assert stream == Finding("ipc stream", Verdict.NO, "the wire was cut")
    assert (direct.verdict, direct.remedy) == (Verdict.SLOW, "a slow path, because")
    assert [f.verdict for f in absent] == [Verdict.NO, Verdict.NO]
    assert "nixl-cu13" in absent[0].detail


@pytest.mark.parametrize("reason", ["built without CUDA", "no driver", "no device"])
def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    monkeypatch.setattr(native, "cuda_unavailable_reason", lambda: reason)
    assert devices_here(None) == ["cpu"]
    (found,) = transport_findings("cuda:0")
    assert (found.verdict, found.detail) == (Verdict.NO, reason)
    assert len(found.remedy) > 20


@pytest.mark.skipif(native.has_cuda(), reason="has a GPU")
def test_a_gpu_that_was_asked_for_and_is_not_there() -> None:
    done = _doctor("--device", "cuda")
    assert done.returncode == 2
    assert str(native.cuda_unavailable_reason()) in done.stderr


def test_versions_and_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions.versions()
    assert {"weightsync", "python", "numpy", "processor"} <= found.keys()
    assert all(isinstance(card, str) and card for card in versions.network_cards())
    monkeypatch.setattr(
        versions.Path,
        "read_text",
        lambda path: "Open Kernel Module for x86_64  580.159.04  Release",
    )
    assert versions.nvidia_driver() == "580.159.04"


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_gpu_every_contract_has_a_line_for_each_device() -> None:
    done = _doctor("--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = {f["what"]: f for f in answer["findings"]}
    for name in transport_names():
        if name == "disk-delta":
            assert f"{name} store" in found
            continue
        for contract in ("stream", "direct"):
            assert {f"{name} {contract}", f"{name} {contract} cuda:0"} <= found.keys()
    direct = found["ipc direct cuda:0"]
    assert direct["verdict"] == "ok", direct
    assert "by cuda ipc" in direct["detail"]
    assert {"gpu 0", "cuda driver"} <= answer["versions"].keys()


def test_constants_are_measured_and_written_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_constants, "_NUM_SEGMENTS", {"cpu": 8, "cuda": 8})
    path = tmp_path / "constants.json"
    assert main(["doctor", "--device", "cpu", "--constants", str(path)]) == 0
    assert "device_copy_bytes_per_s" in capsys.readouterr().out
    found, built_in = read_constants(path), Constants()
    assert found.device_copy_bytes_per_s.source.startswith(
        "measured: segment copy of 8 x 256 KiB on"
    )
    assert found.device_copy_bytes_per_s.value > 1e8
    assert found.nic_share == built_in.nic_share
    assert (
        main(["plan", "--model", "tiny-moe", "--engine-layout", "", "--constants", str(path)]) == 0
    )
