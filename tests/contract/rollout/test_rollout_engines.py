"""What every engine owes behind RolloutService: one test body for that without a model, the embedded one and vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import chat_pb2, trajectory_pb2

from services.common.errors import Conflict, Unavailable
from tests.contract.rollout.rollout_engines import TOKENIZER, Worker, decode, real_worker, simulated_worker
from tests.tiny.models import BOS, EOS, render

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROMPT = [1, 20, 21, 22]
STOP, LENGTH = trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["simulated", "transformers", pytest.param("vllm", marks=pytest.mark.slow)],
)
async def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    made: Any = simulated_worker()
    if request.param != "simulated":
        made = real_worker(tmp_path_factory.mktemp("engine"), request.param)
    async with made as it:
        with pytest.raises(Unavailable, match="STALE"):
            await it.ask()
        await it.publish(0)
        yield it


def answer(trajectory: trajectory_pb2.Trajectory) -> list[int]:
    """The sampled ids."""
    return list(trajectory.token_ids[len(PROMPT) :])


async def test_trajectories_are_whole(worker: Worker) -> None:
    found = await worker.ask(samples=4, first_sample_number=2, prompt=PROMPT)
    assert [t.sample_number for t in found] == [2, 3, 4, 5]
    assert len({t.seed for t in found}) == 4
    for t in found:
        sampled = len(t.token_ids) - 4
        assert list(t.token_ids[:4]) == PROMPT and sampled == 12
        assert list(t.loss_mask) == [False] * 4 + [True] * sampled
        assert list(t.behavior_logprobs[:4]) == [0.0] * 4 and len(t.behavior_logprobs) == 16
        assert all(value < 0 for value in t.behavior_logprobs[4:])
        assert [(s.start, s.end, s.policy_version) for s in t.version_spans] == [(4, 16, 0)]
        assert (t.prompt_id.dataset, t.prompt_id.row, t.worker_id) == ("train", 0, "rollout-0")


async def test_siblings_rows_and_runs_differ_and_each_is_the_same_again(worker: Worker) -> None:
    """M28: an own stream for each sample, and the same one wherever and whenever it is drawn."""
    several = [await worker.ask(samples=4), await worker.ask(samples=4, row=1), await worker.ask(samples=4, run_seed=8)]
    assert len({tuple(answer(t)) for found in several for t in found}) == 12
    again = await worker.ask(samples=4)
    assert [t.token_ids for t in again] == [t.token_ids for t in several[0]]
    alone = [(await worker.ask(samples=1, first_sample_number=n))[0] for n in range(4)]
    assert [t.token_ids for t in alone] == [t.token_ids for t in again]


async def test_nothing_is_appended_at_the_limit(worker: Worker) -> None:
    """M19: what is trained on is what was sampled."""
    longer = await worker.ask(max_tokens=12)
    for long, short in zip(longer, await worker.ask(max_tokens=4), strict=True):
        assert answer(short) == answer(long)[:4]
        assert (short.finish_reason, short.stop_string) == (LENGTH, "")


async def test_a_stop_token_is_the_last_and_trained_on(worker: Worker) -> None:
    """M20: masks come from lengths, also where the stop token pads or begins a prompt."""
    (free,) = await worker.ask(samples=1)
    stop = answer(free)[5]
    end = answer(free).index(stop) + 1
    (stopped,) = await worker.ask(samples=1, stop=[stop, 3])
    assert answer(stopped) == answer(free)[:end]
    assert (stopped.finish_reason, stopped.stop_string) == (STOP, "")
    assert sum(stopped.loss_mask) == end and len(stopped.behavior_logprobs) == 4 + end
    prompt = [stop, stop, *PROMPT, stop]
    (after,) = await worker.ask(samples=1, prompt=prompt, stop=[stop])
    assert list(after.loss_mask[:7]) == [False] * 7 and len(after.token_ids) > 7


async def test_a_stop_string_ends_with_the_token_that_completes_it(worker: Worker) -> None:
    """It straddles tokens, and may hold special ones; nothing is cut."""
    (free,) = await worker.ask(samples=1)
    ids = answer(free)
    text = decode(ids[2:5])
    (stopped,) = await worker.ask(samples=1, stop_strings=["never", text])
    whole = decode(answer(stopped))
    assert answer(stopped) == ids[: len(answer(stopped))] and 3 <= len(answer(stopped)) <= 5
    assert whole.endswith(text) and text not in decode(answer(stopped)[:-1])
    assert (stopped.finish_reason, stopped.stop_string) == (STOP, text)
    assert stopped.behavior_logprobs[:] == pytest.approx(free.behavior_logprobs[: len(stopped.token_ids)], abs=1e-4)
    (other,) = await worker.ask(samples=1, stop_strings=["never"])
    assert answer(other) == ids and other.finish_reason == LENGTH


async def test_a_stop_string_at_the_limit_is_a_stop(worker: Worker) -> None:
    (free,) = await worker.ask(samples=1)
    text = decode(answer(free)[3:6])
    first = next(n for n in range(1, 13) if text in decode(answer(free)[:n]))
    (stopped,) = await worker.ask(samples=1, stop_strings=[text], max_tokens=first)
    assert (stopped.finish_reason, stopped.stop_string, len(answer(stopped))) == (STOP, text, first)


async def test_a_stop_string_is_not_looked_for_in_the_prompt(worker: Worker) -> None:
    (found,) = await worker.ask(samples=1, prompt=PROMPT, stop_strings=[decode(PROMPT[1:])], max_tokens=3)
    assert (found.finish_reason, len(answer(found))) == (LENGTH, 3)


async def test_ids_go_in_and_come_out_as_they_are(worker: Worker) -> None:
    """M38: special tokens and what no tokenizer would write in a row included."""
    prompt = [TOKENIZER.token_to_id(token) for token in (EOS, BOS, BOS)] + [0, 7, 2, 2]
    (found,) = await worker.ask(samples=1, prompt=prompt, max_tokens=2)
    assert list(found.token_ids[:7]) == prompt


async def test_a_conversation_has_one_beginning(worker: Worker) -> None:
    """M37: as many beginning-of-sequence tokens as the template writes."""
    message = chat_pb2.ChatMessage(role="user", content="abc")
    request = rollout_pb2.EncodeRequest(conversations=[chat_pb2.Conversation(messages=[message])])
    (encoded,) = (await worker.call("Encode", request)).encoded
    assert list(encoded.ids) == TOKENIZER.encode(render("abc")).ids
    assert list(encoded.ids).count(TOKENIZER.token_to_id(BOS)) == 1


async def test_a_repeat_is_the_same_until_it_is_acknowledged(worker: Worker) -> None:
    request = worker.request()
    first = await worker.generate(request)
    assert await worker.generate(request) == first
    other = rollout_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.run_seed += 1
    with pytest.raises(Conflict, match="asked before with other content"):
        await worker.generate(other)
    call = rollout_pb2.AcknowledgedCall(request_id=request.request_id, sample_numbers=[1])
    acknowledged = await worker.call("Acknowledge", rollout_pb2.AcknowledgeRequest(calls=[call]))
    assert acknowledged.forgotten == 1
    assert await worker.generate(request) == [first[0], first[2]]
    call.ClearField("sample_numbers")
    for forgotten in (2, 0):
        answered = await worker.call("Acknowledge", rollout_pb2.AcknowledgeRequest(calls=[call]))
        assert answered.forgotten == forgotten
    with pytest.raises(Conflict, match="acknowledged"):
        await worker.generate(request)


async def test_another_version_is_a_conflict(worker: Worker) -> None:
    version = (await worker.state()).policy.version
    assert len(await worker.ask(policy_version=version)) == 3
    with pytest.raises(Conflict, match=str(version + 1)):
        await worker.ask(policy_version=version + 1)


async def test_an_epoch_out_of_reach_does_no_harm(worker: Worker) -> None:
    request = rollout_pb2.JoinTransferRequest(request_id="far")
    request.manifest.epoch, request.manifest.receiver_ranks = 2**63 - 1, 1
    with pytest.raises(Conflict, match=str(2**63 - 1)):
        await worker.call("JoinTransfer", request)
    version = (await worker.state()).policy.version
    await worker.publish(version + 1)
    found = await worker.ask()
    assert {span.policy_version for t in found for span in t.version_spans} == {version + 1}
