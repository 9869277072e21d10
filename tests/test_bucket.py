"""Buckets: what goes in comes out, within the limit, and nothing malicious gets in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.bucket import (
    BucketMetadata,
    Cut,
    FlattenedTensorBucket,
    cut_buckets,
    cut_stream,
    unpack_all,
)
from weightsync.errors import CapacityError, ConfigError, LayoutError, ProtocolError
from weightsync.tensors import view_of
from weightsync.types import BUCKET_ALIGNMENT_BYTES, ITEM_BYTES, item_bytes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
Bucket = FlattenedTensorBucket


def bits(tensor: Any) -> bytes:
    """The elements of a tensor in logical order, as bytes."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def dtype_of(tensor: Any) -> str:
    return view_of(tensor).dtype


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.integers(0, 256, int(np.prod(shape)) * ITEM_BYTES[dtype], dtype=np.uint8)
    if not raw.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def over_the_wire(bucket: FlattenedTensorBucket) -> FlattenedTensorBucket:
    """Another process's bucket: bytes and JSON only."""
    flat = np.frombuffer(bytearray(bits(bucket.flattened_tensor)), dtype=np.uint8)
    return Bucket(flat, BucketMetadata.from_json(json.loads(json.dumps(bucket.metadata.to_json()))))


def check_round_trip(named: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> None:
    assert [n for n, _ in found] == [n for n, _ in named]
    for (name, sent), (_, got) in zip(named, found, strict=True):
        assert (dtype_of(got), shape_of(got)) == (dtype_of(sent), shape_of(sent)), name
        assert bits(got) == bits(sent), name


MIXED = [
    ("bf16", random_bits("bfloat16", (3,))),
    ("fp32", random_bits("float32", (4,))),
    ("u8", random_bits("uint8", (1,))),
    ("fp64", random_bits("float64", (2,))),
    ("bf16b", random_bits("bfloat16", (5,))),
    ("i64", random_bits("int64", (1,))),
]


def test_mixed_dtypes_start_aligned_and_come_back_bit_equal() -> None:
    bucket = Bucket.pack(MIXED)
    assert [e.offset_bytes % BUCKET_ALIGNMENT_BYTES for e in bucket.metadata.entries] == [0] * 6
    assert bucket.metadata.num_bytes == 5 * BUCKET_ALIGNMENT_BYTES + 8
    check_round_trip(MIXED, over_the_wire(bucket).unpack())


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_is_bit_exact_whatever_its_bits_mean(dtype: str) -> None:
    shapes = [(16, 16), (5,), (), (0,), (0, 16), (4, 0)]
    named = [(str(i), random_bits(dtype, s, i)) for i, s in enumerate(shapes)]
    check_round_trip(named, over_the_wire(Bucket.pack(named)).unpack())
    small = list(Bucket.pack_all(named, 512))
    check_round_trip(named, list(unpack_all(over_the_wire(b) for b in small)))


def strided() -> list[tuple[str, Any]]:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    wave = torch.randn(3, 4, dtype=torch.complex64)
    return [
        ("transposed", base.T),
        ("step", base[:, ::2]),
        ("expanded", base[:1].expand(5, 8)),
        ("offset", base[2:, 3:]),
        ("conj", wave.conj()),
        ("numpy back", np.arange(12, dtype=np.int16).reshape(3, 4)[::-1, ::-1]),
        ("4d", torch.arange(120).reshape(2, 3, 4, 5).permute(3, 1, 0, 2)),
        ("5d", torch.arange(720).reshape(2, 3, 4, 5, 6).permute(4, 2, 0, 3, 1)),
        ("parameter", torch.nn.Parameter(torch.randn(3, 3).T)),
    ]


def test_strided_sources_travel_in_logical_order_and_stay_unchanged() -> None:
    named = strided()
    before = [bits(t) for _, t in named]
    bucket = Bucket.pack(named)
    found = over_the_wire(bucket).unpack()
    assert [bits(t) for _, t in named] == before
    check_round_trip(named, found)
    sizes = {e.meta.name: e.num_bytes for e in bucket.metadata.entries}
    assert sizes["expanded"] == 5 * 8 * 4, "an expanded tensor takes its logical size"
    check_round_trip(named, list(unpack_all(over_the_wire(b) for b in Bucket.pack_all(named, 256))))


def test_nothing_makes_an_empty_bucket() -> None:
    bucket = Bucket.pack([])
    assert (bucket.metadata.entries, bucket.metadata.num_bytes) == ((), 0)
    assert over_the_wire(bucket).unpack() == []
    (only,) = Bucket.pack_all([], 256)
    assert list(unpack_all([only])) == []


# --- limits -----------------------------------------------------------------------------------------


def test_a_tensor_larger_than_the_limit_is_cut_and_order_is_kept() -> None:
    limit = 2**14
    named = [
        (n, random_bits("uint8", (size,), i))
        for i, (n, size) in enumerate([("a", 160), ("big", 65_536), ("c", 160)])
    ]
    buckets = list(Bucket.pack_all(named, limit))
    assert all(
        b.metadata.num_bytes <= limit and b.flattened_tensor.nbytes <= limit for b in buckets
    )
    assert len(buckets) == 5
    check_round_trip(named, list(unpack_all(buckets)))
    with pytest.raises(LayoutError, match="'big': the bucket holds bytes 0:"):
        [b.unpack() for b in buckets]


def test_the_limit_is_looked_at_before_a_tensor_is_added() -> None:
    limit = 10 * BUCKET_ALIGNMENT_BYTES
    sizes = [9 * 256, 9 * 256, 256]
    found = list(cut_buckets(sizes, limit))
    assert found == [[Cut(0, 0, 2304, 0)], [Cut(1, 0, 2304, 0), Cut(2, 0, 256, 2304)]]


def test_padding_counts() -> None:
    assert [len(c) for c in cut_buckets([1] * 7, 2 * 256)] == [2, 2, 2, 1]
    assert [len(c) for c in cut_buckets([0] * 5, 256, max_cuts=2)] == [2, 2, 1]


@given(
    st.lists(st.integers(0, 3000), max_size=30),
    st.integers(256, 2048),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_cuts_cover_everything_once_in_order(
    sizes: list[int], limit: int, most: int | None
) -> None:
    buckets = list(cut_buckets(sizes, limit, most))
    cuts = [c for b in buckets for c in b]
    assert [c.item for c in cuts] == sorted(c.item for c in cuts)
    assert {c.item for c in cuts} == set(range(len(sizes)))
    for item, size in enumerate(sizes):
        mine = [c for c in cuts if c.item == item]
        ends = [0, *(c.start_bytes + c.num_bytes for c in mine)]
        assert [c.start_bytes for c in mine] == ends[:-1]
        assert ends[-1] == size
        if size <= limit // 256 * 256:
            assert len(mine) == 1, "what fits is not cut"
    for bucket in buckets:
        assert bucket
        assert max(c.offset_bytes + c.num_bytes for c in bucket) <= limit
        assert most is None or len(bucket) <= most
        ends = [c.offset_bytes + c.num_bytes for c in bucket]
        assert all(c.offset_bytes >= e for c, e in zip(bucket[1:], ends[:-1], strict=True))
        assert all(c.offset_bytes % 256 == 0 and c.start_bytes % 256 == 0 for c in bucket)


def test_cutting_is_lazy() -> None:
    def endless() -> Any:
        while True:
            yield 256

    assert len(next(cut_buckets(endless(), 1024))) == 4


def bytes_of(buckets: list[list[Cut]]) -> list[int]:
    return [sum(c.num_bytes for c in b) for b in buckets]


def test_a_stream_begins_and_ends_with_small_buckets() -> None:
    mib = 2**20
    found = list(cut_stream([4 * mib] * 512, 256 * mib))
    assert sum(bytes_of(found)) == 2048 * mib
    assert bytes_of(found)[:4] == [32 * mib, 96 * mib, 256 * mib, 256 * mib]
    assert bytes_of(found)[-1] <= 32 * mib
    for before, after in itertools.pairwise(bytes_of(found)):
        assert before // 4 <= after <= 3 * before, "each hides the filling of the next"


@pytest.mark.parametrize(("bucket_mib", "total_mib"), [(16, 100), (4, 100), (256, 16), (256, 3)])
def test_small_buckets_of_a_stream_are_all_alike(bucket_mib: int, total_mib: int) -> None:
    sizes = [2**20] * total_mib
    found = list(cut_stream(sizes, bucket_mib * 2**20))
    assert found == list(cut_buckets(sizes, min(bucket_mib, 16) * 2**20))


def test_a_bucket_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="255 B is too small; at least 256"):
        list(cut_buckets([1], 255))
    with pytest.raises(ConfigError, match="255 B is too small; at least 256"):
        list(cut_stream([1], 255))


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda n: np.empty(n, np.uint8), lambda n: torch.empty(n, dtype=torch.uint8)]
)
def test_memory_is_reused(make: Any) -> None:
    out = make(4096)
    first = Bucket.pack([("a", torch.ones(8))], out=out)
    assert first.flattened_tensor is out
    kept = dict(first.unpack())["a"]
    second = Bucket.pack([("a", torch.zeros(8))], out=out)
    assert bits(dict(second.unpack())["a"]) == bits(torch.zeros(8))
    assert bits(kept) == bits(torch.zeros(8)), "views are of the memory, as documented"
    with pytest.raises(CapacityError, match=r"needs 8\.00 kB, its memory has 4\.10 kB"):
        Bucket.pack([("a", torch.ones(2000))], out=out)


