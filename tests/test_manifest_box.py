"""Manifests wait for whoever needs them, and whoever needs them waits."""

from __future__ import annotations

import threading
import time

from weightsync.manifest_box import ManifestBox

LIMIT_S = 10.0


def never() -> bool:
    return False


def soon() -> float:
    return time.monotonic() + LIMIT_S


def test_what_is_there_is_had_at_once_and_stays() -> None:
    box = ManifestBox()
    box.put("one", [1])
    assert [box.wait("one", 0.0, never) for _ in range(2)] == [[1], [1]]
    box.put("one", [2])
    assert box.wait("one", 0.0, never) == [2]


def test_who_waits_is_woken() -> None:
    box, found = ManifestBox(), []
    thread = threading.Thread(target=lambda: found.append(box.wait("one", soon(), never)))
    thread.start()
    box.put("other", [0])
    box.put("one", [1])
    thread.join(LIMIT_S)
    assert found == [[1]]


def test_a_wait_ends_with_its_time_or_with_the_session() -> None:
    box = ManifestBox()
    assert box.wait("one", time.monotonic() + 0.01, never) is None
    over = threading.Event()
    threading.Timer(0.1, over.set).start()
    start_s = time.monotonic()
    assert box.wait("one", soon(), over.is_set) is None
    assert time.monotonic() - start_s < LIMIT_S / 2


def test_only_the_newest_are_kept() -> None:
    box = ManifestBox()
    for i in range(4):
        box.put(str(i), [i])
    box.put("2", [5])  # it is the newest again
    box.put("4", [4])
    assert [box.wait(str(i), 0.0, never) for i in range(5)] == [None, None, [5], None, [4]]
