"""Tensors coded in pieces: the boxes, the manifest that lists them, and everything that reads it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.helpers import (
    contents,
    held,
    in_pieces,
    metas,
    published,
    published_in_pieces,
)
from weightsync.cli.main import main
from weightsync.codec import (
    Variant,
    apply_changes,
    block_digests,
    decode_tensor,
    encode_tensor,
    tensor_digest,
)
from weightsync.errors import ConfigError, IntegrityError, LayoutError
from weightsync.layout import Layout
from weightsync.native_delta import SPAN_ELEMENTS
from weightsync.store import Cut, LocalCheckpoint, Publisher, Store, collect, fold
from weightsync.store.cutting import Cutter
from weightsync.store.pieces import (
    MAX_PIECES,
    Piece,
    check_tiling,
    first_byte,
    in_whole,
    put,
    share_of,
    take,
)
from weightsync.store.version import VersionManifest, _canonical, _hash
from weightsync.types import Box, TensorMeta

# --- boxes --------------------------------------------------------------------------------------------


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[TensorMeta, list[Box]]:
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int64", "bool"]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    meta = TensorMeta("t", dtype, shape)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):  # cut one of them in two, anywhere
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.shape[dim] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        low = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
        high = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
        boxes += [low, high]
    return meta, boxes


@given(cut_tensors(), st.integers(0, 2**32), st.sampled_from(list(Variant)))
@settings(max_examples=80, deadline=None)
def test_any_pieces_of_any_tensor_go_round(
    tensor: tuple[TensorMeta, list[Box]], seed: int, variant: Variant
) -> None:
    """Coded piece by piece, decoded either into the piece or as changes of the whole."""
    meta, boxes = tensor
    check_tiling(meta, boxes)
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, meta.num_bytes, dtype=np.uint8)
    new = np.where(rng.random(old.size) < 0.1, rng.integers(0, 256, old.size), old).astype(np.uint8)
    found, scattered, shares = old.copy(), old.copy(), 0
    for box in boxes:
        piece = Piece(meta, box)
        before, after = take(meta, box, old).copy(), take(meta, box, new)
        digests = block_digests(piece.meta, before)
        records = encode_tensor(piece.meta, before, after, digests.copy(), variant=variant)
        coded = [(place, np.frombuffer(record, dtype=np.uint8)) for place, record in records]
        expected = tensor_digest(block_digests(piece.meta, np.ascontiguousarray(after)))
        for changes in list(decode_tensor(piece.meta, coded, before, digests, expected)):
            apply_changes(before, changes)
            for change in in_whole(piece, changes):
                apply_changes(scattered, change)
        put(meta, box, found, before)
        shares += share_of(meta, box, after)
    assert np.array_equal(found, new)
    assert np.array_equal(scattered, new)
    assert shares % (1 << 64) == tensor_digest(block_digests(meta, new))


def test_changes_of_a_piece_reach_over_spans_of_the_whole() -> None:
    rows, columns = 3, SPAN_ELEMENTS // 2 + 5
    meta = TensorMeta("wide", "float8_e4m3fn", (rows, columns))
    piece = Piece(meta, Box((0, 7), (rows, columns)))
    old = np.zeros(meta.num_bytes, dtype=np.uint8)
    new = old.copy()
    at = np.array([7, columns - 1, columns + 7, SPAN_ELEMENTS, 2 * columns + 9, 3 * columns - 1])
    new[at] = np.arange(1, 7)
    before, after = take(meta, piece.box, old), take(meta, piece.box, new)
    digests = block_digests(piece.meta, before)
    records = encode_tensor(piece.meta, before, after, digests.copy())
    coded = [(place, np.frombuffer(record, dtype=np.uint8)) for place, record in records]
    for changes in decode_tensor(piece.meta, coded, before, digests):
        for change in in_whole(piece, changes):
            apply_changes(old, change)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (((0, 0, 0), (4, 5, 6)), 0),
        (((1, 0, 0), (3, 5, 6)), 60),
        (((2, 1, 0), (3, 4, 6)), 132),
        (((2, 3, 2), (3, 4, 5)), 160),
        (((0, 1, 0), (2, 2, 6)), None),
        (((0, 0, 0), (1, 2, 5)), None),
    ],
)
def test_a_box_that_is_one_run_of_bytes_is_not_copied(box: Any, expected: int | None) -> None:
    meta = TensorMeta("t", "bfloat16", (4, 5, 6))
    data = np.arange(240, dtype=np.uint8)
    assert first_byte(meta, Box(*box)) == expected
    part = take(meta, Box(*box), data)
    assert np.shares_memory(part, data) == (expected is not None)
    whole = data.reshape(4, 5, 6, 2)[tuple(map(slice, *box))]
    assert part.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([], "has 0 pieces"),
        ([((0, 0), (4, 4))], "hold 16 of 24"),
        ([((0, 0), (4, 4)), ((0, 3), (4, 6))], "overlap"),
        ([((0, 0), (4, 4)), ((0, 4), (4, 7))], "has no piece"),
        ([((0, 0), (4, 6)), ((4, 0), (4, 6))], "has no piece"),
        ([((0,), (4,))], "has no piece"),
        ([((0, 0), (4, 6))] * (MAX_PIECES + 1), "allowed are"),
    ],
)
def test_boxes_that_do_not_tile_are_named(boxes: Any, message: str) -> None:
    meta = TensorMeta("layer.w", "bfloat16", (4, 6))
    with pytest.raises(ValueError, match=rf"'layer\.w'.*{message}"):
        check_tiling(meta, [Box(*box) for box in boxes])


def test_rules_that_do_not_fit_are_refused() -> None:
    vector = TensorMeta("norm", "bfloat16", (8,))
    with pytest.raises(ConfigError, match="no dimension 1"):
        Cutter([Cut("norm", dim=1, parts=2)]).pieces(vector)
    with pytest.raises(ConfigError, match="allowed are"):
        Cut("norm", dim=0, parts=0)
    with pytest.raises(ConfigError, match="regular expression"):
        Cut("(", dim=0, parts=2)
    with pytest.raises(ConfigError, match="no weightsync"):
        Cutter(["norm"])  # type: ignore[list-item]
    assert [p.box.shape for p in Cutter([Cut("n.*", 0, 3)]).pieces(vector)] == [(3,), (3,), (2,)]
    assert [p.box.shape for p in Cutter([Cut("n.*", 0, 99)]).pieces(vector)] == [(1,)] * 8
    assert Cutter(Layout(1, (), ((),))).pieces(vector)[0].is_whole


# --- a store ------------------------------------------------------------------------------------------


def test_everything_that_reads_a_store_reads_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, publisher = published_in_pieces(tmp_path / "store", 4)
    plain, _ = published(tmp_path / "plain", 4)
    for version in range(5):
        manifest = store.manifest(version)
        assert manifest.target == plain.manifest(version).target  # pieces are no part of a version
        assert all(not e.pieces for e in manifest.tensors) == manifest.is_full
    with LocalCheckpoint(tmp_path / "local") as local:
        for version in (0, 1, 3):
            local.pull(store, version)
            assert held(local.path) == contents(version)
            assert local.verify() == store.manifest(version).target
        folded = fold(store, 1, 4)
        assert [e.boxes for e in folded.tensors] == [e.boxes for e in store.manifest(4).tensors]
        local.pull(store, 1)
        assert [m.kind.value for m in store.route(store.manifest(1).target, 4)] == ["fold"]
        local.pull(store)
        assert held(local.path) == contents(4)
    anchor = publisher.anchor()
    assert anchor.target == store.manifest(4).target
    assert held(store.payload_path(anchor)) == contents(4)
    assert main(["delta", "verify", str(tmp_path / "store")]) == 0
    assert main(["delta", "show", str(tmp_path / "store"), "--version", "4"]) == 0
    assert "embed.weight" in capsys.readouterr().out
    collect(store, keep=1, grace_s=0.0)
    with LocalCheckpoint(tmp_path / "late") as local:
        local.pull(store)
        assert held(local.path) == contents(4)


@pytest.mark.parametrize("variant", list(Variant))
def test_pieces_of_either_variant(tmp_path: Path, variant: Variant) -> None:
    store, _ = published_in_pieces(tmp_path / "store", 2, variant=variant)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
        assert held(local.path) == contents(2)


def test_pieces_that_do_not_make_up_a_tensor_are_not_published(tmp_path: Path) -> None:
    store, publisher = published_in_pieces(tmp_path, 0)
    short = in_pieces(1)
    del short[next(name for name in short if "proj" in name)]
    with pytest.raises(LayoutError, match=r"proj.*hold"):
        Publisher(Store(tmp_path, "other")).publish(0, short)
    with pytest.raises(LayoutError):
        publisher.publish(1, short)
    with pytest.raises(LayoutError):  # cut otherwise than the run was
        publisher.publish(1, in_pieces(1, [Cut(r".*proj.*", dim=1, parts=2)]))
    publisher.publish(1, in_pieces(1))
    assert store.latest() == 1


def test_a_manifest_names_the_first_form_that_can_say_it(tmp_path: Path, record_form: str) -> None:
    is_packed = record_form == "packed"
    store, _ = published(tmp_path, 1)
    data = (store.path / "v000000000001.json").read_bytes()
    value = json.loads(data)
    assert value["format"] == f"weightsync-versions-{3 if is_packed else 1}"
    assert all(len(entry) == 7 for entry in value["tensors"])
    assert any(isinstance(entry[6], list) for entry in value["tensors"]) == is_packed
    in_parts, _ = published_in_pieces(tmp_path / "pieces", 1)
    value = json.loads((in_parts.path / "v000000000001.json").read_bytes())
    assert value["format"] == f"weightsync-versions-{3 if is_packed else 2}"
    assert {len(entry) for entry in value["tensors"]} == {7, 8}
    full = json.loads((store.path / "v000000000000.json").read_bytes())
    assert full["format"] == "weightsync-versions-1"


# --- manifests that lie -------------------------------------------------------------------------------


def forged(manifest: VersionManifest, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest with a change and a hash that fits it."""
    value = json.loads(manifest.to_bytes())
    del value["zz_hash"]
    change(value)
    body = _canonical(value)
    return body[:-1] + f',"zz_hash":"{_hash(body)}"}}'.encode()


