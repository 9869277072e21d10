"""Files that are whole or not there, on any shared file system.

Write to a name of one's own, fsync, then rename or link, then fsync the directory. Errors of a full disk
may come as late as close; all of them are :class:`CapacityError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from weightsync.errors import (
    BusyError,
    CapacityError,
    IntegrityError,
    MissingDependencyError,
    UnavailableError,
)
from weightsync.store.object_path import AnyPath, ObjectPath

PARTIAL: Final = ".partial-"
_CHUNK_BYTES: Final = 8 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STALE_TRIES: Final = 3

Data = bytes | memoryview


@contextlib.contextmanager
def named_errors(what: str, path: AnyPath) -> Iterator[None]:
    """Says what was tried on which file; a full disk becomes :class:`CapacityError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise CapacityError(
                error.errno, f"{what} {path}: {os.strerror(error.errno)}; free some space"
            ) from error
        raise


def sync_directory(path: AnyPath) -> None:
    """Makes the names in a directory durable."""
    if isinstance(path, ObjectPath):
        return  # an object that was put is durable
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durable(path: AnyPath, chunks: Iterable[Data]) -> tuple[int, str]:
    """Write a file that nobody looks at yet; returns its bytes and its hash."""
    hasher, num_bytes = new_hasher(), 0

    def put(file: Any) -> None:
        nonlocal num_bytes
        for chunk in chunks:
            file.write(chunk)
            hasher.update(chunk)
            num_bytes += len(chunk)

    if isinstance(path, ObjectPath):
        path.write(put)
        return num_bytes, hasher.hexdigest()
    with named_errors("writing", path), path.open("xb") as file:
        put(file)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes, hasher.hexdigest()


def replace_file(path: AnyPath, data: Data) -> None:
    """Put ``data`` in place of whatever ``path`` holds, at one instant, durably."""
    if isinstance(path, ObjectPath):
        path.put(bytes(data))
        return
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    try:
        write_durable(partial, [data])
        os.rename(partial, path)
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def create_file(path: AnyPath, data: Data, before: Callable[[], None] = lambda: None) -> None:
    """Make ``path`` appear whole and durable; ``before`` is called right before it does.

    Raises :class:`BusyError` if it is there already: somebody else was first.
    """
    if isinstance(path, ObjectPath):
        before()
        if not path.create(bytes(data)):
            raise BusyError(f"{path} was published by somebody else meanwhile")
        return
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    try:
        write_durable(partial, [data])
        before()
        try:
            os.link(partial, path)
        except FileExistsError:
            raise BusyError(f"{path} was published by somebody else meanwhile") from None
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_file(path: AnyPath, limit_bytes: int) -> bytes:
    """All of a small file, by opening it (a network file system's stat may be stale).

    Raises :class:`UnavailableError` if it is not there, :class:`IntegrityError` above the limit.
    """
    for attempt in range(_STALE_TRIES):
        try:
            with path.open("rb") as file:
                data = file.read(limit_bytes + 1)
        except FileNotFoundError:
            raise UnavailableError(f"{path} is not there") from None
        except OSError as error:
            if error.errno != errno.ESTALE or attempt + 1 == _STALE_TRIES:
                raise
            continue
        if len(data) > limit_bytes:
            raise IntegrityError(f"{path} is larger than {limit_bytes} bytes")
        return data
    raise UnavailableError(f"{path} stays stale")


def withdraw_file(path: AnyPath, name: str) -> None:
    """Give a file another name beside it, as of now."""
    if isinstance(path, ObjectPath):
        (path.parent / name).put(path.read_bytes())  # the new name first: its number stays taken
        path.unlink(missing_ok=True)
        return
    os.utime(path)  # the age under its new name begins now
    os.rename(path, path.with_name(name))


def remove_tree(path: AnyPath) -> None:
    """Everything below a folder; what cannot be removed stays."""
    if isinstance(path, ObjectPath):
        path.remove_tree()
    else:
        shutil.rmtree(path, ignore_errors=True)


def new_hasher() -> Any:
    """xxh3-128, incremental. Raises :class:`MissingDependencyError`."""
    try:
        import xxhash
    except ImportError as error:
        raise MissingDependencyError("xxhash", "delta", "files are checked by xxh3-128") from error
    return xxhash.xxh3_128()


def hash_file(path: AnyPath) -> tuple[int, str]:
    """Bytes and hash of a file, read in pieces. Raises :class:`UnavailableError` if it is not there."""
    hasher, num_bytes = new_hasher(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
                num_bytes += len(chunk)
    except FileNotFoundError:
        raise UnavailableError(f"{path} is not there") from None
    return num_bytes, hasher.hexdigest()
