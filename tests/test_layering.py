"""Who may import whom, read from the sources; and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("weightsync", "engine_adapter")

#: From the top down: a module imports only its own level or lower ones.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("weightsync.cli",),
    (
        "weightsync.sender", "weightsync.receiver", "weightsync.following", "weightsync.facade",
        "engine_adapter",
    ),
    (
        "weightsync.link", "weightsync.source_ends", "weightsync.fill",
        "weightsync.collector", "weightsync.crew", "weightsync.store_sender", "weightsync.store_ranks",
        "weightsync.store_options", "weightsync.placed_weights", "weightsync.store_part",
        "weightsync.store_rank_sender",
        "weightsync.rank_sender", "weightsync.ranks", "weightsync.followers", "weightsync.machines",
        "weightsync.job_lane", "weightsync.manifest_box", "weightsync.glance",
        "weightsync.rank_calls", "weightsync.rank_work", "weightsync.rank_moves",
        "weightsync.rank_digests", "weightsync.rank_apply", "weightsync.rank_landing",
        "weightsync.rank_session", "weightsync.rank_store", "weightsync.sources",
        "weightsync.session", "weightsync.session_wire", "weightsync.session_events",
        "weightsync.session_leader", "weightsync.session_rank", "weightsync.control",
        "weightsync.messages", "weightsync.http_wire", "weightsync.report", "weightsync.options",
    ),
    ("weightsync.transports", "weightsync.store"),
    (
        "weightsync.binding", "weightsync.plan", "weightsync.planning", "weightsync.cost",
        "weightsync.bucket", "weightsync.layout",
        "weightsync.manifest", "weightsync.coverage", "weightsync.pair_plan",
        "weightsync.digest_shares", "weightsync.digest", "weightsync.tables",
        "weightsync.tensors", "weightsync.watch", "weightsync.naming", "weightsync.engine",
        "weightsync.memory", "weightsync.native", "weightsync.native_attention",
        "weightsync.native_cuda", "weightsync.native_linear", "weightsync.native_sampling",
        "weightsync.native_gate", "weightsync.native_norm", "weightsync.native_delta",
        "weightsync.native_heads",
        "weightsync.native_cuda_core", "weightsync.native_experts", "weightsync.native_few_rows",
        "weightsync.device_tables", "weightsync.slot_pack", "weightsync.live_tensor",
        "weightsync.device_patch", "weightsync.device_delta", "weightsync.device_fold",
        "weightsync.codec", "weightsync.workloads",
        "weightsync.checkpoints", "weightsync.presets", "weightsync.model_shapes",
        "weightsync.kept", "weightsync.layouts",
    ),
    ("weightsync.deadline", "weightsync.config", "weightsync.faults", "weightsync.types",
     "weightsync.errors", "weightsync.packages", "weightsync.records"),
)  # fmt: skip

#: Records of a higher level that a contract speaks of, and the door to the native core.
ALLOWED_UP = {
    ("weightsync.engine", "weightsync.session"),
    ("weightsync.deadline", "weightsync.native"),
}

PURE = (
    "plan",
    "planning.transfers",
    "planning.columns",
    "planning.cover",
    "planning.balance",
    "planning.forward",
    "planning.topology",
    "planning.contract",
    "planning.check",
    "layout",
    "types",
    "errors",
    "session",
    "session_leader",
    "session_rank",
)
IMPURE = {"socket", "torch", "ctypes", "multiprocessing", "subprocess", "http", "mmap", "nixl"}


def modules() -> list[str]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def source_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield child
            yield from walk(child)


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """Everything a module imports, at its top or within functions; names of modules."""
    known, found = set(modules()), []
    for node in walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [d if d in known or d == "weightsync._native" else node.module for d in deeper]
    return tuple(found)


def level_of(module: str) -> int | None:
    names = [(i, n) for i, level in enumerate(LEVELS) for n in level]
    fits = [(len(n), i) for i, n in names if module == n or module.startswith(f"{n}.")]
    return max(fits)[1] if fits else None


@pytest.mark.parametrize("module", [m for m in modules() if m not in PACKAGES])
def test_arrows_point_down(module: str) -> None:
    level = level_of(module)
    assert level is not None, f"{module}: put it on a level of LEVELS"
    for name in imports_of(module):
        below = level_of(name)
        if below is not None and (module, name) not in ALLOWED_UP:
            assert level <= below, f"{module} imports {name}, which lies above it"


def test_the_two_ends_do_not_know_each_other() -> None:
    for module, forbidden in (
        ("weightsync.sender", ("weightsync.receiver", "weightsync.rank_work", "engine_adapter")),
        ("weightsync.link", ("weightsync.receiver", "weightsync.rank_work", "engine_adapter")),
        ("weightsync.receiver", ("weightsync.sender", "weightsync.link", "engine_adapter")),
        ("weightsync.rank_work", ("weightsync.sender", "weightsync.link", "engine_adapter")),
    ):
        for name in imports_of(module):
            assert not name.startswith(forbidden), f"{module} imports {name}"
    for module in modules():
        if module.startswith("engine_adapter"):
            assert not {"weightsync.sender", "weightsync.receiver"} & set(imports_of(module))


def transports() -> dict[str, str]:
    from weightsync.transports import _REGISTRY

    return {name: module for name, (module, _) in _REGISTRY.items()}


def test_a_transport_imports_no_other_transport() -> None:
    """Modules whose names begin with a transport's belong to it; all others are shared."""
    names = transports()

    def owner(module: str) -> str | None:
        stem = module.removeprefix("weightsync.transports.")
        return next((n for n in names if stem == n or stem.startswith(f"{n}_")), None)

    folder = [m for m in modules() if m.startswith("weightsync.transports.")]
    assert len(folder) > 3
    for module in folder:
        for name in imports_of(module):
            other = owner(name) if name.startswith("weightsync.transports.") else None
            assert other in (None, owner(module)), f"{module} imports {name}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_no_device_socket_or_process_group(name: str) -> None:
    found = {i.split(".")[0] for i in imports_of(f"weightsync.{name}")}
    assert not found & IMPURE
    assert "weightsync.native" not in imports_of(f"weightsync.{name}")


