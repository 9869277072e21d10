"""The README's example is run as it stands: the trainer first, then the engine."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def _block(name: str, port: int) -> str:
    match = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None, f"README.md has no python block marked {name!r}"
    code = match.group(1)
    assert "127.0.0.1:30000" in code
    return code.replace("127.0.0.1:30000", f"127.0.0.1:{port}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(180)
def test_the_readme_example_updates_an_engine_that_starts_later() -> None:
    pytest.importorskip("torch")
    port = _free_port()
    trainer = subprocess.Popen(
        [sys.executable, "-c", _block("trainer", port)], stdout=subprocess.PIPE, text=True
    )
    try:
        check = "\nassert float(model[0].bias.detach().abs().max()) == 0.0\nprint('engine ends')"
        engine = subprocess.run(
            [sys.executable, "-c", _block("engine", port) + check],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        printed, _ = trainer.communicate(timeout=30)
    finally:
        trainer.kill()
        trainer.wait()
    assert engine.returncode == 0, engine.stderr
    assert "engine ends" in engine.stdout
    assert trainer.returncode == 0
    assert printed.count("committed") == 3
