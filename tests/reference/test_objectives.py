"""Every policy loss, correction, KL and aggregation against tests/reference/objectives_numpy.py, whole and by parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from antiphon.learner.v1 import learner_pb2

from services.learner.objectives import objective_of
from services.learner.objectives.terms import TokenFields
from tests.reference import objectives_numpy as plain

TEMPERATURE = 0.8
LOSSES = {
    "ppo": (learner_pb2.POLICY_LOSS_PPO, {"low": 0.2, "high": 0.28}),
    "ppo dual": (learner_pb2.POLICY_LOSS_PPO, {"low": 0.2, "high": 0.28, "dual": 1.2}),
    "gspo": (learner_pb2.POLICY_LOSS_GSPO, {"low": 0.1, "high": 0.15}),
    "cispo": (learner_pb2.POLICY_LOSS_CISPO, {"high": 0.28}),
}
CORRECTIONS = {
    "tis": (learner_pb2.CORRECTION_KIND_TIS, {"high": 1.3}),
    "icepop": (learner_pb2.CORRECTION_KIND_ICEPOP, {"low": 0.6, "high": 1.5}),
    "seq_tis": (learner_pb2.CORRECTION_KIND_SEQ_TIS, {"high": 1.5}),
    "seq_mask": (learner_pb2.CORRECTION_KIND_SEQ_MASK, {"low": 0.8, "high": 1.2}),
    "decoupled": (learner_pb2.CORRECTION_KIND_DECOUPLED, {}),
}
AGGREGATIONS = {
    "token": learner_pb2.AGGREGATION_TOKEN,
    "sequence": learner_pb2.AGGREGATION_SEQUENCE,
    "constant": learner_pb2.AGGREGATION_CONSTANT,
}


def message(loss="ppo", *, aggregation="token", correction=None, kl=None, cap=None, entropy=0.0, to_behavior=False):
    kind, bounds = LOSSES[loss]
    asked = learner_pb2.PolicyObjective(
        loss=kind,
        clip_low=bounds.get("low", 0.0),
        clip_high=bounds["high"],
        dual_clip=bounds.get("dual", 0.0),
        aggregation=AGGREGATIONS[aggregation],
        constant_length=11 if aggregation == "constant" else 0,
        temperature=TEMPERATURE,
        entropy_coefficient=entropy,
        ratio_to_behavior=to_behavior,
    )
    if correction is not None:
        kind, bounds = CORRECTIONS[correction]
        asked.correction.CopyFrom(learner_pb2.Correction(kind=kind, **bounds))
    if kl is not None:
        kind = {"k2": learner_pb2.KL_ESTIMATOR_K2, "k3": learner_pb2.KL_ESTIMATOR_K3}[kl]
        asked.kl.CopyFrom(learner_pb2.KlLoss(estimator=kind, coefficient=0.3, ratio_cap=cap or 0.0))
    return asked


def computed(asked, sequences, entropies=None):
    """Loss of the Update and, by sequence, terms and slopes at each token; masked slots hold what they may hold."""
    objective = objective_of(learner_pb2.StepHeader(policy=asked))
    new, old, behavior, reference, advantages, mask = (
        torch.tensor(np.concatenate([getattr(s, name) for s in sequences]))
        for name in ("new", "old", "behavior", "reference", "advantages", "mask")
    )
    new = new.float().requires_grad_(True)
    lengths = torch.tensor([len(s.mask) for s in sequences])
    fields = TokenFields(advantages.float(), mask, lengths, behavior.float(), reference.float())
    if entropies is None:
        entropies = torch.full_like(new, float("nan"))
    terms = objective.terms(new, entropies, old.float(), fields)
    trained = [len(s.trained) for s in sequences]
    loss = terms.loss.sum() / objective.divisor(sum(trained), sum(n > 0 for n in trained))
    loss.backward()
    return loss.item(), new.grad.split(lengths.tolist()), terms


def by_hand(loss, sequences, *, correction=None, kl=None, cap=None):
    """Per sequence {t: loss} and {t: slope}, not aggregated."""
    bounds = LOSSES[loss][1]
    values, slopes = [], []
    for sequence in sequences:
        each = getattr(plain, loss.split()[0])(sequence, **bounds)
        weights = dict.fromkeys(each, 1.0)
        if correction is not None:
            weights = plain.correction(sequence, correction, **CORRECTIONS[correction][1])
        extra = plain.kl(sequence, kl, cap) if kl is not None else {t: (0.0, 0.0, 0.0) for t in each}
        values.append({t: each[t][0] * weights[t] + 0.3 * extra[t][1] for t in each})
        slopes.append({t: each[t][1] * weights[t] + 0.3 * extra[t][2] for t in each})
    return values, slopes


def same(found, expected, sequences, aggregation):
    """Loss, and the slope at every token: masked ones have exactly none."""
    loss, gradients, _ = found
    values, slopes = expected
    assert loss == pytest.approx(plain.aggregate(values, sequences, aggregation, 11), rel=2e-5, abs=1e-6)
    for i, sequence in enumerate(sequences):
        for t in range(len(sequence.mask)):
            only = [{u: slopes[j][u] if (j, u) == (i, t) else 0.0 for u in slopes[j]} for j in range(len(sequences))]
            want = plain.aggregate(only, sequences, aggregation, 11) if sequence.mask[t] else 0.0
            assert gradients[i][t].item() == pytest.approx(want, rel=3e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo", "ppo dual", "cispo"])
def test_surrogates(loss, aggregation, seed):
    sequences = plain.ragged(seed)
    found = computed(message(loss, aggregation=aggregation), sequences)
    same(found, by_hand(loss, sequences), sequences, aggregation)
    clipped = [v[2] for s in sequences for v in getattr(plain, loss.split()[0])(s, **LOSSES[loss][1]).values()]
    mask = torch.tensor(np.concatenate([s.mask for s in sequences]))
    assert found[2].clipped[mask].tolist() == clipped and not found[2].clipped[~mask].any()


@pytest.mark.parametrize("seed", range(4))
def test_gspo(seed):
    """Its slope goes through the mean over the sequence, without the holes; a row without a token adds nothing."""
    sequences = plain.ragged(seed, rows=12, one_advantage=True)
    found = computed(message("gspo", aggregation="sequence"), sequences)
    same(found, by_hand("gspo", sequences), sequences, "sequence")
    assert found[2].clipped.any() and not found[2].clipped.all()


def test_the_dual_clip_bounds_what_a_bad_token_can_cost():
    """ρ = 4, A = −2, c = 3: −min(ρA, …) = 8, held at 6 without a gradient; A = +2 is as without it."""
    sequence = plain.Sequence(
        new=np.log([4.0, 4.0]), old=np.zeros(2), behavior=np.zeros(2), reference=np.zeros(2),
        advantages=np.array([-2.0, 2.0]), mask=np.array([True, True]),
    )  # fmt: skip
    asked = message("ppo dual")
    asked.dual_clip = 3.0
    _, (slopes,), terms = computed(asked, [sequence])
    assert terms.loss.tolist() == pytest.approx([6.0, -2.56]) and slopes.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections(correction, aggregation):
    silenced = 0
    for seed in range(4):
        sequences = plain.ragged(seed, rows=10)
        found = computed(message(aggregation=aggregation, correction=correction), sequences)
        same(found, by_hand("ppo", sequences, correction=correction), sequences, aggregation)
        each = [plain.correction(s, correction, **CORRECTIONS[correction][1]) for s in sequences]
        mask = torch.tensor(np.concatenate([s.mask for s in sequences]))
        assert found[2].silenced[mask].tolist() == [w == 0.0 for weights in each for w in weights.values()]
        raw = [np.exp(s.old[t] - s.behavior[t]) for s in sequences for t in s.trained]
        np.testing.assert_allclose(found[2].weights[mask], raw, rtol=1e-5)
        silenced += int(found[2].silenced.sum())
    assert (silenced > 0) == (correction in ("icepop", "seq_mask"))


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_losses(estimator, cap):
    sequences = plain.ragged(5)
    found = computed(message(kl=estimator, cap=cap), sequences)
    same(found, by_hand("ppo", sequences, kl=estimator, cap=cap), sequences, "token")
    mask = torch.tensor(np.concatenate([s.mask for s in sequences]))
    printed = [v[0] for s in sequences for v in plain.kl(s, estimator).values()]
    np.testing.assert_allclose(found[2].kl[mask], printed, rtol=2e-4, atol=1e-6)


def test_everything_at_once():
    sequences = plain.ragged(8, one_advantage=True)
    found = computed(message("gspo", aggregation="sequence", correction="icepop", kl="k3", cap=2.0), sequences)
    expected = by_hand("gspo", sequences, correction="icepop", kl="k3", cap=2.0)
    # The sequence's loss stands at every token and each is weighted by its own w, so a slope mixes all weights.
    for i, sequence in enumerate(sequences):
        weights = plain.correction(sequence, "icepop", **CORRECTIONS["icepop"][1])
        extra = plain.kl(sequence, "k3", 2.0)
        own = plain.gspo(sequence, **LOSSES["gspo"][1])
        for t in sequence.trained:
            expected[1][i][t] = own[t][1] * np.mean(list(weights.values())) + 0.3 * extra[t][2]
    same(found, expected, sequences, "sequence")


def test_the_ratio_to_what_sampled_takes_the_place_of_the_policy_at_the_start():
    sequences = plain.ragged(2)
    swapped = [plain.Sequence(s.new, s.behavior, s.behavior, s.reference, s.advantages, s.mask) for s in sequences]
    same(computed(message(to_behavior=True), sequences), by_hand("ppo", swapped), sequences, "token")


def test_entropy_lowers_the_loss_by_its_share():
    """−0.01 · mean of the entropies over the trained tokens; a NaN where masked does not come through."""
    sequences = plain.ragged(3)
    mask = torch.tensor(np.concatenate([s.mask for s in sequences]))
    entropies = torch.where(mask, torch.arange(len(mask)).float() / 7, torch.tensor(float("nan"))).requires_grad_(True)
    without = computed(message(), sequences)[0]
    with_it = computed(message(entropy=0.01), sequences, entropies)[0]
    assert with_it - without == pytest.approx(-0.01 * entropies[mask].mean().item(), rel=1e-4)
    assert entropies.grad[mask].tolist() == pytest.approx([-0.01 / int(mask.sum())] * int(mask.sum()))
    assert (entropies.grad[~mask] == 0.0).all()


def test_on_policy_the_gradient_of_k2_is_that_of_the_reverse_kl_and_of_k3_the_forward():
    """Expected over every token of a vocabulary of 7 under π_θ: Σ π ∇k against ∇KL(π‖π_ref) and ∇KL(π_ref‖π)."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(7, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    from services.learner.objectives.kl import k2, k3

    reverse = torch.autograd.grad((p * (logp - reference)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits, retain_graph=True)[0]
    for estimator, expected in ((k2, reverse), (k3, forward)):
        loss = (p.detach() * estimator(logp - reference)).sum()
        found = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)
    k1 = torch.autograd.grad((p.detach() * (logp - reference)).sum(), logits)[0]
    torch.testing.assert_close(k1, torch.zeros_like(k1))
