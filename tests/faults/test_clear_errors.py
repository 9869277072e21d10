"""What is missing, taken, too large or broken is said in words that tell what to do."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine_adapter.fake import FakeEngine
from faults.worker import OPAQUE, weights
from weightsync.cli.main import EXIT_FAILED, EXIT_USAGE, main
from weightsync.errors import ConfigError
from weightsync.receiver import Receiver

pytestmark = pytest.mark.timeout(300)

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
NIXL = "nixl_cu13,nixl_cu12,nixl"

#: Runs first in every process: packages are absent as if they had never been installed, and the
#: engine's adapter of the benchmark may be made to lie.
_SITE = """
import importlib.machinery, os
_hidden = set(filter(None, os.environ.get("HIDDEN_PACKAGES", "").split(",")))
_find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in _hidden else _find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
if os.environ.get("LYING_ENGINE"):
    from engine_adapter.module import ModuleAdapter
    _digest = ModuleAdapter.digest
    ModuleAdapter.digest = lambda self, names: {n: d ^ 1 for n, d in _digest(self, names).items()}
"""


class Runner:
    """Runs Python in a process of its own, to its end."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(_SITE)
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY, REPOSITORY / "tests"))),
            "WEIGHTSYNC_CACHE": str(folder / "cache"),
            "WEIGHTSYNC_NUM_THREADS": "1",
        }

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [sys.executable, *args],
            env={**self._env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def weightsync(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "weightsync.cli.main", *args, **env)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("site"))


def bench(runner: Runner, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The benchmark on the smallest model."""
    return runner.weightsync("bench", "--model", "tiny", "--repeat", "1", *args, **env)


# --- packages that are absent -------------------------------------------------------------------

_CONNECT = """
from engine_adapter.fake import FakeEngine
from faults.worker import OPAQUE, weights
from weightsync import Receiver, Sender
with Receiver(FakeEngine(weights(0), OPAQUE)) as receiver:
    try:
        Sender.connect([receiver.url], transport="p2p")
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_sender_without_nixl_says_what_to_install(runner: Runner) -> None:
    done = runner.run("-c", _CONNECT, HIDDEN_PACKAGES=NIXL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MissingDependencyError 'nixl' is not installed")
    assert "pip install 'weightsync[p2p]'" in done.stdout


def test_bench_without_nixl_says_what_to_install(runner: Runner) -> None:
    done = bench(runner, "--transport", "p2p", HIDDEN_PACKAGES=NIXL)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert "pip install 'weightsync[p2p]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_without_torch_says_what_to_install(runner: Runner) -> None:
    done = bench(runner, "--transport", "ipc", HIDDEN_PACKAGES="torch")
    assert done.returncode in (EXIT_USAGE, EXIT_FAILED)
    assert re.search(r"pip install 'weightsync\[(hf|bench)\]'", done.stderr), done.stderr


def test_help_needs_neither_torch_nor_nixl(runner: Runner) -> None:
    done = runner.weightsync("--help", HIDDEN_PACKAGES=f"torch,{NIXL}")
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


_UPDATE = """
import sys
import numpy as np
import weightsync
from engine_adapter.fake import FakeEngine
from faults.worker import BUCKET_BYTES, OPAQUE, root, root_of, weights
from weightsync import FlattenedTensorBucket, Receiver, Sender

named = list(weights(1).items())
bucket = FlattenedTensorBucket.pack(named)
assert all(np.array_equal(found, dict(named)[name]) for name, found in bucket.unpack())

engine = FakeEngine(weights(0), OPAQUE)
with Receiver(engine) as receiver:
    for n, contract in enumerate(("stream", "direct"), 1):
        how = {"transport": "ipc", "bucket": BUCKET_BYTES, "contract": contract}
        with Sender.connect([receiver.url], **how) as sender, sender.update(version=n) as update:
            update.send(weights(n))
        label, digests = engine.generate()
        assert (label, root_of(digests)) == (n, root(n))
assert "torch" not in sys.modules
print("done")
"""


def test_numpy_weights_need_no_torch(runner: Runner) -> None:
    done = runner.run("-c", _UPDATE, HIDDEN_PACKAGES=f"torch,{NIXL}")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# --- arguments that cannot be -------------------------------------------------------------------


def test_a_port_in_use_is_said(runner: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use.*another port, or 0"):
            Receiver(FakeEngine(weights(0), OPAQUE), listen=f"127.0.0.1:{port}").start()


def test_two_receivers_do_not_share_a_port() -> None:
    with Receiver(FakeEngine(weights(0), OPAQUE)) as first:
        listen = first.url.removeprefix("http://")
        with pytest.raises(ConfigError, match="in use"):
            Receiver(FakeEngine(weights(0), OPAQUE), listen=listen).start()


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may have been started or written when the error comes."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a worker was started, or a checkpoint written")

    monkeypatch.setattr("weightsync.cli.bench_run.WorkerProcess", refuse)
    monkeypatch.setattr("weightsync.checkpoints.cached_checkpoint", refuse)


@pytest.mark.usefixtures("no_workers")
def test_a_model_that_does_not_fit_is_refused_with_both_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weightsync.cli.bench_model.available_bytes", lambda: 24 * 10**9)
    assert main(["bench", "--model", "qwen3-30b-a3b", "--transport", "ipc"]) == EXIT_FAILED
    text = capsys.readouterr().err
    needed, there = map(int, re.findall(r"(\d{8,}) bytes", text))
    assert needed > 2 * 61_000_000_000
    assert there == 24 * 10**9
    assert "CapacityError" in text


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--bucket", "0"], "size '0' must be at least one byte"),
        (["--bucket=-1GB"], "-1GB"),
        (["--bucket", "12 parsecs"], "12 parsecs"),
        (["--transport", "pigeon"], "invalid choice: 'pigeon'"),
        (["--repeat", "0"], "'0' is not a count"),
        (["--stream", "--direct"], "not allowed with"),
    ],
)
def test_arguments_that_cannot_be(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    assert caught.value.code == EXIT_USAGE
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("nobody-7b", "unknown model preset 'nobody-7b'; known: tiny"),
        ("./nowhere", "not a directory"),
    ],
)
def test_an_unknown_model(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", model]) == EXIT_USAGE
    assert text in capsys.readouterr().err


# --- a benchmark whose workers do not do what they should -----------------------------------------

_BROKEN: Mapping[str, tuple[dict[str, str], str]] = {
    "engine killed": (
        {"WEIGHTSYNC_FAULT": "engine.prepare=kill"},
        r"engine 127.*stage 'prepare and commit'",
    ),
    "trainer killed": ({"WEIGHTSYNC_FAULT": "trainer.moved=kill"}, r"trainer process ended.* -9"),
}


@pytest.mark.parametrize("what", _BROKEN)
def test_bench_with_a_worker_that_dies_fails(runner: Runner, what: str) -> None:
    env, text = _BROKEN[what]
    done = bench(runner, "--transport", "ipc", **env)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert re.search(text, done.stderr), done.stderr


def test_bench_with_an_engine_that_holds_other_bytes_is_not_verified(runner: Runner) -> None:
    done = bench(runner, "--transport", "ipc", LYING_ENGINE="1")
    assert done.returncode == EXIT_FAILED, done.stderr
    assert re.search("(?i)not verified|verified.*(no|false)", done.stdout), done.stdout