def test_kept_tensors_survive_the_reuse_of_two_buffers() -> None:
    named = [(str(i), random_bits("float32", (50,), i)) for i in range(12)]
    out = np.empty(512, np.uint8)

    def passed_on() -> Any:
        for bucket in Bucket.pack_all(named, 512, out=out):
            yield bucket
            out[:] = 0xFF  # the next bucket overwrites what a loader may have kept

    check_round_trip(named, list(unpack_all(passed_on())))


def read_only() -> Any:
    memory = np.zeros(4096, np.uint8)
    memory.flags.writeable = False
    return memory


BAD_MEMORY = {
    "another dtype": lambda: np.zeros(4096, np.float32),
    "two dimensions": lambda: np.zeros((64, 64), np.uint8),
    "a step": lambda: np.zeros(8192, np.uint8)[::2],
    "backwards": lambda: np.zeros(4096, np.uint8)[::-1],
    "bytes": lambda: np.frombuffer(bytes(4096), np.uint8),
    "read only": read_only,
}


@pytest.mark.parametrize("kind", BAD_MEMORY)
def test_memory_that_cannot_be_written_is_refused_before_a_byte_moves(kind: str) -> None:
    out = BAD_MEMORY[kind]()
    before = out.tobytes()
    with pytest.raises(LayoutError):
        Bucket.pack([("a", torch.ones(8))], out=out)
    assert out.tobytes() == before


