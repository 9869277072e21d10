"""What ``doctor`` says of transports: each contract on each device, tried between two real processes."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightsync import native
from weightsync.cli.doctor_findings import Finding, Verdict
from weightsync.cli.doctor_peer import NAME, PeerProcess, make_tensor
from weightsync.device_tables import CPU, cuda_remedy
from weightsync.errors import UpdateFailedError, WeightSyncError
from weightsync.packages import is_installed
from weightsync.report import EngineReport
from weightsync.sender import Sender
from weightsync.transports import get_transport, transport_names
from weightsync.types import Contract, VerifyMode

_PROBE_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
_NUM_UPDATES = 4
_PEER_LIMIT_S = 120.0  # a first import of torch from a slow disk
_LIMITS = {"connect_timeout_s": 20.0, "deadline_s": 20.0, "commit_timeout_s": 20.0}


def devices_here(wanted: str | None) -> list[str]:
    """The host, and the first CUDA device where there is one; or what was asked for."""
    if wanted is not None:
        return [wanted]
    return [CPU, "cuda:0"] if native.has_cuda() else [CPU]


def transport_findings(device: str) -> list[Finding]:
    """Every transport and contract on one device, tried on an engine in a child process."""
    if device != CPU and (blocked := _blocked(device)) is not None:
        return [blocked]
    num_bytes = _PROBE_BYTES[device.partition(":")[0]]
    found = []
    try:
        with PeerProcess(device, num_bytes, _PEER_LIMIT_S) as peer:
            tensor = make_tensor(device, num_bytes, seed=1)
            for name in transport_names():
                if _is_store(name):
                    found += [_try_store(name)] if device == CPU else []
                    continue
                for contract in (Contract.STREAM, Contract.DIRECT):
                    found.append(_try(name, contract, device, peer.url, tensor))
    except WeightSyncError as error:
        found.append(Finding(f"transports {device}", Verdict.NO, str(error)))
    return found


def _blocked(device: str) -> Finding | None:
    """Why nothing can be tried on a CUDA device at all."""
    if not native.has_cuda():
        reason = str(native.cuda_unavailable_reason())
        return Finding(f"transports {device}", Verdict.NO, reason, cuda_remedy())
    if not is_installed("torch"):
        return Finding(
            f"transports {device}", Verdict.NO, "not tried: torch is not installed",
            "pip install 'weightsync[hf]'",
        )  # fmt: skip
    return None


def _try(name: str, contract: Contract, device: str, url: str, tensor: object) -> Finding:
    what = f"{name} {contract.value}" + ("" if device == CPU else f" {device}")
    try:
        have = get_transport(name).capabilities().contracts.get(contract)
    except WeightSyncError as error:
        return Finding(what, Verdict.NO, str(error))
    if have is None:
        return Finding(what, Verdict.INFO, "this transport has no such contract")
    if not have.is_usable:
        return Finding(what, Verdict.NO, have.reason, have.remedy)
    if name == "loopback":
        verdict = Verdict.OK if device == CPU else Verdict.INFO
        return Finding(what, verdict, "within one process, for tests: not tried")
    with _warnings() as warnings:
        try:
            report = _best_update(name, contract, url, tensor)
        except WeightSyncError as error:
            return Finding(what, Verdict.NO, _reason(error))
    detail = _rate(report)
    if warnings:
        return Finding(what, Verdict.SLOW, detail, "; ".join(warnings))
    return Finding(what, Verdict.OK, detail)


def _is_store(name: str) -> bool:
    try:
        return Contract.STORE in get_transport(name).capabilities().contracts
    except WeightSyncError:
        return False


def _try_store(name: str) -> Finding:
    """A version and a delta on it, written to and read from a directory of our own."""
    import numpy as np

    what, transport = f"{name} {Contract.STORE.value}", get_transport(name)
    have = transport.capabilities().contracts[Contract.STORE]
    if not have.is_usable:
        return Finding(what, Verdict.NO, have.reason, have.remedy)
    try:
        from weightsync.store.chain import chain_source, open_chain
        from weightsync.store.weights import weights_of

        array = np.arange(1 << 16, dtype=np.uint16)
        with tempfile.TemporaryDirectory(prefix="weightsync-") as directory:
            source = transport.open_store_source(directory, "doctor")
            source.publish(0, weights_of([("probe", array)]))
            array[7] ^= 1
            source.publish(1, weights_of([("probe", array)]))
            store: Any = transport.open_store_target(directory)
            (tensor,) = open_chain(chain_source(store, store.fetch(1))).tensors()
            is_same = tensor.read().tobytes() == array.tobytes()
    except (WeightSyncError, OSError) as error:
        return Finding(what, Verdict.NO, str(error))
    if not is_same:
        return Finding(what, Verdict.NO, "a version that was written came back as another one")
    return Finding(what, Verdict.OK, "a full version and a delta in a directory of this machine")


def _best_update(name: str, contract: Contract, url: str, tensor: object) -> EngineReport:
    """The update with the quickest move of a few; every one of them is verified."""
    best: EngineReport | None = None
    options: dict[str, Any] = {
        "contract": contract.value,
        "verify": VerifyMode.READ.value,
        **_LIMITS,
    }
    with Sender.connect([url], transport=name, bucket="64MiB", **options) as sender:
        for version in range(_NUM_UPDATES):
            with sender.update(version=version) as update:
                update.send({NAME: tensor})
            if update.report is None:
                raise WeightSyncError("an update ended without a report")
            (found,) = update.report.engines
            if best is None or _move_s(found) < _move_s(best):
                best = found
    if best is None:
        raise WeightSyncError("no update was made")
    return best


def _move_s(report: EngineReport) -> float:
    """As the engine saw it, without what it readied, where it says so."""
    phases = report.phases
    move_s = phases.get("engine_move", phases.get("move", 0.0))
    return max(1e-9, move_s - phases.get("engine_register", 0.0))


def _rate(report: EngineReport) -> str:
    text = f"{report.num_bytes / _move_s(report) / 1e9:.2f} GB/s by {report.path}"
    device_s = report.phases.get("engine_read_device")
    if device_s:
        text += f" ({report.num_bytes / device_s / 1e9:.0f} GB/s of the device alone)"
    return text


def _reason(error: WeightSyncError) -> str:
    """What an update failed of: the engine's own words, once."""
    if isinstance(error, UpdateFailedError) and error.__cause__ is not None:
        return str(error.__cause__)
    return str(error)


@contextmanager
def _warnings() -> Iterator[Sequence[str]]:
    """What the library warns of, kept off the terminal: it says where a slow path is taken."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()) not in kept:
                kept.append(text)

    logger, keeper = logging.getLogger("weightsync"), Keeper(logging.WARNING)
    was_propagating, logger.propagate = logger.propagate, False
    logger.addHandler(keeper)
    try:
        yield kept
    finally:
        logger.removeHandler(keeper)
        logger.propagate = was_propagating
