"""The engine: what is generated does not depend on how, and what is said about it is true."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_engines import alone, log_probs, params, prompts, same, small_engine, small_model
from core_models import torch

from engine_adapter.core.engine import Engine
from engine_adapter.core.request import FinishReason, VersionSpan
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.errors import BusyError, DeadlineError, RequestFailedError, TaintedError
from weightsync.session import Version
from weightsync.types import PauseMode

DTYPES = ("bfloat16", "float32")
LENGTHS = (12, 16, 33, 1, 70, 17)
V1, V2 = Version("run", 1), Version("run", 2)


@pytest.fixture(scope="module", params=DTYPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Any]:
    """Each prompt alone in a fresh engine, at temperature 0.8."""
    return [alone(directory, p, temperature=0.8) for p in prompts(*LENGTHS)]


# --- nothing depends on the batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_step_tokens": 16},  # prefill in many chunks
        {"max_step_tokens": 7, "page_size": 64},
        {"kv_cache_tokens": 112},  # too little for all: some are retracted
        {"max_running": 2},
        {"prefix_reuse": "never"},
    ],
    ids=str,
)
def test_outputs_are_those_of_each_prompt_alone(
    directory: Path, expected: list[Any], settings: dict[str, Any]
) -> None:
    engine = small_engine(directory, **settings)
    outputs = engine.generate(prompts(*LENGTHS), params(temperature=0.8))
    assert [same(a, b) for a, b in zip(outputs, expected, strict=True)] == [True] * len(LENGTHS)
    if "kv_cache_tokens" in settings:
        assert sum(output.num_retracted for output in outputs) > 0
    again = engine.generate(prompts(*LENGTHS)[::-1], params(temperature=0.8))
    assert all(same(a, b) for a, b in zip(again[::-1], expected, strict=True))


def test_threads_do_not_make_a_row_depend_on_its_batch(directory: Path) -> None:
    torch.set_num_threads(3)
    try:
        asked = prompts(40, 3, 70)
        together = small_engine(directory).generate(asked, params(max_tokens=3))
        for prompt, output in zip(asked, together, strict=True):
            assert same(output, alone(directory, prompt, max_tokens=3))
    finally:
        torch.set_num_threads(1)


def test_score_gives_the_bits_that_generate_reported(directory: Path, expected: list[Any]) -> None:
    engine = small_engine(directory, max_step_tokens=50, max_logit_rows=40)
    sequences = [[*o.prompt_token_ids, *o.token_ids] for o in expected]
    for scored, output in zip(
        engine.score(sequences, params(temperature=0.8)), expected, strict=True
    ):
        assert scored.log_probs[len(output.prompt_token_ids) - 1 :] == output.log_probs
        assert scored.finish_reason is FinishReason.SCORED
        assert len(scored.log_probs) == len(scored.prompt_token_ids) - 1


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_and_an_identity_update_change_no_bit(
    directory: Path, expected: list[Any], mode: PauseMode
) -> None:
    engine = small_engine(directory)
    submission = engine.submit(prompts(*LENGTHS), params(temperature=0.8))
    for number in range(1, 4):
        for _ in range(3):
            assert engine.step()
        engine.pause(mode)
        assert not engine.step()
        if mode is PauseMode.RETRACT:
            engine.flush_cache()
        for name in list(engine.model.slots.slots):
            engine.model.slots.write(name, engine.model.slots.slot(name).read_whole().clone())
        engine.set_version(Version("run", number))
        engine.resume()
    outputs = engine.wait(submission)
    assert all(same(a, b) for a, b in zip(outputs, expected, strict=True))
    assert [s.version for s in outputs[0].version_spans] == [
        None,
        *(Version("run", n) for n in (1, 2, 3)),
    ]
    assert {o.has_stale_kv for o in outputs} == {mode is PauseMode.IN_PLACE}
    assert sum(o.num_retracted for o in outputs) == (0 if mode is PauseMode.IN_PLACE else 18)


def test_other_attention_says_nearly_the_same(bf16: Path) -> None:
    (output,) = small_engine(bf16).generate(prompts(40), params(temperature=0.0))
    engine = small_engine(bf16, attention="reference")
    (scored,) = engine.score([[*output.prompt_token_ids, *output.token_ids]])
    for ours, theirs in zip(log_probs(output), log_probs(scored)[39:], strict=True):
        assert abs(ours - theirs) < 0.1


# --- sampling through the engine ----------------------------------------------------------------------


def test_sample_i_of_n_has_seed_plus_i(bf16: Path) -> None:
    engine = small_engine(bf16)
    outputs = engine.generate(prompts(40), params(n=4, seed=100))
    assert [o.seed for o in outputs] == [100, 101, 102, 103]
    assert [o.sample_index for o in outputs] == [0, 1, 2, 3]
    assert len({o.token_ids for o in outputs}) == 4
    assert [o.num_cached_tokens for o in outputs] == [0, 32, 32, 32]
    for output in outputs:
        assert same(output, alone(bf16, prompts(40)[0], seed=output.seed))


def test_seeds_that_are_drawn_differ_and_are_reported(bf16: Path) -> None:
    engine = small_engine(bf16)
    outputs = engine.generate(prompts(9) * 3, params(seed=None))
    assert len({o.token_ids for o in outputs}) == 3
    assert same(outputs[2], alone(bf16, prompts(9)[0], seed=outputs[2].seed))
    again = small_engine(bf16).generate(prompts(9) * 3, params(seed=None))
    assert [o.seed for o in again] == [o.seed for o in outputs]
    other = small_engine(bf16, seed=1).generate(prompts(9), params(seed=None))
    assert other[0].seed != outputs[0].seed


def test_top_log_probs_and_temperature_are_reported(bf16: Path) -> None:
    (output,) = small_engine(bf16).generate(
        prompts(20), params(temperature=0.5, top_log_probs=4, max_tokens=3)
    )
    for result in output.log_probs:
        assert len(result.top) == 4
        assert list(result.top) == sorted(result.top, key=lambda pair: -pair[1])
        assert result.tempered != result.log_prob
        if result.token in dict(result.top):
            assert dict(result.top)[result.token] == result.log_prob


def test_stop_tokens_min_tokens_and_eos(bf16: Path) -> None:
    engine = small_engine(bf16)
    (free,) = engine.generate(prompts(20), params(temperature=0.0, max_tokens=30))
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    (cut,) = engine.generate(prompts(20), params(temperature=0.0, stop_token_ids=stop))
    assert cut.token_ids == free.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stopped_by) == (FinishReason.STOP_TOKEN, stop)
    (held,) = engine.generate(
        prompts(20), params(temperature=0.0, stop_token_ids=stop, min_tokens=first + 3)
    )
    assert stop not in held.token_ids[: first + 3]
    assert len(held.token_ids) >= first + 3
    (ignoring,) = engine.generate(
        prompts(20), params(temperature=0.0, max_tokens=8, stop_token_ids=())
    )
    assert ignoring.finish_reason is FinishReason.LENGTH


def test_eos_of_the_model_ends_a_request_unless_ignored(bf16: Path) -> None:
    engine = small_engine(bf16)
    (free,) = engine.generate(prompts(20), params(temperature=0.0))
    engine._builder._eos_token_ids = (free.token_ids[2],)
    (ended,) = engine.generate(prompts(20), params(temperature=0.0, ignore_eos=False))
    assert ended.finish_reason is FinishReason.STOP_TOKEN
    assert len(ended.token_ids) <= 3
    (ignoring,) = engine.generate(prompts(20), params(temperature=0.0))
    assert ignoring.token_ids == free.token_ids


# --- versions and prefixes ----------------------------------------------------------------------------


def test_a_prefix_of_other_weights_is_not_used_unless_asked(bf16: Path, tmp_path: Path) -> None:
    prompt = prompts(50)
    fresh = alone(small_model_b(tmp_path), prompt[0])
    for reuse, cached in (("same_version", 0), ("any_version", 48)):
        engine = small_engine(bf16, prefix_reuse=reuse)
        engine.set_version(V1)
        (before,) = engine.generate(prompt, params())
        assert engine.generate(prompt, params())[0].num_cached_tokens == 48
        load_b(engine)
        engine.set_version(V2)
        (after,) = engine.generate(prompt, params())
        assert after.num_cached_tokens == cached
        assert after.version_at_admission == V2
        assert after.version_spans == (VersionSpan(V2, 0, 12),)
        assert after.has_stale_kv is (cached > 0)
        assert same(after, fresh) is (cached == 0)
        assert not same(after, before)


def small_model_b(directory: Path) -> Path:
    from core_models import make_model, save_model

    return save_model(make_model("dense", torch.bfloat16, seed=9), directory / "b")


def load_b(engine: Engine) -> None:
    from core_models import make_model

    for name, tensor in make_model("dense", torch.bfloat16, seed=9).state_dict().items():
        engine.model.slots.write(name, tensor)


def test_in_place_pause_refuses_a_flush_and_spans_name_both_versions(bf16: Path) -> None:
    engine = small_engine(bf16)
    engine.set_version(V1)
    submission = engine.submit(prompts(20), params())
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.IN_PLACE)
    with pytest.raises(BusyError, match="1 requests hold KV"):
        engine.flush_cache()
    load_b(engine)
    engine.set_version(V2)
    engine.resume()
    (output,) = engine.wait(submission)
    assert [s.version for s in output.version_spans] == [V1, V2]
    assert output.version_spans[0].first == 0
    assert output.version_spans[-1].end == 12
    assert output.has_stale_kv
    assert output.version_at_admission == V1


def test_pause_abort_hands_back_what_there_is(bf16: Path) -> None:
    engine = small_engine(bf16)
    submission = engine.submit(prompts(20, 30), params())
    for _ in range(6):
        engine.step()
    engine.pause(PauseMode.ABORT)
    outputs = engine.wait(submission)
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORTED}
    assert all(0 < len(o.token_ids) < 12 for o in outputs)
    engine.flush_cache()
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages
    engine.resume()
    assert same(engine.generate(prompts(20), params())[0], alone(bf16, prompts(20)[0]))


# --- streams and threads ------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_output(bf16: Path) -> None:
    engine = small_engine(bf16)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    last = {}
    for chunk in engine.stream(prompts(20), params(n=2)):
        tokens[chunk.sample_index].extend(chunk.token_ids)
        assert len(chunk.token_ids) == len(chunk.log_probs) <= 1
        if chunk.output is not None:
            last[chunk.sample_index] = chunk.output
    assert {i: tuple(found) for i, found in tokens.items()} == {
        i: o.token_ids for i, o in last.items()
    }


def test_closing_a_stream_ends_its_request(bf16: Path) -> None:
    engine = small_engine(bf16)
    stream: Iterator[Any] = engine.stream(prompts(20), params(max_tokens=100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.scheduler.running
    assert engine.scheduler.pool.num_held == 0


def test_many_threads_share_a_started_engine(bf16: Path, tmp_path: Path) -> None:
    lengths = [3 + 5 * i for i in range(8)]
    wanted = [alone(bf16, p) for p in prompts(*lengths)]
    found: dict[int, Any] = {}

    def ask(index: int) -> None:
        found[index] = engine.generate(prompts(*lengths)[index], params())[0]

    with small_engine(bf16) as engine:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(lengths))]
        for thread in threads:
            thread.start()
        for number in range(1, 20):
            engine.pause(PauseMode.RETRACT)
            engine.set_version(Version("run", number))
            engine.resume()
        for thread in threads:
            thread.join(60)
        streamed = list(engine.stream(prompts(3), params()))
    assert all(same(found[i], wanted[i]) for i in range(len(lengths)))
    assert streamed[-1].output is not None
    assert same(streamed[-1].output, wanted[0])
    assert not engine._loop.is_started


def test_calls_at_a_boundary_come_back_with_result_or_error(bf16: Path) -> None:
    with small_engine(bf16) as engine:
        assert engine.at_boundary(lambda: engine.at_boundary(lambda: 41) + 1) == 42
        with pytest.raises(ZeroDivisionError):
            engine.at_boundary(lambda: 1 // 0)
        assert len(engine.generate(prompts(4), params())) == 1


def test_a_pause_that_cannot_begin_in_time_says_so_and_the_engine_runs_on(bf16: Path) -> None:
    engine = small_engine(bf16)
    is_inside, may_go = threading.Event(), threading.Event()
    plain = engine.runner.run

    def slow(plan: Any) -> Any:
        is_inside.set()
        assert may_go.wait(30)
        return plain(plan)

    engine.runner.run = slow  # type: ignore[method-assign]
    with engine:
        submission = engine.submit(prompts(4), params(max_tokens=2))
        assert is_inside.wait(30)
        with pytest.raises(DeadlineError, match="step boundary"):
            engine.pause(PauseMode.RETRACT, limit_s=0.05)
        may_go.set()
        assert engine.wait(submission)[0].finish_reason is FinishReason.LENGTH
        assert not engine.is_paused


def test_a_paused_engine_ends_the_wait_at_its_deadline(bf16: Path) -> None:
    engine = small_engine(bf16)
    engine.pause(PauseMode.RETRACT)
    with pytest.raises(DeadlineError, match="generate"):
        engine.generate(prompts(4), params(), limit_s=0.2)
    assert not engine.scheduler.waiting


# --- failures -----------------------------------------------------------------------------------------


def poisoned(directory: Path, token: int = 7) -> Engine:
    """An engine whose embedding of one token is NaN."""
    engine = small_engine(directory)
    engine.model.embed_tokens[token] = torch.nan
    return engine


def test_nan_logits_fail_their_request_by_name_and_no_other(bf16: Path) -> None:
    clean = [p for p in prompts(20, 21, 22, 23) if 7 not in p]
    assert len(clean) >= 2
    wanted = [alone(bf16, p, max_tokens=4) for p in clean]
    engine = poisoned(bf16)
    with pytest.raises(
        RequestFailedError, match=r"1 of 3 .* request 'r2': the logits .* NaN"
    ) as caught:
        engine.generate([clean[0], [7, 8, 9], clean[1]], params(max_tokens=4))
    outputs = caught.value.outputs
    assert [o.finish_reason for o in outputs] == ["length", "failed", "length"]
    assert same(outputs[0], wanted[0])
    assert same(outputs[2], wanted[1])
    assert outputs[1].error.startswith("request 'r2'")
    again = engine.generate([clean[0]], params(max_tokens=4))
    assert same(again[0], wanted[0])
    assert engine.scheduler.pool.num_held == 0


def test_rows_after_a_failed_one_are_not_reported(bf16: Path) -> None:
    engine = small_engine(bf16)
    plain = engine.runner.run

    def damaged(plan: Any) -> Any:
        found = plain(plan)
        return [*found[:2], (found[2][0], None), *found[3:]]

    engine.runner.run = damaged  # type: ignore[method-assign]
    with pytest.raises(
        RequestFailedError, match="'r1': the logits for its token 3 hold NaN"
    ) as caught:
        engine.score(prompts(9))
    (output,) = caught.value.outputs
    assert len(output.log_probs) == 2
    assert output.finish_reason is FinishReason.FAILED


def test_a_refusing_engine_fails_everybody_with_the_reason(bf16: Path) -> None:
    engine = small_engine(bf16)
    submission = engine.submit(prompts(20), params())
    engine.step()
    engine.refuse("update 7 failed after the first byte")
    with pytest.raises(TaintedError, match="update 7 failed"):
        engine.wait(submission)
    with pytest.raises(TaintedError, match="update 7 failed"):
        engine.generate(prompts(20), params())
    engine.refuse(None)
    assert same(engine.generate(prompts(20), params())[0], alone(bf16, prompts(20)[0]))


def test_a_step_that_raises_fails_its_requests_and_the_thread_lives_on(
    bf16: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small_engine(bf16)
    plain, calls = engine.runner.run, iter([True])

    def broken(plan: Any) -> Any:
        if next(calls, False):
            raise RuntimeError("no kernel")
        return plain(plan)

    engine.runner.run = broken  # type: ignore[method-assign]
    with engine:
        with pytest.raises(
            RequestFailedError, match=r"'r1': its step failed: RuntimeError: no kernel"
        ):
            engine.generate(prompts(4), params())
        assert len(engine.generate(prompts(4), params())[0].token_ids) == 12
    assert "no kernel" in caplog.text


def test_no_prompts_are_no_outputs(bf16: Path) -> None:
    assert small_engine(bf16).generate([], SamplingParams()) == []


def test_a_closed_engine_fails_what_is_left_and_takes_nothing_new(directory: Path) -> None:
    engine = small_engine(directory)
    left = engine.submit(prompts(5), params(max_tokens=100))
    engine.step()
    engine.close()
    engine.close()
    with pytest.raises(TaintedError, match="it was closed"):
        engine.wait(left)
    with pytest.raises(TaintedError, match="it was closed"):
        engine.generate(prompts(5), params())
