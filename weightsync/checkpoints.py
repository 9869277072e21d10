"""Checkpoint directories: written from a preset, listed from file headers, loaded by transformers.

A written checkpoint has the real names, shapes, dtypes and files of its model, and random
weights; the same preset and seed give the same bytes on every machine. Nothing here opens a
pickle: safetensors is the only format that is read.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import math
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np

from weightsync.errors import CapacityError, ConfigError, LayoutError, MissingDependencyError
from weightsync.presets import ModelPreset, TensorShape
from weightsync.types import ITEM_BYTES, TensorMeta, format_bytes

if TYPE_CHECKING:
    import torch

#: Called with (bytes written so far, bytes in all).
Progress = Callable[[int, int], None]

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
RECORD_FILE: Final = "weightsync.json"  # which preset and seed a written checkpoint came from
DEFAULT_SHARD_BYTES: Final = 2 << 30
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library itself

#: Raise it whenever the bytes of a written checkpoint change, so that caches are written anew.
_GENERATOR_VERSION: Final = 1
_BLOCK_ELEMENTS: Final = 8 << 20
_NORM_DEVIATION: Final = 0.1  # wide enough that neighbouring bf16 elements of a norm differ

_FILE_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }
)


class FileTensor(NamedTuple):
    """One tensor in one safetensors file; ``offset_bytes`` counts from the start of the file."""

    meta: TensorMeta
    file: str
    offset_bytes: int


class IndexEntry(NamedTuple):
    """One tensor of a checkpoint directory: torch's dtype word, and the file's plain name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


