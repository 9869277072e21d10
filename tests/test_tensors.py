"""Views of tensors, whoever made them, and what is refused."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weightsync.digest import digest_tensors
from weightsync.errors import LayoutError
from weightsync.tensors import TensorView, local_tensors, view_of
from weightsync.types import ITEM_BYTES, CastPolicy, RegionKind

torch = pytest.importorskip("torch")

#: All that torch can make; the packed fp4 has no arithmetic but bytes like any other.
TORCH_DTYPES = sorted(ITEM_BYTES)


def make(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A tensor of random bits: every NaN payload and every denormal may be among them."""
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    if dtype == "bool":
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape).astype(bool))
    raw = np.random.default_rng(seed).integers(0, 256, max(size, 1), dtype=np.uint8)[:size]
    if not size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def read(view: TensorView) -> bytes:
    """The elements in logical order, through the view alone."""
    item = ITEM_BYTES[view.dtype]
    found = []
    for index in np.ndindex(*view.shape):
        ptr = view.ptr + sum(i * s for i, s in zip(index, view.strides_bytes, strict=True))
        assert view.storage_ptr <= ptr <= view.storage_ptr + view.storage_bytes - item
        found.append(ctypes.string_at(ptr, item))
    return b"".join(found)


def expected(tensor: Any) -> bytes:
    dense = tensor.resolve_conj().resolve_neg().contiguous().clone()
    if not dense.numel():
        return b""
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())


def variants(dtype: str) -> Iterator[tuple[str, Any]]:
    base = make(dtype, (4, 6))
    yield "contiguous", base
    yield "transposed", base.T
    yield "step 2", base[::2, ::2]
    yield "expanded", base[:1].expand(3, 6)
    yield "offset", base[1:, 2:]
    yield "empty", make(dtype, (0,))
    yield "empty rows", make(dtype, (0, 16))
    yield "scalar", base[2, 3]
    yield "no rows of a live tensor", base[2:2]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_and_stride_is_seen_as_it_is(dtype: str) -> None:
    for what, tensor in variants(dtype):
        view = view_of(tensor, what)
        assert (view.dtype, view.shape, view.device) == (dtype, tuple(tensor.shape), "cpu"), what
        assert read(view) == expected(tensor), what
        assert view.num_bytes == len(expected(tensor))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazy_views_are_resolved(dtype: str) -> None:
    base = torch.randn(3, 4, dtype=getattr(torch, dtype))
    for tensor in (base.conj(), base.conj().T, base.conj().imag, torch._neg_view(base.real)):
        view = view_of(tensor)
        assert read(view) == expected(tensor)
    assert base.conj().is_conj()


def test_parameters_and_buffers_are_plain() -> None:
    module = torch.nn.BatchNorm1d(4)
    module.extra = torch.nn.Buffer(torch.arange(3.0))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert read(view_of(tensor, name)) == expected(tensor.detach())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.arange(12.0).reshape(3, 4)[::-1, ::-2],
        np.broadcast_to(np.arange(4, dtype=np.int16), (3, 4)),
        np.asfortranarray(np.arange(6, dtype=np.uint32).reshape(2, 3)),
        np.array(3.5, dtype=np.float16),
        np.zeros((0, 4), dtype=np.complex64),
        np.arange(24, dtype=np.int8)[5:].reshape(19)[::3],
        np.array([True, False]),
    ],
    ids=str,
)
def test_numpy_arrays(array: Any) -> None:
    view = view_of(array, "a")
    assert read(view) == np.ascontiguousarray(array).tobytes()
    assert (view.dtype, view.shape) == (array.dtype.name, array.shape)


