"""Tokens and text: incremental decoding, stop strings, tokenizers of a directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.core import text as text_module
from engine_adapter.core.text import CharacterTokenizer, TextStream, load_tokenizer
from weightsync.errors import ConfigError, MissingDependencyError


class Bytes:
    """A token a byte: characters may take several."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@given(st.text(max_size=30))
def test_text_comes_out_whole_and_no_character_in_parts(whole: str) -> None:
    stream, seen = TextStream(Bytes()), ""
    for token in whole.encode():
        assert stream.push(token) is None
        assert stream.text.startswith(seen)
        seen = stream.text
        assert whole.startswith(seen)
    assert stream.finish() == whole


def test_a_character_that_never_ends_comes_at_the_end() -> None:
    stream = TextStream(Bytes())
    stream.push(b"a"[0])
    stream.push("é".encode()[0])
    assert stream.text == "a"
    assert stream.finish() == "a\ufffd"


def feed(text: str, *stop: str) -> tuple[str | None, str, int]:
    """Stop string, text, and how many tokens it took."""
    stream = TextStream(Bytes(), stop)
    for count, token in enumerate(text.encode(), 1):
        found = stream.push(token)
        if found is not None:
            return found, stream.finish(), count
    return None, stream.finish(), len(text)


def test_the_first_stop_string_cuts_the_text() -> None:
    assert feed("one two three", "two", "three") == ("two", "one ", 7)
    assert feed("aaab", "aab") == ("aab", "a", 4)
    assert feed("abc", "x") == (None, "abc", 3)
    assert feed("abc", "abc") == ("abc", "", 3)
    assert feed("xyz", "z", "yz") == ("yz", "x", 3)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(Bytes(), ("STOP", "ab"))
    seen = []
    for token in b"xSTayST":
        assert stream.push(token) is None
        seen.append(stream.settled)
    assert seen == ["x", "x", "x", "xST", "xSTay", "xSTay", "xSTay"]
    assert stream.finish() == "xSTayST"


def test_stop_strings_may_be_told_to_wait() -> None:
    stream = TextStream(Bytes(), ("ab",))
    assert stream.push(ord("a"), may_stop=False) is None
    assert stream.push(ord("b"), may_stop=False) is None
    assert [stream.push(ord(c)) for c in "xab"] == [None, None, "ab"]
    assert stream.text == "abx"


def test_characters(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"\n": 0, "1": 1, "+": 2}))
    tokenizer = load_tokenizer(tmp_path, begin=0)
    assert isinstance(tokenizer, CharacterTokenizer)
    assert tokenizer.encode("1+1") == [0, 1, 2, 1]
    assert tokenizer.encode("\n1") == [0, 1]
    assert tokenizer.decode([1, 2, 1, 9]) == "1+1\ufffd"
    with pytest.raises(ConfigError, match=r"no \['x'\]"):
        tokenizer.encode("1x")


def test_a_tokenizer_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("b a c") == [1, 0, 2]
    assert tokenizer.decode([1, 0]) == "b a"

    def absent(package: str) -> None:
        raise ImportError(package)

    monkeypatch.setattr(text_module.importlib, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=r"'tokenizers' is not installed .*tokenizer"):
        load_tokenizer(tmp_path)


def test_a_directory_without_one_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
