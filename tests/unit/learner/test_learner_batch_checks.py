"""A Step is checked before anything is touched; the error names what is wrong and where."""

from __future__ import annotations

import math

import pytest
from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages
from services.common.errors import InvalidRequest
from services.learner.batch_checks import check_step
from tests.unit.learner.batches import make_batch, make_header


def test_a_good_step_passes():
    batch = make_batch(50)
    check_step(make_header(1, batch), batch, 100)
    check_step(make_header(1, batch, [[0, 1, 2], [3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]]), batch, 100)


def test_masked_slots_may_hold_anything():
    batch = make_batch(50)
    assert any(math.isnan(value) for row in batch for value in row.advantages)
    batch[2].behavior_logprobs[0] = math.nan
    check_step(make_header(1, batch), batch, 100)


def changed_trajectory(change):
    def spoil(header, batch):
        change(batch[2])
        header.batch_digest = digest_messages(batch)

    return spoil


def changed_header(change):
    return lambda header, batch: change(header)


def last_trained(row):
    return max(i for i, trained in enumerate(row.loss_mask) if trained)


def set_advantage(value):
    def change(row):
        row.advantages[last_trained(row)] = value

    return change


CASES = {
    "digest": (changed_header(lambda h: setattr(h, "batch_digest", b"\0" * 32)), "digest of what came"),
    "count": (changed_header(lambda h: setattr(h, "trajectory_count", 9)), "9 trajectories were announced, 7 came"),
    "token": (lambda h, b: b[0].token_ids.__setitem__(0, 1 + b[0].token_ids[0]), "digest of what came"),
    "n": (changed_header(lambda h: setattr(h.updates[0], "token_count", 1)), "update 1 of 1: N is 1"),
    "unknown id": (
        changed_header(lambda h: h.updates[0].trajectory_ids.append("train/9")),
        "train/9 is planned and did",
    ),
    "planned twice": (
        changed_header(lambda h: h.updates[0].trajectory_ids.append("train/0/0/0")),
        "train/0/0/0 is planned twice",
    ),
    "not planned": (
        lambda h, b: (
            h.updates[0].trajectory_ids.pop(0),
            setattr(h.updates[0], "token_count", h.updates[0].token_count - sum(b[0].loss_mask)),
        ),
        "1 trajectories are in no Update, the first is train/0/0/0",
    ),
    "no update": (changed_header(lambda h: h.ClearField("updates")), "no Update is planned"),
    "no objective": (changed_header(lambda h: h.ClearField("policy")), "expected a policy objective"),
    "loss": (changed_header(lambda h: setattr(h.policy, "loss", 0)), "policy loss 0 is not known"),
    "aggregation": (changed_header(lambda h: setattr(h.policy, "aggregation", 0)), "aggregation 0 is not known"),
    "temperature": (changed_header(lambda h: setattr(h.policy, "temperature", 0)), "temperature 0"),
    "clip": (changed_header(lambda h: setattr(h.policy, "clip_low", 1.5)), "clip_low 1.5"),
    "same id": (changed_trajectory(lambda t: setattr(t, "trajectory_id", "train/0/0/0")), "train/0/0/0 came twice"),
    "nan": (changed_trajectory(set_advantage(math.nan)), r"trajectory train/0/1/1: advantages\[\d+\] is nan"),
    "inf": (changed_trajectory(set_advantage(math.inf)), r"trajectory train/0/1/1: advantages\[\d+\] is inf"),
    "behavior": (
        changed_trajectory(lambda t: t.behavior_logprobs.__setitem__(last_trained(t), -math.inf)),
        r"train/0/1/1: behavior_logprobs\[\d+\] is -inf",
    ),
    "lengths": (changed_trajectory(lambda t: t.advantages.pop()), r"train/0/1/1: \d+ advantages for \d+ tokens"),
    "optional lengths": (changed_trajectory(lambda t: t.returns.append(1.0)), r"train/0/1/1: 1 returns for \d+ tokens"),
    "first token": (changed_trajectory(lambda t: t.loss_mask.__setitem__(0, True)), "nothing predicts it"),
    "empty": (changed_trajectory(lambda t: t.ClearField("token_ids")), "0 tokens; the model takes 1 to 100"),
    "long": (changed_trajectory(lambda t: t.token_ids.extend([1] * 100)), "tokens; the model takes 1 to 100"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(case):
    spoil, message = CASES[case]
    batch = make_batch(50)
    header = make_header(1, batch)
    spoil(header, batch)
    with pytest.raises(InvalidRequest, match=message):
        check_step(header, batch, 100)


def test_an_update_without_a_token_is_refused():
    row = learner_pb2.TrainTrajectory(trajectory_id="a", token_ids=[1, 2], loss_mask=[False, False], advantages=[0, 0])
    with pytest.raises(InvalidRequest, match="no token is trained on"):
        check_step(make_header(1, [row]), [row], 10)