def first_in_pieces(value: dict[str, Any]) -> list[Any]:
    found: list[Any] = next(entry for entry in value["tensors"] if len(entry) == 8)
    return found


def _overlap(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7][1][0] = first_in_pieces(value)[7][0][0]


def _gap(value: dict[str, Any]) -> None:
    del first_in_pieces(value)[7][1]


def _outside(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7][0][0][0] = 1 << 40


def _share(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7][0][3] = "0" * 16


def _long_digest(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7][0][2] = "1" + "0" * 16


def _no_file(value: dict[str, Any]) -> None:
    piece = next(p for p in first_in_pieces(value)[7] if p[4] != -1)
    piece[4] = -1


def _other_file(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7][0][4] = len(value["files"])


def _past_the_end(value: dict[str, Any]) -> None:
    piece = next(p for p in first_in_pieces(value)[7] if p[4] != -1)
    piece[5] = value["files"][0][1]


def _bytes(value: dict[str, Any]) -> None:
    first_in_pieces(value)[6] += 8


def _none(value: dict[str, Any]) -> None:
    first_in_pieces(value)[7] = []


def _two_lists(value: dict[str, Any]) -> None:
    first_in_pieces(value).append([])


def _first_form(value: dict[str, Any]) -> None:
    value["format"] = "weightsync-versions-1"


