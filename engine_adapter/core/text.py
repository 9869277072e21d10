"""Tokens to text and back, and the strings that end a request."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from weightsync.errors import ConfigError, MissingDependencyError

_UNFINISHED = "\ufffd"  # what a decoder writes for part of a character


class Tokenizer(Protocol):
    """What the engine needs of one."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with whatever the model wants at the beginning."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        ...


class CharacterTokenizer:
    """A token a character. ``begin`` is put before a text that does not begin with it."""

    def __init__(self, vocabulary: dict[str, int], begin: int | None) -> None:
        self._ids = vocabulary
        self._characters = {token: character for character, token in vocabulary.items()}
        self._begin = begin

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ConfigError(
                f"the model's alphabet has no {unknown}; it has {''.join(self._ids)!r}"
            )
        ids = [self._ids[character] for character in text]
        return ids if self._begin is None or ids[:1] == [self._begin] else [self._begin, *ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._characters.get(token, _UNFINISHED) for token in token_ids)


class _FastTokenizer:
    """A ``tokenizer.json``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))


class _TransformersTokenizer:
    """Any other tokenizer that transformers knows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(directory: Path, begin: int | None = None) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has none.

    ``tokenizer.json`` needs the package ``tokenizers``, other Hugging Face tokenizers
    ``transformers``; a ``vocab.json`` of single characters needs neither and puts the token
    ``begin`` first. Raises :class:`MissingDependencyError`.
    """
    if (directory / "tokenizer.json").is_file():
        package = _import("tokenizers")
        return _FastTokenizer(package.Tokenizer.from_file(str(directory / "tokenizer.json")))
    vocabulary = directory / "vocab.json"
    if vocabulary.is_file() and not (directory / "merges.txt").is_file():
        entries = json.loads(vocabulary.read_text(encoding="utf-8"))
        if all(len(key) == 1 for key in entries):
            return CharacterTokenizer(entries, begin)
    if (directory / "tokenizer_config.json").is_file():
        return _TransformersTokenizer(
            _import("transformers").AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True
            )
        )
    return None


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package, "hf", "it reads the model's tokenizer") from error


class TextStream:
    """The text of one sample as its tokens come, and the first stop string in it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: a token's text depends on those before it
        self._num_read = 0  # tokens whose text is in ``text``
        self.text = ""  # cut before the stop string, once there is one

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completed."""
        self._ids.append(token)
        before = len(self.text)
        self._read(is_last=False)
        if not may_stop:
            return None
        return self._cut(max(0, before - self._longest_stop + 1))

    def finish(self) -> str:
        """The whole text, with what was held back as part of a character."""
        self._read(is_last=True)
        return self.text

    @property
    def settled(self) -> str:
        """Text that no later token can cut: all but the beginnings of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return self.text[:-length]
        return self.text

    def _read(self, *, is_last: bool) -> None:
        if self._num_read == len(self._ids):
            return
        known = self._tokenizer.decode(self._ids[self._context : self._num_read])
        found = self._tokenizer.decode(self._ids[self._context :])
        if found.endswith(_UNFINISHED) and not is_last:
            return
        self.text += found[len(known) :]
        self._context, self._num_read = self._num_read, len(self._ids)

    def _cut(self, start: int) -> str | None:
        places = [(self.text.find(stop, start), stop) for stop in self._stop]
        hits = [(place, stop) for place, stop in places if place >= 0]
        if not hits:
            return None
        place, stop = min(hits)
        self.text = self.text[:place]
        self._num_read = len(self._ids)  # nothing comes after it
        return stop
