"""Stages that are asked for together: what one exchange does, and when a trainer makes one of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from updating import (
    OPTIONS,
    connected,
    digests,
    engine_of,
    failed_refit,
    faulty,
    only,
    refit,
    weights,
)

from engine_adapter.fake import FakeEngine
from weightsync.control import HttpClient, wait_for_stages
from weightsync.errors import (
    DeadlineError,
    IntegrityError,
    PeerLostError,
    ProtocolError,
    SessionError,
    UpdateFailedError,
)
from weightsync.messages import (
    AbortRequest,
    BeginRequest,
    CommitRequest,
    HeartbeatRequest,
    MoveRequest,
    PrepareRequest,
    Request,
    Stage,
    StagesRequest,
    WrittenList,
    decode,
    decode_stage,
    encode,
    encode_stage,
    name_of,
    request_json,
    verb_of,
)
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.transports.loopback import Fault
from weightsync.types import Outcome

__all__ = ["faulty"]

# --- on the wire ------------------------------------------------------------------------------------


def test_stages_survive_the_wire_and_keep_their_order() -> None:
    stages: list[Stage] = [PrepareRequest("s", [{"root": "r"}], 1.0), CommitRequest("s", 2.0)]
    request = StagesRequest([encode_stage(stage) for stage in stages], 5.0)
    arrived = decode(StagesRequest, json.loads(request_json(request)))
    assert [decode_stage(entry) for entry in arrived.stages] == stages
    assert name_of(request) == "prepare and commit"


@pytest.mark.parametrize(
    "entry",
    [None, [], "commit", {}, {"verb": ["commit"]}, {"verb": "stages", "stages": [], "wait_s": 1.0},
     {**encode(AbortRequest("s", "", 1.0)), "verb": "abort"}],
)  # fmt: skip
def test_what_is_no_stage_is_refused(entry: Any) -> None:
    with pytest.raises(ProtocolError, match="is no stage; known: begin, move, prepare, commit"):
        decode_stage(entry)


def test_a_stage_is_checked_like_any_request() -> None:
    good = encode_stage(CommitRequest("s", 1.0))
    with pytest.raises(ProtocolError, match="'wait_s' is missing"):
        decode_stage({k: v for k, v in good.items() if k != "wait_s"})


@pytest.mark.parametrize("text", ['say "null"', '"stages":null', "\u2028"])
def test_what_was_written_ahead_is_what_would_be_written_now(text: str) -> None:
    listed = [{"plans": [text], "digests": "AAAA", "root": "r"}]
    alone = PrepareRequest(text, listed, 5.0)
    ahead = PrepareRequest(text, WrittenList(listed), 5.0)
    for plain, written in (
        (alone, ahead),
        (StagesRequest([encode_stage(alone)], 1.0), StagesRequest([encode_stage(ahead)], 1.0)),
    ):
        assert json.loads(request_json(written)) == json.loads(json.dumps(encode(plain)))


# --- the trainer's waiting --------------------------------------------------------------------------


class Script:
    """An engine that answers what it was told to, and notes what it was asked."""

    peer = "engine e"
    is_remote = True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.limits: list[float] = []

    def call(self, request: Request, *, limit_s: float) -> dict[str, Any]:
        assert isinstance(request, StagesRequest)
        self.asked.append([str(entry["verb"]) for entry in request.stages])
        self.limits.append(limit_s)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        found: dict[str, Any] = answer
        return found

    def close(self) -> None: ...


MAKERS: list[Callable[[float], Any]] = [
    lambda wait_s: PrepareRequest("s", [], wait_s),
    lambda wait_s: CommitRequest("s", wait_s),
]


def ask(client: Script, limit_s: float = 60.0) -> list[dict[str, Any]]:
    return wait_for_stages(client, MAKERS, limit_s=limit_s, stage="prepare and commit")


def test_what_was_answered_is_not_asked_for_again() -> None:
    client = Script(
        {"answers": [], "pending": True},
        {"answers": [{"phase": "prepared"}], "pending": True},
        {"answers": [], "pending": True},
        {"answers": [{"outcome": "committed"}]},
    )
    assert ask(client) == [{"phase": "prepared"}, {"outcome": "committed"}]
    both = ["prepare", "commit"]
    assert client.asked == [both, both, ["commit"], ["commit"]]
    assert max(client.limits) <= 10.0


def test_an_exchange_that_got_no_answer_is_made_again() -> None:
    lost = DeadlineError("engine e", "prepare and commit", 5.0, 5.0)
    lost.__cause__ = TimeoutError()
    client = Script(lost, {"answers": [{}, {}]})
    assert ask(client) == [{}, {}]


def test_stages_have_one_limit() -> None:
    client = Script(*[{"answers": [], "pending": True}] * 10**5)
    with pytest.raises(DeadlineError, match=r"engine e: .*'prepare and commit'.*limit 0\.1"):
        ask(client, limit_s=0.1)


@pytest.mark.parametrize(
    "answer",
    [{}, {"answers": 3}, {"answers": [3, 4]}, {"answers": [{}]}, {"answers": [{}, {}, {}]},
     {"answers": [{}, {}], "pending": True}],
)  # fmt: skip
def test_an_answer_that_does_not_fit_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="engine e: "):
        ask(Script(answer))


# --- the engine -------------------------------------------------------------------------------------


def begin(receiver: Receiver, session_id: str) -> BeginRequest:
    return BeginRequest("run", receiver.epoch, session_id, 1, None, "staged", "read", "retract",
                        20.0, 20.0, 5.0)  # fmt: skip


def test_nothing_follows_a_stage_that_failed() -> None:
    with (
        Receiver(engine_of(0)) as receiver,
        Sender.connect([receiver.url], run_id="run", **OPTIONS),
    ):
        stages: list[Stage] = [
            begin(receiver, "one"),
            begin(receiver, "two"),
            CommitRequest("one", 5.0),
        ]
        client = HttpClient(receiver.url, None)
        with pytest.raises(Exception, match="session 'one' of version 1 is open"):
            client.call(StagesRequest([encode_stage(s) for s in stages], 5.0), limit_s=20.0)
        assert client.call(StagesRequest([], 1.0), limit_s=20.0) == {"answers": []}
        client.close()
        assert receiver._leader.phase == "open", "the commit was not looked at"


def test_a_stage_that_is_not_over_in_time_is_pending() -> None:
    engine = engine_of(0)
    with (
        Receiver(engine) as receiver,
        Sender.connect([receiver.url], run_id="run", **OPTIONS),
        engine.gate.step(),
    ):
        in_place = encode_stage(begin(receiver, "one")) | {"placement": "in_place"}
        commit = encode_stage(CommitRequest("one", 5.0))
        answer = receiver.handle(StagesRequest([in_place, commit], 0.05))
        assert answer == {"answers": [], "pending": True}


# --- both -------------------------------------------------------------------------------------------


class Listening(Receiver):
    """Notes the stages that a trainer elsewhere asks for."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.heard: list[str] = []

    def _serve(self, request: Request) -> Any:
        if not isinstance(request, HeartbeatRequest):
            self.heard.append(name_of(request))
        return super()._serve(request)

    def stages(self) -> list[str]:
        heard, self.heard = self.heard, []
        return [name for name in heard if name not in ("connect", "attach", "plan")]


