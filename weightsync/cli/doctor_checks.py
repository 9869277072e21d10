"""The checks behind ``weightsync doctor``."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import asdict
from pathlib import Path

from weightsync import native
from weightsync.cli.doctor_findings import Finding, Verdict
from weightsync.cli.doctor_groups import group_findings, pair_findings
from weightsync.cli.doctor_transports import devices_here, transport_findings
from weightsync.cli.versions import gpu, network_cards, ucx_version, versions
from weightsync.device_tables import cuda_remedy
from weightsync.memory import available_bytes
from weightsync.packages import is_installed
from weightsync.types import format_bytes

_SMALL_SHM_BYTES = 256 * 2**20


def run_doctor(*, device: str | None, is_json: bool) -> int:
    """Check, print; the exit status is 1 when no transport between processes works at all."""
    about = [*machine_findings(), *package_findings(), *group_findings(), *pair_findings()]
    if not is_json:
        _print_versions()
        _print(about)
    transports: list[Finding] = []
    for name in devices_here(device):
        found = transport_findings(name)
        if not is_json:
            _print(found)
        transports += found
    if is_json:
        rows = [{**asdict(f), "verdict": f.verdict.value} for f in (*about, *transports)]
        print(json.dumps({"findings": rows, "versions": versions()}, indent=1))
    between = [f for f in transports if not f.what.startswith("loopback")]
    return 0 if any(f.verdict in (Verdict.OK, Verdict.SLOW) for f in between) else 1


def _print_versions() -> None:
    for name, version in versions().items():
        print(f"{name:<14}{version}")
    print()


def _print(findings: list[Finding]) -> None:
    for f in findings:
        print(f"[{f.verdict.value:>4}] {f.what:<26}{f.detail}")
        if f.remedy:
            print(f"{'':33}-> {f.remedy}", flush=True)


# --- machine --------------------------------------------------------------------------------------


def machine_findings() -> list[Finding]:
    """CPU, memory, shared memory, locked memory, tracing rights, GPU."""
    info = native.build_info()
    return [
        Finding("cpu", Verdict.INFO, f"{len(os.sched_getaffinity(0))} for this process"),
        Finding("memory", Verdict.INFO, f"{format_bytes(available_bytes())} available"),
        Finding("native core", Verdict.OK, ", ".join(f"{k}: {v}" for k, v in info.items())),
        _shared_memory(),
        _locked_memory(),
        _trace_scope(),
        _network(),
        *_gpus(),
    ]


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(
            "/dev/shm", Verdict.NO, str(error), "mount a tmpfs there (p2p over shared memory)"
        )
    detail = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _SMALL_SHM_BYTES:
        return Finding(
            "/dev/shm", Verdict.SLOW, detail,
            "p2p over shared memory needs room: docker run --shm-size=1g",
        )  # fmt: skip
    return Finding("/dev/shm", Verdict.OK, detail)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", Verdict.OK, "unlimited")
    return Finding(
        "memlock", Verdict.INFO, format_bytes(soft),
        "enough on one host; NICs pin what they register: ulimit -l unlimited",
    )  # fmt: skip


def _trace_scope() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        scope = path.read_text().strip()
    except OSError:
        return Finding(
            "ptrace scope", Verdict.OK, "no yama: processes of one user may read each other"
        )
    verdict = Verdict.OK if scope in ("0", "1") else Verdict.SLOW
    remedy = (
        "" if verdict is Verdict.OK else "sysctl kernel.yama.ptrace_scope=1, or SharedArena sources"
    )
    return Finding("ptrace scope", verdict, f"{scope} (1 is cured by the trainer itself)", remedy)


def _network() -> Finding:
    cards = network_cards()
    if not cards:
        return Finding("network", Verdict.INFO, "no interface but loopback")
    has_rdma = any("(" in card for card in cards)
    note = "" if has_rdma else " (no RDMA card: p2p between machines goes over TCP)"
    return Finding("network", Verdict.INFO, f"{', '.join(cards)}{note}")


def _gpus() -> list[Finding]:
    if not native.has_cuda():
        reason = native.cuda_unavailable_reason()
        return [Finding("gpu", Verdict.INFO, f"CPU memory only: {reason}", cuda_remedy())]
    found = []
    for index in range(native.extension.cuda_num_devices()):
        uuid = native.extension.cuda_device_uuid(index).hex()
        found.append(Finding(f"gpu {index}", Verdict.OK, f"{gpu(index)}, UUID {uuid}"))
    return found


def package_findings() -> list[Finding]:
    """Optional packages and what they are for."""
    wanted = (
        ("torch", "hf", "models as sources and engines"),
        ("transformers", "hf", "bench with real models"),
        ("matplotlib", "bench", "bench --plot"),
    )
    found = []
    for package, extra, use in wanted:
        if not is_installed(package):
            remedy = f"pip install 'weightsync[{extra}]'"
            found.append(Finding(package, Verdict.INFO, f"not installed ({use})", remedy))
        else:
            found.append(Finding(package, Verdict.OK, use))
    if (ucx := ucx_version()) is not None:
        found.append(Finding("ucx", Verdict.OK, f"{ucx}, with NIXL"))
    return [*found, *_torch_cuda()]


def _torch_cuda() -> list[Finding]:
    """Whether torch's own CUDA goes with this machine; asked only where there is a GPU."""
    if not native.has_cuda() or not is_installed("torch"):
        return []
    import torch

    if torch.version.cuda is None:
        return [
            Finding(
                "torch's CUDA", Verdict.NO, "this torch was built for the CPU",
                "install a torch wheel with CUDA to hold models on the GPU",
            )
        ]  # fmt: skip
    return [Finding("torch's CUDA", Verdict.OK, torch.version.cuda)]