def test_only_native_imports_the_extension() -> None:
    for module in modules():
        if module != "weightsync.native":
            assert "weightsync._native" not in imports_of(module), module


def test_only_config_reads_the_environment() -> None:
    for module in modules():
        if module == "weightsync.config":
            continue
        for node in walk(tree_of(module)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                assert ast.unparse(node.value) != "os", f"{module}:{node.lineno}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    for module in modules():
        assert not {i.split(".")[0] for i in imports_of(module)} & {
            "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve",
        }, module  # fmt: skip
        for node in walk(tree_of(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
                raise AssertionError(f"{module}:{node.lineno} loads a format that can carry code")


def test_pybind11_lives_in_the_bindings_only() -> None:
    csrc = ROOT / "csrc"
    for path in csrc.rglob("*.[ch]*"):
        if "bindings" not in path.relative_to(csrc).parts:
            text = path.read_text()
            for word in ("pybind11", "Python.h", "torch/"):
                assert word not in text, f"{path} names {word}"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    return done.stdout


@pytest.mark.parametrize("module", ["weightsync", "weightsync.cli.main"])
def test_an_import_costs_nothing(module: str) -> None:
    if module not in modules():
        pytest.skip(f"{module} does not exist yet")
    heavy = ("torch", "numpy", "transformers", "nixl", "matplotlib")
    found = run_python(
        f"import {module}, sys; print([m for m in {heavy!r} if m in sys.modules], end='')"
    )
    assert found == "[]"


def test_the_command_line_explains_itself() -> None:
    if "weightsync.cli.main" not in modules():
        pytest.skip("there is no command line yet")
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli.main", "--help"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_every_public_name_can_be_had_and_torch_is_not_needed() -> None:
    code = "import weightsync as w, sys; [getattr(w, n) for n in w.__all__]; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"
    code = "import weightsync as w\ntry:\n w.nothing\nexcept AttributeError as e: print(e)"
    assert "'nothing'" in run_python(code)