def test_a_flattened_tensor_is_dense_and_large_enough() -> None:
    bucket = Bucket.pack(MIXED)
    flat = bucket.flattened_tensor
    with pytest.raises(ProtocolError, match=r"1287 B for metadata of 1288"):
        Bucket(flat[:-1], bucket.metadata)
    for bad in (flat.view(np.int8), flat[::2], flat.reshape(2, -1)):
        with pytest.raises(LayoutError, match="dense 1-dim uint8"):
            Bucket(bad, bucket.metadata)


def test_memory_at_an_odd_address_still_unpacks() -> None:
    base = torch.empty(5000, dtype=torch.uint8)
    for out in (base[3:], base.numpy()[3:]):
        check_round_trip(MIXED, Bucket.pack(MIXED, out=out).unpack())


# --- aliases ----------------------------------------------------------------------------------------


def test_tied_tensors_travel_once_and_come_back_tied() -> None:
    embed = torch.randn(4, 4)
    named = [("embed", embed), ("head", embed), ("head2", embed[:2]), ("copy", embed.clone())]
    bucket = over_the_wire(Bucket.pack(named))
    assert [e.meta.name for e in bucket.metadata.entries] == ["embed", "head2", "copy"]
    found = dict(bucket.unpack())
    assert sorted(found) == ["copy", "embed", "head", "head2"]
    assert all(bits(found[n]) == bits(t) for n, t in named)
    found["embed"][...] = 0
    assert not found["head"].any()
    assert found["head2"].any()
    again = dict(unpack_all(Bucket.pack_all(named, 256)))
    assert again["head"] is again["embed"]


