"""The page about the core: its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from core_models import trained_tiny

PAGE = Path(__file__).parents[2] / "docs" / "core.md"


@pytest.mark.timeout(600)  # trains the model if nobody has yet
def test_the_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    directory = trained_tiny()
    capsys.readouterr()
    exec(compile(code, str(PAGE), "exec"), {"directory": directory})
    assert capsys.readouterr().out.startswith("231")