class Exporter:
    """Something with DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("with_torch", [True, False])
def test_dlpack_objects(with_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    exporter = Exporter(tensor if with_torch else tensor.numpy())
    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    view = view_of(exporter, "d")
    assert view.ptr == tensor.data_ptr()
    assert read(view) == tensor.numpy().tobytes()


class Odd(torch.Tensor):
    """A subclass that nobody knows."""


def freed() -> Any:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantised() -> Any:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(Odd),
    "lazy parameter": lambda: torch.nn.UninitializedParameter(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "freed": freed,
    "no tensor": lambda: [1, 2],
    "big endian": lambda: np.ones(3, dtype=">f4"),
    "strings": lambda: np.array(["a"]),
    "objects": lambda: np.array([object()]),
    "records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "none": lambda: None,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_bytes_is_refused_by_name(kind: str) -> None:
    with pytest.raises(LayoutError, match=r"'layer\.3\.w'"):
        view_of(REFUSED[kind](), "layer.3.w")


def test_the_error_names_the_type() -> None:
    with pytest.raises(LayoutError, match=r"'w': .*Odd"):
        view_of(REFUSED["subclass"](), "w")


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"'w': .*quant|'w': dtype 'qint8'"):
        view_of(quantised(), "w")


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_tensor_of_one_rank_is_whole_but_has_no_view_of_its_own(
    tmp_path: Any,
) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        state = {
            "plain": torch.ones(2),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "sharded": whole,
        }
        with pytest.raises(LayoutError, match=r"'sharded': .*DTensor"):
            view_of(whole, "sharded")
        assert list(local_tensors(state.items()).views) == list(state)
    finally:
        dist.destroy_process_group()


# --- local_tensors ----------------------------------------------------------------------------------


def test_exact_aliases_travel_once_and_partial_overlaps_do_not_tie() -> None:
    embed = torch.arange(12.0).reshape(3, 4)
    named = [
        ("embed", embed),
        ("head", embed),
        ("head2", embed[:2]),
        ("t", embed.T),
        ("cast", embed.view(torch.int32)),
    ]
    local = local_tensors(named)
    assert dict(local.layout.aliases) == {"head": "embed"}
    assert list(local.views) == ["embed", "head2", "t", "cast"]
    assert len(local.addresses) == 1, "one region a storage"
    for t in local.layout.tensors:
        assert t.placed[0].region == 0


def test_empty_tensors_are_kept_apart() -> None:
    empties = [("a", torch.empty(0)), ("b", torch.empty(0, 16)), ("c", torch.empty(4, 0))]
    local = local_tensors(empties)
    assert [(t.name, t.shape) for t in local.layout.tensors] == [
        ("a", (0,)),
        ("b", (0, 16)),
        ("c", (4, 0)),
    ]
    assert not local.layout.aliases
    assert len(local.addresses) == 1
    mixed = local_tensors([*empties, ("d", torch.ones(3))])
    assert [r.num_bytes for r in mixed.layout.regions[0]] == [12]


def test_no_tensors_make_a_layout_too() -> None:
    assert local_tensors([]).layout.tensors == ()


def test_a_name_given_twice_is_refused() -> None:
    a = torch.ones(2)
    for second in (a, torch.ones(3)):
        with pytest.raises(LayoutError, match="'x' was given twice"):
            local_tensors([("x", a), ("x", second)])
    with pytest.raises(LayoutError, match="'y' was given twice"):
        local_tensors([("x", a), ("y", a), ("y", a)])


def test_a_cast_offers_a_second_wire_form_for_fp32_only() -> None:
    named = [("m", torch.ones(2)), ("h", torch.ones(2, dtype=torch.float16))]
    forms = {
        t.name: [w.dtype for w in t.wire_forms]
        for t in local_tensors(named, cast=CastPolicy.FP32_TO_BF16).layout.tensors
    }
    assert forms == {"m": ["float32", "bfloat16"], "h": ["float16"]}
    assert [w.dtype for w in local_tensors(named).layout.tensors[0].wire_forms] == ["float32"]


def test_regions_have_the_kind_that_was_asked_for() -> None:
    local = local_tensors([("a", np.ones(3))], kind=RegionKind.TEMPORARY)
    assert local.layout.regions[0][0].kind is RegionKind.TEMPORARY


def test_sources_are_not_changed_and_not_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    before = digest_tensors([("a", tensor)])
    view = local_tensors([("a", tensor)]).views["a"]
    assert view.owner is tensor
    assert view.ptr == tensor.data_ptr()
    assert digest_tensors([("a", tensor)]) == before