def test_a_cut_tensor_keeps_its_tied_name() -> None:
    big = torch.randn(500)
    found = dict(
        unpack_all(over_the_wire(b) for b in Bucket.pack_all([("a", big), ("b", big)], 512))
    )
    assert found["b"] is found["a"]
    assert bits(found["a"]) == bits(big)


def test_names_are_given_once() -> None:
    a = torch.ones(2)
    for second in (a, torch.ones(3)):
        with pytest.raises(LayoutError, match="'x' was given twice"):
            Bucket.pack([("x", a), ("x", second)])


# --- unpack_into ------------------------------------------------------------------------------------


def test_unpack_into_fills_tensors_of_any_strides_from_whole_and_cut() -> None:
    named = [(n, t) for n, t in strided() if n not in ("conj",)]
    for limit in (256, 2**20):
        targets = {}
        for n, t in named:
            dense = torch.zeros(shape_of(t), dtype=getattr(torch, dtype_of(t)))
            targets[n] = dense.T.contiguous().T if dense.dim() == 2 else dense
        for bucket in Bucket.pack_all(named, limit):
            over_the_wire(bucket).unpack_into(targets)
        for n, t in named:
            assert bits(targets[n]) == bits(t), n


def test_unpack_into_refuses_what_does_not_fit() -> None:
    bucket = Bucket.pack([("a", torch.ones(4))])
    locked = np.ones(4, np.float32)
    locked.flags.writeable = False
    for target, words in (
        ({}, "no target for 'a'"),
        ({"a": torch.ones(5)}, r"'a': bucket has float32\(4,\), target is float32\(5,\)"),
        ({"a": torch.ones(4, dtype=torch.int32)}, "target is int32"),
        ({"a": torch.ones(1).expand(4)}, "'a': .*share memory"),
        ({"a": locked}, "'a': .*read-only"),
    ):
        with pytest.raises(LayoutError, match=words):
            bucket.unpack_into(target)


# --- metadata ---------------------------------------------------------------------------------------

GOOD = {
    "version": 1,
    "num_bytes": 776,
    "entries": [
        ["a", "float32", [4], 0, 16, 0],
        ["b", "int64", [64], 0, 512, 256],
        ["c", "int8", [8], 0, 8, 768],
    ],
    "aliases": {"t": "a"},
}


def changed(index: int, column: int, value: Any) -> dict[str, Any]:
    bad = json.loads(json.dumps(GOOD))
    bad["entries"][index][column] = value
    return bad