def write_checkpoint(
    preset: ModelPreset,
    directory: Path,
    seed: int = 0,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a transformers checkpoint with random bf16 weights into ``directory``.

    Streams: peak memory is a few blocks of 16 MiB, whatever the model. The directory appears
    whole or not at all; whatever is unfinished lies beside it as ``.<name>.<id>.partial``. When
    it is there already with the same preset and seed, nothing is done, so several processes
    may do this at once. Shards are cut at ``shard_bytes`` (a larger tensor has its own).

    Raises :class:`ConfigError` if ``directory`` holds anything else or ``seed`` is negative,
    and :class:`CapacityError` if the disk has too little room.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed} for preset {preset.name!r} is negative; use 0 or more")
    if _is_written(preset, seed, directory):
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise _occupied(preset, seed, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _check_free_space(preset, directory.parent)
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir()
    try:
        _write_weights(preset, partial, seed, shard_bytes, progress)
        _write_descriptions(preset, partial, seed)
        try:
            os.rename(partial, directory)
        except OSError as error:
            lost_race = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
            if not (lost_race and _is_written(preset, seed, directory)):
                raise _occupied(preset, seed, directory) if lost_race else error from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cached_checkpoint(
    preset: ModelPreset, cache_dir: Path, *, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Return the directory of the preset's checkpoint under ``cache_dir``, written once.

    Raises what :func:`write_checkpoint` raises.
    """
    digest = _digest(preset, seed)[:12]
    directory = cache_dir / "checkpoints" / f"{preset.name}-seed{seed}-{digest}"
    write_checkpoint(preset, directory, seed, progress=progress)
    return directory


def read_index(directory: Path) -> list[IndexEntry]:
    """List the tensors of a checkpoint from its safetensors headers, in file order.

    Raises what :func:`read_tensors` raises.
    """
    return [
        IndexEntry(t.meta.name, t.meta.dtype, t.meta.shape, t.file) for t in read_tensors(directory)
    ]


def read_tensors(directory: Path) -> list[FileTensor]:
    """Like :func:`read_index`, with the place of each tensor in its file.

    Reads headers only. Raises :class:`ConfigError` if the directory has no safetensors
    checkpoint, and :class:`LayoutError` that names the file if one cannot be trusted.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _read_sharded(index)
    raise _no_checkpoint(directory)


def read_header(path: Path) -> list[FileTensor]:
    """List the tensors of one safetensors file, in the order of their bytes.

    Raises :class:`LayoutError` that names the file if the header is malformed, larger than
    100 MB, or its tensors do not tile the file exactly (no overlap, no gap, none outside).
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            limit = min(MAX_HEADER_BYTES, file_bytes - 8)
            if not 2 <= header_bytes <= limit:
                raise ValueError(f"a header of {header_bytes} bytes where 2 to {limit} can be")
            header = _parse_json(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = [_file_tensor(path.name, name, entry) for name, entry in header.items()]
        # An empty tensor shares its offset with its successor: sort it first.
        tensors.sort(key=lambda t: (t.offset_bytes, t.meta.num_bytes))
        _check_tiling(tensors, file_bytes - 8 - header_bytes)
    except (ValueError, RecursionError) as error:
        raise LayoutError(
            f"{path}: not a safetensors file that can be trusted: {error}; "
            "write or download it again"
        ) from error
    start = 8 + header_bytes
    return [t._replace(offset_bytes=start + t.offset_bytes) for t in tensors]


def load_model(directory: Path, dtype: str | torch.dtype) -> torch.nn.Module:
    """Load a checkpoint directory as a transformers causal language model, in eval mode.

    ``dtype`` is a torch dtype or its word, e.g. ``"bfloat16"``. Never uses the network.
    Raises :class:`MissingDependencyError` without torch and transformers, what
    :func:`read_index` raises, and :class:`LayoutError` if checkpoint and configuration
    disagree about a tensor.
    """
    dtypes = _require("torch")
    _require("safetensors")
    transformers = _require("transformers")
    read_index(directory)
    if isinstance(dtype, str):
        if dtype not in ITEM_BYTES:
            raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}")
        dtype = getattr(dtypes, dtype)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise LayoutError(f"{directory}: tensors do not fit config.json: {_shortened(wrong)}")
    loaded: torch.nn.Module = model
    return loaded


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package, "hf", "needed to load a checkpoint") from error


def _shortened(wrong: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in wrong.items()
    )


def _digest(preset: ModelPreset, seed: int) -> str:
    identity = [_GENERATOR_VERSION, seed, preset.config(), list(preset.tensors())]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _is_written(preset: ModelPreset, seed: int, directory: Path) -> bool:
    try:
        record = json.loads((directory / RECORD_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("digest") == _digest(preset, seed)


def _occupied(preset: ModelPreset, seed: int, directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} holds something other than preset {preset.name!r} with seed {seed}; "
        "remove it or choose another directory"
    )


def _check_free_space(preset: ModelPreset, parent: Path) -> None:
    num_tensors = sum(1 for _ in preset.tensors())
    needed_bytes = preset.total_bytes + 512 * num_tensors + (1 << 20)  # headers, index, config
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise CapacityError(
            f"preset {preset.name!r} needs {needed_bytes} bytes ({format_bytes(needed_bytes)}) in "
            f"{parent}, which has {free_bytes} ({format_bytes(free_bytes)}) free; "
            "make room or choose another directory"
        )


def _write_weights(
    preset: ModelPreset, directory: Path, seed: int, shard_bytes: int, progress: Progress | None
) -> None:
    shards = _cut_shards(preset.tensors(), shard_bytes)
    total_bytes, done_bytes = preset.total_bytes, 0
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = SINGLE_FILE if len(shards) == 1 else name
        weight_map |= {tensor: name for tensor, _, _ in tensors}
        with (directory / name).open("wb") as file:
            write_header(file, tensors)
            for tensor, _, shape in tensors:
                for block in _random_bits(preset, tensor, math.prod(shape), seed):
                    file.write(block.data)
                    done_bytes += block.nbytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(directory / INDEX_FILE, index)


def _cut_shards(tensors: Iterator[TensorShape], shard_bytes: int) -> list[list[TensorShape]]:
    shards: list[list[TensorShape]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        num_bytes = TensorMeta(*tensor).num_bytes
        if shards[-1] and used_bytes + num_bytes > shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(tensor)
        used_bytes += num_bytes
    return shards


def write_header(file: BinaryIO, tensors: Sequence[TensorShape]) -> None:
    """The header of a safetensors file whose tensors follow without gaps, in this order.

    Raises :class:`LayoutError` for a dtype that the format has no word for.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    words = {word: code for code, word in _FILE_DTYPES.items()}
    start = 0
    for name, dtype, shape in tensors:
        if dtype not in words:
            raise LayoutError(f"{name!r}: safetensors files have no dtype {dtype!r}")
        stop = start + TensorMeta(name, dtype, shape).num_bytes
        header[name] = {"dtype": words[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the weights start 8-byte aligned
    file.write(struct.pack("<Q", len(text)) + text)


def _random_bits(
    preset: ModelPreset, name: str, num_elements: int, seed: int
) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Yield the bits of normally distributed bf16 elements; they depend on seed and name only.

    Each element is one of 65,536 quantiles, drawn by 16 random bits: as fast as the disk.
    """
    is_norm = name.endswith("norm.weight")
    centre, deviation = (1.0, _NORM_DEVIATION) if is_norm else (0.0, preset.initializer_range)
    quantiles = _quantile_bits(centre, deviation)
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    generator = np.random.SFC64(np.random.SeedSequence([seed, key]))
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        count = min(_BLOCK_ELEMENTS, num_elements - start)
        draws = np.asarray(generator.random_raw((count + 3) // 4)).view(np.uint16)
        yield quantiles[draws[:count]]


@lru_cache(maxsize=8)
def _quantile_bits(centre: float, deviation: float) -> np.ndarray[Any, np.dtype[np.uint16]]:
    normal = NormalDist(centre, deviation)
    values = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # to nearest even
    return rounded.astype(np.uint16)


def _write_descriptions(preset: ModelPreset, directory: Path, seed: int) -> None:
    _write_json(directory / "config.json", preset.config())
    ends = {"bos_token_id": preset.bos_token_id, "eos_token_id": preset.eos_token_id}
    _write_json(directory / "generation_config.json", ends)
    record = {"preset": preset.name, "seed": seed, "digest": _digest(preset, seed)}
    _write_json(directory / RECORD_FILE, record)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _no_checkpoint(directory: Path) -> ConfigError:
    if not directory.is_dir():
        return ConfigError(f"checkpoint {directory} is not a directory; give one that exists")
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        return ConfigError(
            f"{directory} holds weights only as {pickles[0]}, a pickle, which could run any code; "
            "convert it where you trust it: transformers' save_pretrained writes safetensors"
        )
    return ConfigError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
        "give a Hugging Face checkpoint directory"
    )


def _read_sharded(index: Path) -> list[FileTensor]:
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError(f"larger than {MAX_HEADER_BYTES} bytes")
        weight_map = _parse_json(index.read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("no weight_map")
        for file in weight_map.values():
            # A path from a file must not lead out of its directory.
            if not isinstance(file, str) or Path(file).name != file or "\\" in file:
                raise ValueError(f"{file!r} is not a plain file name")
            if not (index.parent / file).is_file():
                raise ValueError(f"{file!r} is missing beside it")
        files = sorted(set(weight_map.values()))
        tensors = [tensor for file in files for tensor in read_header(index.parent / file)]
        held = {tensor.meta.name: tensor.file for tensor in tensors}
        if held != weight_map or len(held) != len(tensors):
            odd = sorted(held.items() ^ weight_map.items()) or sorted(held.items())
            raise ValueError(f"it and the files disagree about {odd[0][0]!r} ({odd[0][1]})")
    except LayoutError:
        raise
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{index}: not an index that can be trusted: {error}") from error
    return tensors


def _parse_json(text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise ValueError("a name occurs twice")
        return content

    content = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _file_tensor(file: str, name: str, entry: object) -> FileTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} needs exactly dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if entry["dtype"] not in _FILE_DTYPES:
        known = ", ".join(_FILE_DTYPES)
        raise ValueError(f"{name!r} has dtype {entry['dtype']!r}; known: {known}")
    meta = TensorMeta(name, _FILE_DTYPES[entry["dtype"]], tuple(shape))
    if offsets[1] - offsets[0] != meta.num_bytes:
        raise ValueError(f"{name!r} needs {meta.num_bytes} bytes but has data_offsets {offsets}")
    return FileTensor(meta, file, offsets[0])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_tiling(tensors: Sequence[FileTensor], payload_bytes: int) -> None:
    end = 0
    for tensor in tensors:
        if tensor.offset_bytes != end:
            kind = "overlaps its predecessor" if tensor.offset_bytes < end else "follows a gap"
            raise ValueError(f"{tensor.meta.name!r} {kind} at byte {tensor.offset_bytes}")
        end += tensor.meta.num_bytes
    if end != payload_bytes:
        raise ValueError(f"its tensors end at byte {end} of {payload_bytes} after the header")
