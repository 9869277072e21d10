"""What ``doctor`` says of groups that broadcast, and of the ways between GPUs."""

from __future__ import annotations

import itertools
import time

from weightsync import native
from weightsync.cli.doctor_findings import Finding, Verdict
from weightsync.errors import MissingDependencyError, UnavailableError, WeightSyncError
from weightsync.packages import is_installed
from weightsync.transports import collective_gloo, nccl_binding

_COPY_BYTES = 256 * 2**20
_NUM_COPIES = 8
#: One direction of PCIe 5 x16 makes 55 GB/s: more than this comes over NVLink.
_NVLINK_BYTES_PER_S = 70e9


def group_findings() -> list[Finding]:
    """gloo for host memory, NCCL for CUDA memory: versions, settings, or why not."""
    return [_gloo(), _nccl()]


def _gloo() -> Finding:
    try:
        collective_gloo.require_gloo()
    except (MissingDependencyError, UnavailableError) as error:
        return Finding("gloo", Verdict.INFO, str(error))
    import torch

    return Finding("gloo", Verdict.OK, f"of torch {torch.__version__} (broadcast, host memory)")


def _nccl() -> Finding:
    try:
        found = nccl_binding.version_text(nccl_binding.version())
    except (MissingDependencyError, UnavailableError) as error:
        return Finding("nccl", Verdict.INFO, str(error))
    settings = ", ".join(f"{name}={value}" for name, value in nccl_binding.settings().items())
    detail = f"{found} (broadcast, CUDA memory)" + (f"; {settings}" if settings else "")
    return Finding("nccl", Verdict.OK, detail)


def pair_findings() -> list[Finding]:
    """Each way between two GPUs of this machine: whether one reaches the other's memory, and how fast."""
    if not native.has_cuda() or native.extension.cuda_num_devices() < 2:
        return []
    if not is_installed("torch"):
        return [Finding("between GPUs", Verdict.INFO, "not measured: torch is not installed")]
    pairs = itertools.permutations(range(native.extension.cuda_num_devices()), 2)
    return [_pair(source, target) for source, target in pairs]


def _pair(source: int, target: int) -> Finding:
    import torch

    what = f"gpu {source} to gpu {target}"
    try:
        reaches = torch.cuda.can_device_access_peer(target, source)
        rate = _rate(source, target)
    except (RuntimeError, WeightSyncError) as error:
        return Finding(what, Verdict.NO, str(error).partition("\n")[0])
    text = f"{rate / 1e9:.0f} GB/s by one copy"
    if not reaches:
        return Finding(
            what, Verdict.SLOW, f"{text}, through the host: no peer access",
            "ipc needs peer access between two GPUs (nvidia-smi topo -p2p r); broadcast and p2p do not",
        )  # fmt: skip
    link = "NVLink" if rate > _NVLINK_BYTES_PER_S else "PCIe"
    return Finding(what, Verdict.OK, f"{text}, peer access, {link} by its rate")


def _rate(source: int, target: int) -> float:
    """Bytes a second of the quickest of some copies."""
    import torch

    here = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        start_s = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        best_s = min(best_s, time.perf_counter() - start_s)
    return _COPY_BYTES / best_s
