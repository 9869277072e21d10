"""What runs here: versions and hardware, for whoever reads a figure or a diagnosis later."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from weightsync import __version__, native
from weightsync.types import format_bytes

_UCX_LIMIT_S = 20.0
_ASK_UCX = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.ucp_get_version_string.restype = ctypes.c_char_p
print(library.ucp_get_version_string().decode())
"""


def versions() -> dict[str, str]:
    """Packages, CUDA, GPUs and processor, by name; what is absent is left out."""
    found = {"weightsync": __version__, "python": sys.version.split()[0]}
    for package in ("torch", "numpy", "transformers", "nixl-cu13", "nixl-cu12"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found |= _cuda_versions()
    found["platform"] = platform.platform()
    found["processor"] = _processor()
    return found


def _cuda_versions() -> dict[str, str]:
    found = {}
    if built := native.extension.cuda_version():
        found["cuda runtime"] = f"{built} (built in)"
    if driver := native.extension.cuda_driver_version():
        release = nvidia_driver()
        found["cuda driver"] = f"{driver}{f' (NVIDIA {release})' if release else ''}"
    for index in range(native.extension.cuda_num_devices() if native.has_cuda() else 0):
        found[f"gpu {index}"] = gpu(index)
    return found


def gpu(index: int) -> str:
    """A CUDA device in a line; makes no context on it."""
    name, num_bytes, major, minor = native.extension.cuda_device_info(index)
    return f"{name}, {format_bytes(num_bytes)}, sm_{major}{minor}"


def nvidia_driver() -> str:
    """The release of the kernel's driver, such as 580.159.04; empty where none is loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""


def ucx_version() -> str | None:
    """Of the UCX that comes with NIXL; asked in a process of its own, for UCX reads its settings once."""
    for package in ("nixl-cu13", "nixl-cu12"):
        with suppress(metadata.PackageNotFoundError):
            files = metadata.files(package) or []
            library = next((f for f in files if f.name.startswith("libucp")), None)
            if library is None:
                return None
            with suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(
                    [sys.executable, "-c", _ASK_UCX, str(library.locate())],
                    capture_output=True, text=True, timeout=_UCX_LIMIT_S, check=True,
                )  # fmt: skip
                return done.stdout.strip()
    return None


def network_cards() -> list[str]:
    """RDMA cards with the state of their first port, then the other interfaces that are up."""
    cards = []
    for card in sorted(_entries("/sys/class/infiniband")):
        state = _text(card / "ports/1/state").partition(":")[2].strip() or "state unknown"
        rate = _text(card / "ports/1/rate").partition("(")[0].strip()
        cards.append(f"{card.name} ({', '.join(filter(None, (state, rate)))})")
    for interface in sorted(_entries("/sys/class/net")):
        if interface.name != "lo" and _text(interface / "operstate") in ("up", "unknown"):
            cards.append(interface.name)
    return cards


def _entries(folder: str) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
