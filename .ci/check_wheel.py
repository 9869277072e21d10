"""A wheel with CUDA code must import where there is neither a driver nor a CUDA library.

python .ci/check_wheel.py dist/weightsync-*.whl
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROGRAM = """
from weightsync import native
version = native.extension.cuda_version()
assert version, "the extension was built without CUDA"
print(f"CUDA {version} is built in; usable here: {native.has_cuda()} ({native.cuda_unavailable_reason()})")
"""


def main(argv: list[str]) -> int:
    (wheel,) = argv
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (extension,) = Path(folder, "weightsync").glob("_native*.so")
        linked = subprocess.run(
            ["ldd", extension], capture_output=True, text=True, check=True
        ).stdout
        if found := [line for line in linked.splitlines() if "cuda" in line or "torch" in line]:
            print(f"{wheel} is linked to what may be absent: {found}", file=sys.stderr)
            return 1
        size = extension.stat().st_size
        env = {**os.environ, "PYTHONPATH": folder, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=folder, check=False)
        print(f"{wheel}: the extension has {size / 1e6:.1f} MB")
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
