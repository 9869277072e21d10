"""The page about the core: its examples run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from core_models import trained_tiny

PAGE = Path(__file__).parents[2] / "docs" / "core.md"


@pytest.mark.timeout(600)  # trains the model if nobody has yet
def test_the_examples_answer(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    known: dict[str, Any] = {"directory": trained_tiny()}
    capsys.readouterr()
    for code in examples:
        exec(compile(code, str(PAGE), "exec"), known)
    assert capsys.readouterr().out.startswith("231")
    assert known["freed"] > 0
    greedy = known["SamplingParams"](max_tokens=8, temperature=0.0)
    (output,) = known["engine"].generate("47+85=", greedy)
    assert output.token_ids == known["output"].token_ids