def _full(value: dict[str, Any]) -> None:
    value["kind"], value["base"] = "full", None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_overlap, "overlap"),
        (_gap, "hold"),
        (_outside, "has no piece"),
        (_share, "add up to"),
        (_long_digest, "does not look"),
        (_no_file, "not those|in no file|does not lie"),
        (_other_file, "lies in file"),
        (_past_the_end, "does not lie"),
        (_bytes, "not those of its pieces"),
        (_none, "form"),
        (_two_lists, "unpack"),
        (_first_form, "form"),
        (_full, "plain safetensors"),
    ],
)
def test_a_manifest_with_malformed_pieces_is_not_believed(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    store, _ = published_in_pieces(tmp_path / "store", 1)
    manifest = store.manifest(1)
    assert VersionManifest.from_bytes(forged(manifest, lambda value: None), "x") == manifest
    with pytest.raises(IntegrityError, match=rf"cannot be|can be trusted.*({message})"):
        VersionManifest.from_bytes(forged(manifest, change), "x")
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        (store.path / manifest.file_name).write_bytes(forged(manifest, change))
        with pytest.raises(IntegrityError):
            local.pull(store, 1)
        assert held(local.path) == contents(0)


def lies(manifest: VersionManifest) -> Iterator[VersionManifest]:
    """Of the right form, each with another untruth about pieces of one tensor."""
    entries = list(manifest.tensors)
    i, entry = next((i, e) for i, e in enumerate(entries) if e.has_records and e.pieces)
    first, second, *rest = entry.pieces
    wrong = (
        (replace(first, digest=first.digest ^ 1), second),
        (replace(first, digest=second.digest), replace(second, digest=first.digest)),
        (replace(first, share=second.share), replace(second, share=first.share)),
        (replace(first, box=second.box), replace(second, box=first.box)),
    )
    for pair in wrong:
        entries[i] = replace(entry, pieces=(*pair, *rest))
        yield replace(manifest, tensors=tuple(entries))


@pytest.mark.parametrize("number", range(4))
def test_untruths_about_pieces_are_found_before_anything_is_written(
    tmp_path: Path, number: int
) -> None:
    store, _ = published_in_pieces(tmp_path / "store", 1)
    manifest = store.manifest(1)
    lie = list(lies(manifest))[number]
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        (store.path / manifest.file_name).write_bytes(lie.to_bytes())
        with (
            pytest.warns(UserWarning, match="starting anew"),
            pytest.raises(IntegrityError, match=r"embed\.weight"),
        ):
            local.pull(store, 1)
        assert held(local.path) == contents(0)
        assert local.verify() == store.manifest(0).target


def test_any_flipped_byte_of_the_payload_is_found(tmp_path: Path) -> None:
    store, _ = published_in_pieces(tmp_path / "store", 1)
    manifest = store.manifest(1)
    path = store.payload_path(manifest) / manifest.files[0].name
    good = path.read_bytes()
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        for at in range(0, len(good), max(1, len(good) // 20)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            with pytest.raises(IntegrityError):
                local.pull(store, 1)
            assert held(local.path) == contents(0)
        path.write_bytes(good)
        local.pull(store, 1)
        assert held(local.path) == contents(1)


def test_metas_have_something_to_cut() -> None:
    names = [name for name in metas() if "proj" in name]
    assert names
    assert all(metas()[name].shape[1] % 3 == 0 for name in names)


# --- packed records ---------------------------------------------------------------------------------


def _packed_entry(value: dict[str, Any]) -> list[Any]:
    found: list[Any] = next(entry for entry in value["tensors"] if isinstance(entry[6], list))
    return found


def _longer(value: dict[str, Any]) -> None:
    _packed_entry(value)[6][1] += 8


def _shorter(value: dict[str, Any]) -> None:
    _packed_entry(value)[6][1] -= 8


def _endless(value: dict[str, Any]) -> None:
    _packed_entry(value)[6][1] = 1 << 40


def _no_gain(value: dict[str, Any]) -> None:
    _packed_entry(value)[6][1] = _packed_entry(value)[6][0]


def _as_it_is(value: dict[str, Any]) -> None:
    _packed_entry(value)[6] = _packed_entry(value)[6][0]


def _three(value: dict[str, Any]) -> None:
    _packed_entry(value)[6].append(8)


def _negative(value: dict[str, Any]) -> None:
    _packed_entry(value)[6][1] = -8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_longer, "than their manifest says"),
        (_shorter, "than their manifest says"),
        (_as_it_is, "out of place|a record's header"),
        (_endless, "cannot be packed records"),
        (_no_gain, "cannot be packed records"),
        (_three, "unpack"),
        (_negative, "not a count"),
        (_first_form, "form"),
    ],
)
def test_untruths_about_packed_records_are_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    store, _ = published(tmp_path / "store", 1)
    manifest = store.manifest(1)
    assert manifest.format == "weightsync-versions-3"
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        (store.path / manifest.file_name).write_bytes(forged(manifest, change))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a new start
            with pytest.raises(IntegrityError, match=message):
                local.pull(store, 1)
        assert held(local.path) == contents(0)
