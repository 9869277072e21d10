"""What every test shares: an environment that stays on this machine, and the gpu marker."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before anything is imported that reads them: nothing here may leave the loopback interface.
for _name, _value in {
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)
for _name in ("WEIGHTSYNC_TOKEN", "WEIGHTSYNC_FAULT"):
    os.environ.pop(_name, None)

# A loaded machine is no failure; the seeds of failures are kept by hypothesis itself.
settings.register_profile("weightsync", deadline=None, max_examples=50)
settings.load_profile("weightsync")


def _has_gpu() -> bool:
    from weightsync import native

    return native.has_cuda()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or a build without CUDA"))


def pytest_collection_finish() -> None:
    """What collecting imported stays until the end.

    Garbage is looked for at the end of many tests, and would be looked for through all of it each time.
    """
    gc.collect()
    gc.freeze()


# --- object storage: a real S3-compatible server of this machine, and fsspec's own memory ----------------


@pytest.fixture(scope="module")
def object_server() -> Iterator[str]:
    """The address of a local server that speaks S3."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    found = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


@pytest.fixture(params=["s3", "memory"])
def object_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place of its own."""
    fsspec = pytest.importorskip("fsspec")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/weights"
    for name, value in {
        "AWS_ENDPOINT_URL": request.getfixturevalue("object_server"),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex}"
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.clear_instance_cache()
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/weights"