def test_one_trainer_and_one_engine_need_two_exchanges() -> None:
    engine = engine_of(0)
    with Listening(engine) as receiver:
        with Sender.connect([receiver.url], contract="direct", **OPTIONS) as sender:
            for version in (1, 2):
                report = only(refit(sender, version, weights(version)))
                assert receiver.stages() == ["begin and move", "prepare and commit"]
                assert engine.generate() == (version, digests(weights(version)))
                assert {"begin", "move", "prepare", "commit"} <= report.phases.keys()
                assert report.path == "copy"
        receiver.stages()
        with Sender.connect([receiver.url], contract="stream", run_id="s", **OPTIONS) as sender:
            refit(sender, 3, weights(3))
            assert receiver.stages() == ["begin", "move", "prepare and commit"]


def test_several_parts_are_begun_with_the_first() -> None:
    with (
        Listening(engine_of(0)) as receiver,
        Sender.connect([receiver.url], contract="direct", **OPTIONS) as sender,
    ):
        with sender.update(version=1) as update:
            for name, array in weights(1).items():
                update.send({name: array})
        assert receiver.stages() == [
            "begin and move", *["move"] * 4, "prepare and commit",
        ]  # fmt: skip


def test_several_engines_are_asked_stage_by_stage() -> None:
    with (
        Listening(engine_of(0)) as first,
        Listening(engine_of(1)) as second,
        Sender.connect([first.url, second.url], contract="direct", **OPTIONS) as sender,
    ):
        refit(sender, 1, weights(1))
        for receiver in (first, second):
            assert receiver.stages() == ["begin", "move", "prepare", "commit"]


