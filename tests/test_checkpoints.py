"""Checkpoint directories: what is written, what is read back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightsync import checkpoints
from weightsync.checkpoints import (
    INDEX_FILE,
    SINGLE_FILE,
    cached_checkpoint,
    load_model,
    read_header,
    read_index,
    write_checkpoint,
)
from weightsync.errors import CapacityError, ConfigError, LayoutError, MissingDependencyError
from weightsync.presets import get_preset

TINY = get_preset("tiny")
GOOD_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_file(path: Path, header: object, payload_bytes: int = 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload_bytes))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class TestWrite:
    @pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
    def test_index_is_the_preset(self, name: str, tmp_path: Path) -> None:
        preset = get_preset(name)
        write_checkpoint(preset, tmp_path / "model")
        assert [entry[:3] for entry in read_index(tmp_path / "model")] == list(preset.tensors())

    def test_same_seed_gives_same_bytes_and_another_seed_others(self, tmp_path: Path) -> None:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            write_checkpoint(TINY, tmp_path / name, seed)
        assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
        assert files_of(tmp_path / "a")[SINGLE_FILE] != files_of(tmp_path / "c")[SINGLE_FILE]

    def test_shards_hold_the_same_weights(self, tmp_path: Path) -> None:
        write_checkpoint(TINY, tmp_path / "one")
        write_checkpoint(TINY, tmp_path / "many", shard_bytes=500_000)
        one, many = read_index(tmp_path / "one"), read_index(tmp_path / "many")
        assert [entry[:3] for entry in many] == [entry[:3] for entry in one]
        files = sorted({entry.file for entry in many})
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        payload = b"".join(self.payload(tmp_path / "many" / file) for file in files)
        assert payload == self.payload(tmp_path / "one" / SINGLE_FILE)
        index = json.loads((tmp_path / "many" / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == TINY.total_bytes == len(payload)

    @staticmethod
    def payload(path: Path) -> bytes:
        content = path.read_bytes()
        return content[8 + struct.unpack("<Q", content[:8])[0] :]

    def test_weights_have_the_scale_of_the_preset(self, tmp_path: Path) -> None:
        write_checkpoint(TINY, tmp_path / "model")
        content = (tmp_path / "model" / SINGLE_FILE).read_bytes()
        for meta, _, offset in read_header(tmp_path / "model" / SINGLE_FILE):
            bits = np.frombuffer(content, np.uint16, meta.num_elements, offset)
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            is_norm = meta.name.endswith("norm.weight")
            assert values.mean() == pytest.approx(1.0 if is_norm else 0.0, abs=0.05)
            assert values.std() == pytest.approx(TINY.initializer_range, rel=0.25)

    def test_files_carry_the_pt_mark_and_aligned_weights(self, tmp_path: Path) -> None:
        write_checkpoint(TINY, tmp_path / "model")
        content = (tmp_path / "model" / SINGLE_FILE).read_bytes()
        (header_bytes,) = struct.unpack("<Q", content[:8])
        assert json.loads(content[8 : 8 + header_bytes])["__metadata__"] == {"format": "pt"}
        assert header_bytes % 8 == 0

    def test_progress_rises_to_the_total(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        write_checkpoint(TINY, tmp_path / "model", progress=lambda *state: seen.append(state))
        assert seen == sorted(seen)
        assert seen[-1] == (TINY.total_bytes, TINY.total_bytes)

    def test_again_does_nothing(self, tmp_path: Path) -> None:
        write_checkpoint(TINY, tmp_path / "model")
        seen: list[tuple[int, int]] = []
        write_checkpoint(TINY, tmp_path / "model", progress=lambda *state: seen.append(state))
        assert seen == []

    def test_an_empty_directory_may_be_filled(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        write_checkpoint(TINY, tmp_path / "model")
        assert read_index(tmp_path / "model")

    def test_something_else_is_not_overwritten(self, tmp_path: Path) -> None:
        write_checkpoint(TINY, tmp_path / "model", seed=1)
        before = files_of(tmp_path / "model")
        with pytest.raises(ConfigError, match="something other than preset 'tiny' with seed 2"):
            write_checkpoint(TINY, tmp_path / "model", seed=2)
        assert files_of(tmp_path / "model") == before

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(done_bytes: int, total_bytes: int) -> None:
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            write_checkpoint(TINY, tmp_path / "model", progress=fail)
        assert list(tmp_path.iterdir()) == []

    def test_a_lost_race_is_harmless(self, tmp_path: Path) -> None:
        inner = False

        def race(done_bytes: int, total_bytes: int) -> None:
            nonlocal inner
            if not inner:
                inner = True
                write_checkpoint(TINY, tmp_path / "model")

        write_checkpoint(TINY, tmp_path / "model", progress=race)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert [entry[:3] for entry in read_index(tmp_path / "model")] == list(TINY.tensors())

    def test_a_race_lost_to_something_else_is_an_error(self, tmp_path: Path) -> None:
        def race(done_bytes: int, total_bytes: int) -> None:
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / "mine").touch()

        with pytest.raises(ConfigError, match="something other"):
            write_checkpoint(TINY, tmp_path / "model", progress=race)
        assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]

    def test_a_full_disk_is_refused_before_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
        monkeypatch.setattr("weightsync.checkpoints.shutil.disk_usage", lambda path: usage)
        with pytest.raises(CapacityError, match=r"'tiny' needs \d+ bytes .* has 12345 "):
            write_checkpoint(TINY, tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_a_negative_seed_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="seed -1"):
            write_checkpoint(TINY, tmp_path / "model", seed=-1)


class TestCache:
    def test_is_written_once(self, tmp_path: Path) -> None:
        directory = cached_checkpoint(TINY, tmp_path)
        before = (directory / SINGLE_FILE).stat().st_mtime_ns
        assert cached_checkpoint(TINY, tmp_path) == directory
        assert (directory / SINGLE_FILE).stat().st_mtime_ns == before
        assert directory.is_relative_to(tmp_path)

    def test_seed_and_shape_have_their_own_directory(self, tmp_path: Path) -> None:
        other = dataclasses.replace(TINY, num_layers=1)
        directories = {
            cached_checkpoint(TINY, tmp_path),
            cached_checkpoint(TINY, tmp_path, seed=1),
            cached_checkpoint(other, tmp_path),
        }
        assert len(directories) == 3

    def test_threads_agree(self, tmp_path: Path) -> None:
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(cached_checkpoint(TINY, tmp_path)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        assert list(found[0].parent.iterdir()) == [found[0]]


class TestReadHeader:
    def test_other_writers_files_are_read(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        save_file = pytest.importorskip("safetensors.torch").save_file
        tensors = {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(1.0, dtype=torch.float64),
            "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
            "flag": torch.ones(2, 1, dtype=torch.bool),
            "wide": torch.zeros(5, 2, dtype=torch.bfloat16),
        }
        save_file(tensors, tmp_path / SINGLE_FILE)
        found = {name: (dtype, shape) for name, dtype, shape, _ in read_index(tmp_path)}
        assert found == {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b"{,}", "Expecting property name"),
            (b"[]", "not a JSON object"),
            (b"\xff\xfe", "utf-8"),
            (b"[" * 20_000, "recursion"),
            (b'{"a": 1, "a": 1}', "occurs twice"),
            ({"t": []}, "needs exactly dtype, shape and data_offsets"),
            ({"t": GOOD_ENTRY | {"more": 1}}, "needs exactly"),
            ({"t": GOOD_ENTRY | {"dtype": "F3"}}, "has dtype 'F3'; known: BOOL"),
            ({"t": GOOD_ENTRY | {"shape": [-2]}}, "has shape"),
            ({"t": GOOD_ENTRY | {"shape": [True]}}, "has shape"),
            ({"t": GOOD_ENTRY | {"shape": 2}}, "has shape"),
            ({"t": GOOD_ENTRY | {"data_offsets": [0]}}, "data_offsets"),
            ({"t": GOOD_ENTRY | {"data_offsets": [0, 4]}}, "needs 8 bytes"),
            ({"t": GOOD_ENTRY | {"data_offsets": [8, 16]}}, "follows a gap"),
            ({"t": GOOD_ENTRY, "u": GOOD_ENTRY}, "overlaps its predecessor"),
            ({"t": GOOD_ENTRY | {"shape": [4], "data_offsets": [0, 16]}}, "end at byte 16 of 8"),
            ({"t": GOOD_ENTRY | {"shape": [1], "data_offsets": [0, 4]}}, "end at byte 4 of 8"),
        ],
    )
    def test_bad_headers_are_refused_by_name(
        self, header: object, message: str, tmp_path: Path
    ) -> None:
        write_file(tmp_path / SINGLE_FILE, header)
        with pytest.raises(LayoutError, match=message) as caught:
            read_index(tmp_path)
        assert str(tmp_path / SINGLE_FILE) in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 2**63) + b"{}"])
    def test_bad_lengths_are_refused(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / SINGLE_FILE).write_bytes(content)
        with pytest.raises(LayoutError, match="a header of"):
            read_index(tmp_path)

    def test_a_header_above_the_limit_is_refused_unread(self, tmp_path: Path) -> None:
        with (tmp_path / SINGLE_FILE).open("wb") as file:
            file.write(struct.pack("<Q", 100_000_001))
            file.truncate(200_000_000)  # sparse: it has the length, not the blocks
        with pytest.raises(LayoutError, match="header of 100000001 bytes where 2 to 100000000"):
            read_index(tmp_path)


class TestReadIndex:
    def sharded(self, directory: Path) -> tuple[Path, dict[str, Any]]:
        write_checkpoint(TINY, directory, shard_bytes=1_000_000)
        path = directory / INDEX_FILE
        return path, json.loads(path.read_text())

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\\b", "", "..", 3])
    def test_paths_may_not_leave_the_directory(self, file: object, tmp_path: Path) -> None:
        path, index = self.sharded(tmp_path / "model")
        index["weight_map"]["model.norm.weight"] = file
        path.write_text(json.dumps(index))
        with pytest.raises(LayoutError, match=r"is not a plain file name|is missing beside it"):
            read_index(path.parent)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        path, _ = self.sharded(tmp_path / "model")
        shard = next(path.parent.glob("model-00002-*"))
        shard.unlink()
        with pytest.raises(LayoutError, match=f"{shard.name}' is missing"):
            read_index(path.parent)

    def test_a_bad_shard_is_named(self, tmp_path: Path) -> None:
        path, _ = self.sharded(tmp_path / "model")
        shard = next(path.parent.glob("model-00002-*"))
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(LayoutError, match=shard.name):
            read_index(path.parent)

    @pytest.mark.parametrize("change", ["forget", "invent", "move"])
    def test_index_and_files_must_agree(self, change: str, tmp_path: Path) -> None:
        path, index = self.sharded(tmp_path / "model")
        weight_map = index["weight_map"]
        name = "model.norm.weight"
        if change == "forget":
            del weight_map[name]
        elif change == "invent":
            name = "model.extra.weight"
            weight_map[name] = weight_map["model.norm.weight"]
        else:
            weight_map[name] = next(f for f in weight_map.values() if f != weight_map[name])
        path.write_text(json.dumps(index))
        with pytest.raises(LayoutError, match=f"disagree about '{name}'"):
            read_index(path.parent)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}'])
    def test_a_malformed_index_is_refused(self, text: str, tmp_path: Path) -> None:
        (tmp_path / INDEX_FILE).write_text(text)
        with pytest.raises(LayoutError, match=INDEX_FILE):
            read_index(tmp_path)

    def test_a_pickle_is_refused_with_what_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
            read_index(tmp_path)

    def test_nothing_there_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
            read_index(tmp_path)
        with pytest.raises(ConfigError, match="is not a directory"):
            read_index(tmp_path / "absent")


class TestLoadModel:
    @pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
    @pytest.mark.parametrize("shard_bytes", [1 << 30, 1_000_000])
    def test_loads_what_was_written(self, name: str, shard_bytes: int, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")
        load_file = pytest.importorskip("safetensors.torch").load_file
        preset = get_preset(name)
        write_checkpoint(preset, tmp_path / "model", shard_bytes=shard_bytes)
        model: Any = load_model(tmp_path / "model", "bfloat16")
        model.save_pretrained(tmp_path / "again")
        written: dict[str, Any] = {}
        for file in sorted((tmp_path / "model").glob("*.safetensors")):
            written |= load_file(file)
        saved = load_file(tmp_path / "again" / SINGLE_FILE)
        assert saved.keys() == written.keys()
        assert all(torch.equal(saved[name], written[name]) for name in written)
        assert not model.training

    def test_converts_to_the_dtype(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")
        write_checkpoint(TINY, tmp_path / "model")
        model = load_model(tmp_path / "model", torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        with pytest.raises(ConfigError, match="unknown dtype 'bf16'"):
            load_model(tmp_path / "model", "bf16")

    def test_names_that_do_not_fit_are_an_error(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        write_checkpoint(TINY, tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        config["num_hidden_layers"] = TINY.num_layers + 1
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(LayoutError, match=r"11 missing_keys \(model\.layers\.4\."):
            load_model(tmp_path / "model", "bfloat16")

    def test_a_missing_package_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def absent(name: str) -> Any:
            raise ImportError(name)

        monkeypatch.setattr("weightsync.checkpoints.importlib.import_module", absent)
        with pytest.raises(MissingDependencyError, match=r"pip install 'weightsync\[hf\]'"):
            load_model(tmp_path, "bfloat16")


def test_writing_and_listing_need_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from weightsync.checkpoints import read_index, write_checkpoint\n"
        "from weightsync.presets import get_preset\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "write_checkpoint(get_preset('tiny'), directory)\n"
        "assert read_index(directory)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()\n"
    )
    root = Path(checkpoints.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, tmp_path / "model"], cwd=root, check=True)
