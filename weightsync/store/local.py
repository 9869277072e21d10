"""A checkpoint directory on a local disk that follows a store, whole at every instant.

``current`` is a link to a folder of safetensors that any engine loads; within it a state file says which
version it holds. A delta is decoded into a durable redo log first, then written in place; a process that
ends anywhere leaves a folder that the next one finishes or finds untouched. A full version is copied
beside it and the link moved.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from weightsync.codec import (
    Changes,
    apply_changes,
    block_digests,
    decode_tensor,
    tensor_digest,
)
from weightsync.codec.spans import Bytes
from weightsync.errors import (
    BusyError,
    IntegrityError,
    UnavailableError,
    VersionError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.store import redo
from weightsync.store.directory import Store
from weightsync.store.durable import (
    read_file,
    replace_file,
    sync_directory,
    write_durable,
)
from weightsync.store.mapped import MappedFiles
from weightsync.store.object_path import AnyPath
from weightsync.store.pieces import in_whole, share_of, take
from weightsync.store.version import (
    Identity,
    TensorEntry,
    VersionManifest,
    root_of,
)

CURRENT: Final = "current"
_STATE: Final = ".weightsync-state.json"
_REDO: Final = ".weightsync-redo"
_LOCK: Final = ".weightsync-lock"
_DATA: Final = "data-"
_COPY_BYTES: Final = 8 << 20
_MAX_STATE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class _State:
    """What the folder holds; with a ``redo_bytes`` it is on the way to what the log says."""

    run_id: str
    version: int
    root: str
    redo_bytes: int | None = None
    redo_hash: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.version, self.root)


class _Step(Enum):
    """How a way through versions ended."""

    DONE = "done"
    WAY_BROKEN = (
        "way broken"  # files of a version are missing or torn: another way, if there is one
    )
    BASE_LOST = "base lost"  # ours are not the bytes of the version that the state names


class LocalCheckpoint:
    """One such directory; opening it finishes what an ended process left. A context manager.

    One process at a time: another gets :class:`BusyError` (a lock of this host). Readers load
    ``path`` between updates; an update in place changes files that they may have mapped.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BusyError(f"{self.directory} is in use by another process") from None
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> LocalCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The folder that engines load."""
        return self.directory / CURRENT

    @property
    def state(self) -> tuple[str, Identity] | None:
        """(run, version and root) of what it holds; None if nothing."""
        state = self._read_state()
        return None if state is None else (state.run_id, state.identity)

    def pull(self, store: Store, version: int | None = None) -> Identity:
        """Bring the checkpoint to a version of the store (its newest, if not told).

        Of another run, of a higher version, of a root that the store does not know, or with bytes that
        are not its version's: starts anew from a full version. A version whose files are missing
        or torn is gone round, if there is another way. Raises :class:`UnavailableError` or
        :class:`IntegrityError` naming the file if there is none: the checkpoint is then what it
        was, or a version on the way.
        """
        wanted = store.latest() if version is None else version
        if wanted is None:
            raise UnavailableError(f"{store.path} holds no version")
        broken: dict[str, WeightSyncError] = {}
        is_base_good = True
        while True:
            have = self._base_in(store, wanted) if is_base_good else None
            try:
                way = store.route(have, wanted, without=broken)
            except UnavailableError as error:
                raise next(iter(broken.values()), error) from error
            step = self._follow(store, way, broken)
            if step is _Step.DONE:
                break
            is_base_good = step is not _Step.BASE_LOST
        found = self._read_state()
        if found is None or found.version != wanted:
            raise IntegrityError(f"{self.directory} holds {found}, expected version {wanted}")
        return found.identity

    def _base_in(self, store: Store, wanted: int) -> Identity | None:
        """What we hold, if deltas of the store may stand on it."""
        state = self._read_state()
        if state is None or state.run_id != store.run_id or state.version > wanted:
            return None
        return state.identity

    def _follow(
        self, store: Store, way: list[VersionManifest], broken: dict[str, WeightSyncError]
    ) -> _Step:
        """Take versions in order; one whose files are not what it says is put into ``broken``."""
        for manifest in way:
            try:
                store.check_files(manifest)
            except (UnavailableError, IntegrityError) as error:
                broken[manifest.file_name] = error
                return _Step.WAY_BROKEN
            if manifest.is_full:
                self._seed(store, manifest)
                continue
            try:
                self._apply(store, manifest)
            except IntegrityError as error:
                if self._is_applying():
                    raise
                if way[0].is_full:  # its base is right, as it was just seeded: the delta is not
                    broken[manifest.file_name] = error
                    return _Step.WAY_BROKEN
                warnings.warn(f"{self.directory}: starting anew: {error}", stacklevel=4)
                return _Step.BASE_LOST
        return _Step.DONE

    def _is_applying(self) -> bool:
        state = self._read_state()
        return state is not None and state.redo_bytes is not None

    def verify(self) -> Identity:
        """Digest every tensor. Raises :class:`IntegrityError` if they are not the version's."""
        state = self._read_state()
        if state is None:
            raise UnavailableError(f"{self.directory} holds no version")
        with MappedFiles(self.path, is_writable=False) as files:
            entries = [
                TensorEntry(meta, tensor_digest(block_digests(meta, files.data(meta.name))))
                for meta in files.metas
            ]
        found = root_of(entries)
        if found != state.root:
            raise IntegrityError(
                f"{self.path}: root {found}, expected {state.root} of version {state.version}; "
                "its files were changed: pull again into an empty directory"
            )
        return state.identity

    # --- a full version ---

    def _seed(self, store: Store, manifest: VersionManifest) -> None:
        folder = self.directory / f"{_DATA}{uuid.uuid4().hex[:12]}"
        folder.mkdir()
        try:
            for file in manifest.files:
                source = store.payload_path(manifest) / file.name
                copied = write_durable(folder / file.name, _pieces(source))
                if copied != (file.num_bytes, file.hash):
                    raise IntegrityError(f"{source} changed while it was read")
            state = _State(store.run_id, manifest.version, manifest.target.root)
            replace_file(folder / _STATE, _state_bytes(state))
            sync_directory(self.directory)
            reach("local.seeded")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        link = self.directory / f".{CURRENT}-{uuid.uuid4().hex}"
        link.symlink_to(folder.name)
        os.rename(link, self.path)
        sync_directory(self.directory)
        self._sweep()

    # --- a delta ---

    def _apply(self, store: Store, manifest: VersionManifest) -> None:
        state = self._read_state()
        if state is None or manifest.base != state.identity or state.run_id != store.run_id:
            raise VersionError(f"version {manifest.version} stands on {manifest.base}, not {state}")
        redo_path = self.path / _REDO
        redo_path.unlink(missing_ok=True)
        try:
            with MappedFiles(self.path, is_writable=False) as files:
                num_bytes, found = write_durable(redo_path, _redo_chunks(store, manifest, files))
        except BaseException:
            redo_path.unlink(missing_ok=True)
            raise
        sync_directory(self.path)
        reach("local.logged")
        state = _State(state.run_id, state.version, state.root, num_bytes, found)
        replace_file(self.path / _STATE, _state_bytes(state))
        reach("local.applying")
        self._finish(state)

    def _finish(self, state: _State) -> None:
        """Write what the log says, check it, and take the new label."""
        redo_path = self.path / _REDO
        redo.check_redo(redo_path, state.redo_bytes or 0, state.redo_hash)
        header, entries = redo.read_redo(redo_path)
        with MappedFiles(self.path, is_writable=True) as files:
            for tensor, changes in entries:
                apply_changes(files.data(header.touched[tensor].meta.name), changes)
                reach("local.half")
            files.sync()
            reach("local.written")
            for touched in header.touched:
                data = files.data(touched.meta.name)
                found = tensor_digest(block_digests(touched.meta, data))
                if found != touched.digest:
                    raise IntegrityError(
                        f"{touched.meta.name!r} digests to {found:016x} after writing, expected "
                        f"{touched.digest:016x}; pull again into an empty directory"
                    )
        done = _State(state.run_id, header.target.version, header.target.root)
        replace_file(self.path / _STATE, _state_bytes(done))
        reach("local.ready")
        redo_path.unlink()

    # --- what an ended process left ---

    def _recover(self) -> None:
        state = self._read_state()
        if state is not None and state.redo_bytes is not None:
            self._finish(state)
        elif state is not None:
            (self.path / _REDO).unlink(missing_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Remove folders that are not current, and links that never became so."""
        target = os.readlink(self.path) if self.path.is_symlink() else None
        for entry in self.directory.iterdir():
            if entry.name.startswith(_DATA) and entry.name != target:
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(f".{CURRENT}-"):
                entry.unlink(missing_ok=True)

    def _read_state(self) -> _State | None:
        if not self.path.is_symlink():
            return None
        data = read_file(self.path / _STATE, _MAX_STATE_BYTES)
        try:
            return _State(**json.loads(data))
        except (TypeError, ValueError) as error:
            raise IntegrityError(f"{self.path / _STATE}: {error}") from error


def _state_bytes(state: _State) -> bytes:
    return json.dumps(asdict(state)).encode()


def _pieces(path: AnyPath) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_COPY_BYTES):
                yield piece
    except FileNotFoundError:
        raise UnavailableError(f"{path} is not there") from None


def _redo_chunks(
    store: Store, manifest: VersionManifest, files: MappedFiles
) -> Iterator[bytes | memoryview]:
    """The whole log; every tensor of the version is digested on the way, changed or not."""
    if files.metas != sorted(manifest.metas, key=lambda m: m.name):
        raise IntegrityError(f"{files.folder}: its tensors are not those of the run")
    touched = [entry for entry in manifest.tensors if entry.has_records]
    header = redo.RedoHeader(
        manifest.target, tuple(redo.Touched(e.meta, e.digest) for e in touched)
    )
    yield header.to_bytes()
    place = {entry.meta.name: i for i, entry in enumerate(touched)}
    for entry in manifest.tensors:
        data = files.data(entry.meta.name)
        changes = _changes_in_pieces if entry.pieces else _changes
        for change in changes(store, manifest, entry, data):
            yield from redo.entry_chunks(place[entry.meta.name], change)
        files.forget(entry.meta.name)
    reach("local.decoded")


def _changes(
    store: Store, manifest: VersionManifest, entry: TensorEntry, data: Bytes
) -> Iterator[Changes]:
    records = store.records(manifest, entry)
    digests = block_digests(entry.meta, data)
    yield from decode_tensor(entry.meta, records, data, digests, entry.digest)


def _changes_in_pieces(
    store: Store, manifest: VersionManifest, entry: TensorEntry, data: Bytes
) -> Iterator[Changes]:
    """The same of a tensor in pieces, as changes of the whole: memory for a copy of one piece.

    That its shares are those of the result is proven here: of the whole nothing is written yet.
    """
    for (piece, part), known in zip(entry.parts(), entry.pieces, strict=True):
        held = take(entry.meta, piece.box, data)
        if part.has_records:
            held = held.copy()
        digests = block_digests(part.meta, held)
        records = store.records(manifest, part)
        for changes in decode_tensor(part.meta, records, held, digests, part.digest):
            apply_changes(held, changes)
            yield from in_whole(piece, changes)
        share = share_of(entry.meta, piece.box, held)
        if share != known.share:
            raise IntegrityError(
                f"{part.meta.name!r} would be {share:016x} of its tensor's digest, expected "
                f"{known.share:016x}"
            )
