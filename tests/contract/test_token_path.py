"""The token ids of one run, followed from the data over engine, ledger and scorer to the learner: nobody changes any.

cases.md D01, D11, M14, M16, M17, M19, M20, M26, M28, M32: what goes wrong between any two shows as a difference here.
"""

from __future__ import annotations

import asyncio
import collections
import sqlite3

import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import chat_pb2, trajectory_pb2

from tests.conftest import NatsServer
from tests.simulated.coordinator import Outcome, process_config, run_coordinator, settings
from tests.simulated.services import Simulation, simulated_services
from tests.tiny.models import EOS, PAD, make_tokenizer

SAMPLES, MAX_TOKENS = 4, 3
TOKENIZER = make_tokenizer()
EOS_ID, PAD_ID, TAG_ID = (TOKENIZER.token_to_id(token) for token in (EOS, PAD, "<user>"))
Key = tuple[int, int, int]
"""(epoch, row, sample)."""


class Told:
    """What every party saw, by key."""

    def __init__(self, outcome: Outcome, simulation: Simulation) -> None:
        self.outcome = outcome
        self.requests = [r for r in simulation.rollout.requests if r.prompt_id.dataset == "train"]
        self.candidates = {
            (c.prompt_id.epoch, c.prompt_id.row, c.sample_number): c
            for c in simulation.reward.seen
            if c.prompt_id.dataset == "train"
        }
        self.rows = {
            _key(row.trajectory_id): (header.step_id, row)
            for header, rows in simulation.learner.batches
            for row in rows
        }
        with sqlite3.connect(f"file:{outcome.run_dir}/run.db?mode=ro", uri=True) as db:
            self.prompts = {
                (epoch, row): list(chat_pb2.TokenIds.FromString(ids).ids)
                for epoch, row, ids in db.execute("SELECT epoch, row, token_ids FROM prompts")
            }
            self.sampled = {
                _key(name): trajectory_pb2.Trajectory.FromString(message)
                for name, message in db.execute("SELECT trajectory_id, message FROM trajectories")
            }
            self.scores = {_key(name): value for name, value in db.execute("SELECT trajectory_id, value FROM scores")}

    def answer(self, key: Key) -> list[int]:
        """What was sampled: all after the prompt, by length."""
        return list(self.sampled[key].token_ids)[len(self.prompts[key[:2]]) :]


def _key(trajectory_id: str) -> Key:
    _, epoch, row, sample = trajectory_id.split("/")
    return int(epoch), int(row), int(sample)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Answers hold a special token of the vocabulary and the pad token as if they were words; some are cut."""
    folder = tmp_path_factory.mktemp("tokens")
    nats = NatsServer(folder)
    nats.start()

    async def run() -> Told:
        async with simulated_services(nats.url, "tokens") as simulation:
            simulation.rollout.alphabet = [TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("7"), TAG_ID, PAD_ID]
            # A function of the token ids alone: whoever pairs scores and rows can be held to it.
            simulation.reward.score = lambda candidate: float(sum(candidate.response_token_ids))
            config = settings(folder, sampling={"temperature": 0.6, "max_tokens": MAX_TOKENS}, evaluation=None)
            outcome = await run_coordinator(process_config(folder, nats, "tokens", config))
        assert outcome.ended.outcome == "finished", outcome.ended.reason
        return Told(outcome, simulation)

    try:
        return asyncio.run(run())
    finally:
        nats.kill()


def test_the_engine_is_asked_with_the_ids_of_the_data_and_nothing_but_the_recipes_sampling(told: Told) -> None:
    """D01, M26, M28."""
    for request in told.requests:
        row = request.prompt_id.row
        text = f"<bos><user>what is {row}?<eos><assistant>"
        expected = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert list(request.prompt_token_ids) == expected == told.prompts[(request.prompt_id.epoch, row)]
        assert request.sampling == rollout_pb2.Sampling(
            temperature=request.sampling.temperature, max_tokens=MAX_TOKENS, stop_token_ids=[EOS_ID]
        )
        assert request.sampling.temperature == pytest.approx(0.6)
        assert (request.samples, request.first_sample_number, request.run_seed) == (SAMPLES, 0, 7)
    asked = collections.Counter((r.prompt_id.epoch, r.prompt_id.row) for r in told.requests)
    assert set(asked) == set(told.prompts) and set(asked.values()) == {1}


def test_what_is_trained_is_what_was_sampled(told: Told) -> None:
    """M19, M20: cut answers get no end that nobody sampled; masks go by length, whatever the ids are."""
    assert set(told.rows) == set(told.sampled) and len(told.rows) == 3 * 2 * SAMPLES
    for key, (_, row) in told.rows.items():
        prompt, answer = told.prompts[key[:2]], told.answer(key)
        assert list(row.token_ids) == [*prompt, *answer] == list(told.sampled[key].token_ids)
        assert list(row.loss_mask) == [False] * len(prompt) + [True] * len(answer)
        assert EOS_ID in prompt and EOS_ID not in answer[:-1]
        (span,) = row.version_spans
        assert (span.start, span.end) == (len(prompt), len(row.token_ids))
    answers = [told.answer(key) for key in told.rows]
    assert any(PAD_ID in answer for answer in answers) and any(TAG_ID in answer for answer in answers)
    assert any(answer[-1] != EOS_ID for answer in answers), "some are cut"


def test_the_scorer_is_told_ids_clean_text_and_raw_text(told: Told) -> None:
    """D11: a token that a reward needs is in the raw text although it is special; nothing is padded."""
    assert set(told.candidates) == set(told.sampled)
    for key, candidate in told.candidates.items():
        answer = told.answer(key)
        assert list(candidate.response_token_ids) == answer
        names = {EOS_ID: EOS, PAD_ID: PAD, TAG_ID: "<user>"}
        assert candidate.response_text_raw == "".join(names.get(i) or TOKENIZER.id_to_token(i) for i in answer)
        assert candidate.response_text == "".join(TOKENIZER.id_to_token(i) for i in answer if i not in names)


def test_scores_are_on_the_rows_that_they_are_of(told: Told) -> None:
    """M16, M32: recomputed from each trained row's own ids; the advantage from its first trained token to its last."""
    groups: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
    for key in sorted(told.rows):
        score = float(sum(told.answer(key)))
        assert told.scores[key] == score
        groups[key[:2]].append(score)
    for key, (_, row) in told.rows.items():
        scores = groups[key[:2]]
        mean = sum(scores) / len(scores)
        spread = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
        expected = (told.scores[key] - mean) / (spread + 1e-6) if spread else 0.0
        for trained, advantage in zip(row.loss_mask, row.advantages, strict=True):
            assert advantage == pytest.approx(expected if trained else 0.0, rel=1e-5)


def test_what_was_cut_is_told_by_why_it_ended(told: Told) -> None:
    """M17, M14: the prompts hold the end token, and an answer of full length may end with it."""
    for line in told.outcome.metrics:
        mine = [told.answer(key) for key, (step, _) in told.rows.items() if step == line["step"]]
        cut = [len(answer) == MAX_TOKENS and answer[-1] != EOS_ID for answer in mine]
        assert line["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))
        lengths = [len(answer) for answer in mine]
        assert line["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert (line["completions/min_length"], line["completions/max_length"]) == (min(lengths), max(lengths))
        assert line["tokens"] == line["tokens_trained"] == sum(lengths)
