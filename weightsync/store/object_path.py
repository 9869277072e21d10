"""A place in an object store, by fsspec, with what a store needs of a path.

Objects are whole or not there, listings are consistent, and a key can be created if it does not exist: so
a manifest is created by a conditional put where a file system links one. There are no directories, no
renames and no fsync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weightsync.errors import (
    ConfigError,
    IntegrityError,
    MissingDependencyError,
    UnavailableError,
)

_SCHEME: Final = "://"


@dataclass(frozen=True)
class ObjectStat:
    """What is asked of a file's status."""

    st_size: int
    st_mtime: float

    @property
    def st_mtime_ns(self) -> int:
        return int(self.st_mtime * 1e9)


class ObjectPath:
    """``url`` is fsspec's, such as ``s3://bucket/prefix``. The subset of :class:`pathlib.Path` that stores
    use; settings (endpoint, keys) are those of fsspec's own environment and files."""

    def __init__(self, url: str, system: Any = None) -> None:
        self.url = url.rstrip("/")
        self._system = _system_of(url) if system is None else system

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        dot = self.name.rfind(".")
        return self.name[dot:] if dot > 0 else ""

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rsplit("/", 1)[0], self._system)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}", self._system)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"ObjectPath({self.url!r})"

    def __lt__(self, other: ObjectPath) -> bool:
        return self.url < other.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    # --- looking ------------------------------------------------------------------------------------

    def iterdir(self) -> Iterator[ObjectPath]:
        with _named("listing", self):
            self._system.invalidate_cache()
            try:
                entries = self._system.ls(self.url, detail=True)
            except FileNotFoundError:
                return
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            if name and name != self.name:
                yield self / name

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Of names in this place; ``pattern`` is a beginning and ``*``."""
        stem = pattern.removesuffix("*")
        return (entry for entry in self.iterdir() if entry.name.startswith(stem))

    def is_dir(self) -> bool:
        with _named("looking at", self):
            self._system.invalidate_cache()
            return bool(self._system.isdir(self.url))

    def is_file(self) -> bool:
        with _named("looking at", self):
            return bool(self._system.isfile(self.url))

    def exists(self) -> bool:
        with _named("looking at", self):
            self._system.invalidate_cache()
            return bool(self._system.exists(self.url))

    def stat(self) -> ObjectStat:
        with _named("looking at", self):
            self._system.invalidate_cache()
            found = self._system.info(self.url)
            changed = found.get("LastModified") or found.get("created") or found.get("mtime")
            time_s = changed.timestamp() if hasattr(changed, "timestamp") else float(changed or 0.0)
            return ObjectStat(int(found.get("size") or 0), time_s)

    # --- reading -----------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """To read, with ``seek`` and ``readinto``."""
        if mode != "rb":
            raise ConfigError(f"{self}: objects are written whole, not opened to {mode!r}")
        with _named("opening", self):
            return self._system.open(self.url, "rb", cache_type="readahead", block_size=8 << 20)

    def read_bytes(self) -> bytes:
        with _named("reading", self):
            return bytes(self._system.cat_file(self.url))

    def read_at(self, offset_bytes: int, num_bytes: int) -> bytes:
        """A part, in one request. Raises :class:`IntegrityError` if the object ends early."""
        if not num_bytes:
            return b""
        with _named("reading", self):
            end = offset_bytes + num_bytes
            found = bytes(self._system.cat_file(self.url, start=offset_bytes, end=end))
        if len(found) != num_bytes:
            raise IntegrityError(f"{self} ends early, at {offset_bytes + len(found)} bytes")
        return found

    # --- writing -----------------------------------------------------------------------------------

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there when something is in it."""

    def write(self, put: Callable[[Any], None]) -> None:
        """``put`` writes to a file; the object appears whole when it returns, or not at all."""
        with _named("writing", self):
            file = self._system.open(self.url, "wb", block_size=64 << 20)
            try:
                put(file)
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(AttributeError):
                    file.closed = True  # closing would complete the upload of a part
                with contextlib.suppress(Exception):  # some systems show it from the beginning
                    self._system.rm_file(self.url)
                raise
            file.close()

    def create(self, data: bytes) -> bool:
        """Make it appear with ``data`` if it is not there; whether it was not."""
        with _named("creating", self):
            try:
                self._system.pipe_file(self.url, data, mode="create")
            except FileExistsError:
                return self.read_bytes() == data  # an answer was lost: what is there is ours
            except OSError:
                if not self.exists():
                    raise
                return self.read_bytes() == data  # refused in words that fsspec does not know
            return True

    def put(self, data: bytes) -> None:
        """In place of whatever is there."""
        with _named("writing", self):
            self._system.pipe_file(self.url, data)

    def touch(self, exist_ok: bool = True) -> None:
        self.put(b"\n")

    def unlink(self, missing_ok: bool = False) -> None:
        with _named("removing", self):
            try:
                self._system.rm_file(self.url)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove_tree(self) -> None:
        """Everything below."""
        with contextlib.suppress(FileNotFoundError), _named("removing", self):
            self._system.invalidate_cache()
            self._system.rm(self.url, recursive=True)


AnyPath = Path | ObjectPath


def place_of(location: object) -> Any:
    """A :class:`Path`, or an :class:`ObjectPath` for what has a scheme (``s3://...``).

    Raises :class:`MissingDependencyError` without fsspec or its package for the scheme.
    """
    if isinstance(location, ObjectPath):
        return location
    text = str(location)
    return ObjectPath(text) if _SCHEME in text else Path(text)


def _system_of(url: str) -> Any:
    scheme = url.partition(_SCHEME)[0]
    try:
        import fsspec
    except ImportError as error:
        raise MissingDependencyError("fsspec", "object", f"it reaches {scheme} stores") from error
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:  # names the package
        raise MissingDependencyError(str(error), "object", f"it reaches {scheme} stores") from error
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from error


@contextlib.contextmanager
def _named(what: str, path: ObjectPath) -> Iterator[None]:
    """What a store's client raises becomes ours; what is missing stays ``FileNotFoundError``."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise UnavailableError(f"{what} {path}: {error}") from error
    except Exception as error:
        name = type(error).__module__.partition(".")[0]
        if name in ("botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs"):
            raise UnavailableError(f"{what} {path}: {type(error).__name__}: {error}") from error
        raise


__all__ = ["AnyPath", "ObjectPath", "ObjectStat", "place_of"]