def test_an_engine_of_before_is_asked_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Receiver._description

    def former(self: Receiver) -> dict[str, Any]:
        return {k: v for k, v in described(self).items() if k != "joins_stages"}

    monkeypatch.setattr(Receiver, "_description", former)
    with (
        Listening(engine_of(0)) as receiver,
        Sender.connect([receiver.url], contract="direct", **OPTIONS) as sender,
    ):
        refit(sender, 1, weights(1))
        assert receiver.stages() == ["begin", "move", "prepare", "commit"]


def test_what_fails_in_prepare_is_not_committed(faulty: Callable[..., None]) -> None:
    engine = engine_of(0)
    faulty(reads={2: Fault.CORRUPT})
    with connected(engine, placement="staged", contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        error = failed_refit(sender, 2, weights(2))
        assert isinstance(error.__cause__, IntegrityError)
        assert only(error.report).outcome is Outcome.ABORTED
        assert engine.generate() == (1, digests(weights(1)))
        refit(sender, 3, weights(3))
        assert engine.generate() == (3, digests(weights(3)))


class LosesAnswers(HttpClient):
    """Carries a kind of request out and loses the answer, once."""

    lost: str = ""

    def call(self, request: Request, *, limit_s: float) -> dict[str, Any]:
        answer = super().call(request, limit_s=limit_s)
        if name_of(request) == self.lost:
            LosesAnswers.lost = ""
            raise PeerLostError(f"the answer to {verb_of(request)} was lost")
        return answer


@pytest.mark.parametrize(
    ("lost", "committed"), [("begin and move", False), ("prepare and commit", True)]
)
def test_an_answer_that_was_lost(lost: str, committed: bool, monkeypatch: Any) -> None:
    """What was asked for was done; the commit above all."""
    monkeypatch.setattr("weightsync.sender.HttpClient", LosesAnswers)
    engine = engine_of(0)
    with connected(engine, placement="staged", contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        monkeypatch.setattr(LosesAnswers, "lost", lost)
        if committed:
            assert only(refit(sender, 2, weights(2))).outcome is Outcome.COMMITTED
            assert engine.generate() == (2, digests(weights(2)))
        else:
            with pytest.raises((PeerLostError, UpdateFailedError)):
                refit(sender, 2, weights(2))
            assert engine.generate() == (1, digests(weights(1)))
        refit(sender, 3, weights(3))
        assert engine.generate() == (3, digests(weights(3)))


def test_an_engine_that_let_the_run_go_is_connected_again() -> None:
    engine = engine_of(0)
    with (
        Listening(engine) as receiver,
        Sender.connect([receiver.url], contract="direct", **OPTIONS) as sender,
    ):
        refit(sender, 1, weights(1))
        receiver._machines.run_lost(str(receiver._machines.tag), "a test says so")
        receiver.heard.clear()
        refit(sender, 2, weights(2))
        assert receiver.heard[0] == "begin and move"
        assert receiver.heard[1] == "connect"
        assert receiver.stages()[-2:] == ["begin and move", "prepare and commit"]
        assert engine.generate() == (2, digests(weights(2)))


def test_prepare_and_commit_are_asked_again_when_all_is_done() -> None:
    """Their answer was lost: the same comes again, and nothing is done twice."""
    with (
        Receiver(engine_of(0)) as receiver,
        Sender.connect([receiver.url], run_id="run", **OPTIONS) as sender,
    ):
        session_id = only(refit(sender, 1, weights(1))).session_id
        again = [
            encode_stage(stage)
            for stage in (PrepareRequest(session_id, [{}], 5.0), CommitRequest(session_id, 5.0))
        ]
        answers = receiver.handle(StagesRequest(again, 5.0))["answers"]
        assert answers[0]["phase"] == "prepared"
        assert answers[1]["outcome"] == "committed"
        assert answers[1]["stats"]


def test_a_session_that_ended_takes_no_further_stage() -> None:
    with (
        Receiver(engine_of(0)) as receiver,
        Sender.connect([receiver.url], run_id="run", **OPTIONS) as sender,
    ):
        report = refit(sender, 1, weights(1))
        entry = encode_stage(MoveRequest(only(report).session_id, 1, "", [], 5.0))
        with pytest.raises(SessionError, match="ended: committed"):
            receiver.handle(StagesRequest([entry], 5.0))
