"""The self-check, and what is checked before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.config import ModelConfig
from services.coordinator.data import Order
from services.coordinator.identity import PromptKey
from services.coordinator.inputs import read_inputs
from tests.contract.coordinator.coordinator_setup import Setup, different_for
from tests.simulated.coordinator import Live, settings, write_rows


@pytest.mark.parametrize("worker", ["rollout", "learner"])
@pytest.mark.parametrize("text", ["naïve café", "<eos>", "Is water wet?", "what is 3?"])
async def test_other_token_ids_stop_the_run_and_name_the_conversation(setup: Setup, worker: str, text: str) -> None:
    party = setup.rollout if worker == "rollout" else setup.learner
    party.encode = different_for(text, party.encode)
    outcome = await setup.run(self_check={"prompts": 5}, prompts_per_step=5)
    assert outcome.ended.outcome == "failed"
    assert f"self-check, token ids: {worker}-0" in outcome.ended.reason
    assert text in outcome.ended.reason
    assert "coordinator [5] (" in outcome.ended.reason  # <assistant>
    assert f"{worker}-0 [7] (" in outcome.ended.reason
    assert setup.learner.batches == []


@pytest.mark.parametrize(("shift", "stops"), [(0.9e-4, False), (1.5e-4, True), (0.5, True), (float("nan"), True)])
async def test_other_logprobs_stop_the_run_and_name_prompt_and_values(setup: Setup, shift: float, stops: bool) -> None:
    setup.learner.logprob_shift = shift
    outcome = await setup.run(steps=1)
    if not stops:
        assert outcome.ended.outcome == "finished", outcome.ended.reason
        return
    assert outcome.ended.outcome == "failed"
    assert "self-check, log-probabilities (float32): mean |trainer - engine|" in outcome.ended.reason
    assert "worst at prompt train/0/" in outcome.ended.reason
    assert "engine rollout-0 -" in outcome.ended.reason
    assert "trainer learner-0 " in outcome.ended.reason
    assert setup.learner.batches == []


async def test_a_worker_that_cannot_take_the_longest_sequence_is_named(setup: Setup) -> None:
    setup.rollout.max_sequence_tokens = 15
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    # <bos> <user> "what is 0?" <eos> <assistant>: 14 tokens, and 4 more.
    assert "rollout-0: longest prompt + max_tokens = 18 tokens > its max_sequence_tokens 15" in outcome.ended.reason


async def test_a_learner_that_is_not_at_version_0_is_refused(setup: Setup) -> None:
    setup.learner.version = 4
    outcome = await setup.run()
    assert "learner-0: expected the model the run starts from, version 0; it holds version 4" in outcome.ended.reason


async def test_a_worker_that_fails_or_leaves_while_starting_is_named_at_once(make_setup: Callable[..., Any]) -> None:
    for how in ("fails", "leaves"):
        setup = await make_setup(rollout_state=tenant_pb2.WORKER_STATE_STARTING)
        setup.folder = setup.folder / how
        setup.folder.mkdir()

        async def end(event: events_pb2.RunEvent, live: Live, setup: Setup = setup, how: str = how) -> None:
            if event.WhichOneof("event") == "phase_progress":
                assert "rollout-0 (starting)" in event.phase_progress.detail
                if how == "leaves":
                    await setup.simulation.announced["rollout-0"].die()
                setup.rollout.state = tenant_pb2.WORKER_STATE_FAILED
                setup.simulation.announced["rollout-0"].changed()

        outcome = await setup.run(end)
        assert outcome.ended.outcome == "failed"
        expected = {
            "fails": "rollout-0: says it is failed",
            "leaves": "rollout-0: was starting and is not heard of any more",
        }
        assert expected[how] in outcome.ended.reason


async def test_workers_that_do_not_come_are_named_at_the_deadline(setup: Setup) -> None:
    outcome = await setup.run(rollout_workers=2, start_seconds=1.5)
    assert outcome.ended.outcome == "failed"
    assert "not all up after 2 s; waiting for 1 rollout worker(s) not heard of" in outcome.ended.reason


async def test_bad_rows_end_the_run_before_anything_is_asked(setup: Setup) -> None:
    bad = write_rows(setup.folder / "bad.jsonl", [{"prompt": "a", "reference": "b"}, {"prompt": " ", "reference": "b"}])
    outcome = await setup.run(data={"path": str(bad)})
    assert outcome.ended.outcome == "failed"
    assert "line 2, row 1, column 'prompt': expected a prompt, found ' '" in outcome.ended.reason
    assert outcome.phases == ["start"]


async def test_a_data_set_smaller_than_a_step_is_refused(setup: Setup) -> None:
    outcome = await setup.run(prompts_per_step=6)
    assert "5 rows < prompts_per_step 6; take 1 to 5 prompts per step" in outcome.ended.reason


async def test_a_run_that_was_there_is_not_overwritten(setup: Setup) -> None:
    (setup.folder / "run").mkdir()
    (setup.folder / "run" / "run.db").write_bytes(b"what was paid for")
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    assert "run.db exists" in outcome.ended.reason
    assert (setup.folder / "run" / "run.db").read_bytes() == b"what was paid for"


async def test_prompts_in_both_data_sets_are_told(setup: Setup) -> None:
    same = write_rows(setup.folder / "same.jsonl", [{"prompt": "what is 1?", "reference": "1"}])
    outcome = await setup.run(steps=1, evaluation={"path": str(same), "max_tokens": 2})
    assert any("1 of 1 evaluation prompts are trained on too" in notice.message for notice in outcome.of("notice"))


async def test_several_data_sets_are_trained_and_evaluated_on(setup: Setup) -> None:
    """cases.md D01, too: engine and trainer get the very ids that the row was checked with."""
    folder = setup.folder
    sums = write_rows(folder / "sums.jsonl", [{"question": f"sum {n}?", "answer": f"so\n#### {n}"} for n in range(4)])
    (folder / "words.csv").write_text("instruction,input,label\n" + "".join(f"say,w{n},{n}\n" for n in range(3)))
    easy = write_rows(folder / "easy.jsonl", [{"prompt": "e?", "reference": "1"}])
    hard = write_rows(folder / "hard.jsonl", [{"prompt": f"h{n}?", "reference": "2"} for n in range(2)])
    data = {
        "sources": [
            {"path": str(sums), "weight": 2, "answer_regex": "#### (.+)"},
            {"path": str(folder / "words.csv"), "name": "words"},
        ]
    }
    evaluation = {"sources": [{"path": str(easy)}, {"path": str(hard)}], "max_tokens": 4}
    outcome = await setup.run(data=data, evaluation=evaluation, prompts_per_step=3)
    assert outcome.ended.outcome == "finished"
    assert [(e.dataset, e.policy_version, e.prompts) for e in outcome.of("evaluated")] == [
        ("easy", 0, 1), ("hard", 0, 2), ("easy", 3, 1), ("hard", 3, 2),
    ]  # fmt: skip
    told = [notice.message for notice in outcome.of("notice")]
    assert any("prompt from 'question', reference from 'answer'" in message for message in told)
    assert any("prompt from 'instruction' and 'input', reference from 'label'" in message for message in told)

    asked = {str(PromptKey.of(r.prompt_id)): tuple(r.prompt_token_ids) for r in setup.rollout.requests}
    inputs = read_inputs(settings(folder, data=data), ModelConfig(path=str(folder / "model")))
    order = Order(*inputs.training, seed=7, shuffle=True)
    for step, (_, trajectories) in enumerate(setup.learner.batches):
        wanted = {str(key): prompt.token_ids for key, prompt in (order.at(n) for n in range(3 * step, 3 * step + 3))}
        assert sorted(name.partition("/")[0] for name in wanted) == ["sums", "sums", "words"]
        assert {t.trajectory_id.rpartition("/")[0] for t in trajectories} == set(wanted)
        for trajectory in trajectories:
            name = trajectory.trajectory_id.rpartition("/")[0]
            length = len(wanted[name])
            assert asked[name] == tuple(trajectory.token_ids[:length]) == wanted[name]
            assert list(trajectory.loss_mask) == [n >= length for n in range(len(trajectory.token_ids))]