BAD = {
    "another version": {**GOOD, "version": 2},
    "no version": {k: v for k, v in GOOD.items() if k != "version"},
    "not an object": [1],
    "too short": {**GOOD, "num_bytes": 775},
    "infinite": {**GOOD, "num_bytes": float("inf")},
    "no aliases": {**GOOD, "aliases": None},
    "an alias of nothing": {**GOOD, "aliases": {"t": "z"}},
    "an alias over an entry": {**GOOD, "aliases": {"b": "a"}},
    "overlap": changed(1, 5, 8),
    "twice the same place": changed(1, 5, 0),
    "misaligned offset": changed(1, 5, 260),
    "misaligned start": changed(1, 3, 4),
    "misaligned size": changed(1, 4, 511),
    "negative offset": changed(0, 5, -256),
    "negative start": changed(1, 3, -8),
    "negative size": changed(1, 4, -8),
    "beyond its tensor": changed(1, 4, 520),
    "starts beyond its tensor": changed(1, 3, 8),
    "unknown dtype": changed(0, 1, "float7"),
    "negative extent": changed(0, 2, [-4]),
    "huge offset": changed(2, 5, 10**30),
    "huge shape": changed(0, 2, [10**400, float("inf")]),
    "twice the same name": changed(1, 0, "a"),
    "short row": {**GOOD, "entries": [["a", "float32", [4], 0, 16]]},
    "rows of nothing": {**GOOD, "entries": [None]},
}


def test_good_metadata_is_good() -> None:
    metadata = BucketMetadata.from_json(json.loads(json.dumps(GOOD)))
    assert json.loads(json.dumps(metadata.to_json())) == GOOD


@pytest.mark.parametrize("kind", BAD)
def test_malicious_metadata_is_refused(kind: str) -> None:
    with pytest.raises((ProtocolError, LayoutError)):
        BucketMetadata.from_json(BAD[kind])


def test_errors_name_version_and_dtype() -> None:
    with pytest.raises(ProtocolError, match="version 2; this side speaks 1"):
        BucketMetadata.from_json(BAD["another version"])
    with pytest.raises(LayoutError, match="'float7'"):
        BucketMetadata.from_json(BAD["unknown dtype"])


def test_parts_of_one_tensor_may_share_a_bucket_if_they_do_not_repeat() -> None:
    rows = [["a", "int8", [512], 0, 256, 0], ["a", "int8", [512], 256, 256, 256]]
    good = {"version": 1, "num_bytes": 512, "entries": rows, "aliases": {}}
    BucketMetadata.from_json(good)
    for again in (["a", "int8", [512], 128, 256, 256], ["a", "int16", [512], 256, 256, 256]):
        with pytest.raises(ProtocolError, match="'a'"):
            BucketMetadata.from_json({**good, "entries": [rows[0], again]})


def test_a_part_that_comes_twice_does_not_stand_in_for_one_that_is_missing() -> None:
    buckets = list(Bucket.pack_all([("a", random_bits("uint8", (512,)))], 256))
    assert len(buckets) == 2
    with pytest.raises(ProtocolError, match="'a'"):
        list(unpack_all([buckets[0], buckets[0]]))
    with pytest.raises(ProtocolError, match="'a'"):
        list(unpack_all([buckets[1], buckets[0]]))
    with pytest.raises(LayoutError, match="never complete: 'a'"):
        list(unpack_all(buckets[:1]))


@given(st.data())
def test_random_tensors_come_back(data: st.DataObject) -> None:
    dtypes = st.sampled_from(["bfloat16", "float32", "int8", "complex128", "bool", "float8_e4m3fn"])
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    named = []
    for i in range(data.draw(st.integers(0, 6))):
        tensor = random_bits(data.draw(dtypes), data.draw(shapes), i)
        named.append((f"t{i}", tensor.permute(data.draw(st.permutations(range(tensor.dim()))))))
    limit = data.draw(st.sampled_from([256, 300, 512, 4096]))
    buckets = list(Bucket.pack_all(named, limit, num_threads=data.draw(st.integers(1, 3))))
    assert all(b.metadata.num_bytes <= limit for b in buckets)
    for e in (e for b in buckets for e in b.metadata.entries):
        assert e.offset_bytes % item_bytes(e.meta.dtype) == 0
    check_round_trip(named, list(unpack_all(over_the_wire(b) for b in buckets)))
