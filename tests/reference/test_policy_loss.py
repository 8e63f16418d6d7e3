"""The policy loss against float64 numpy written from docs/math.md, "Policy loss", with its own gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.learner.objectives.ppo import ppo_surrogate

LOW, HIGH = 0.2, 0.28
ROWS, WIDTH, VOCABULARY = 5, 9, 11


def numpy_loss_and_slope(logp, old, advantages, mask):
    """Per token: −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A), and its derivative by log π_θ; loops, one token at a time."""
    loss = np.zeros(logp.shape, dtype=np.float64)
    slope = np.zeros(logp.shape, dtype=np.float64)
    clipped = np.zeros(logp.shape, dtype=bool)
    for index in np.ndindex(logp.shape):
        if not mask[index]:
            continue
        ratio = np.exp(np.float64(logp[index]) - np.float64(old[index]))
        advantage = np.float64(advantages[index])
        bounded = min(max(ratio, 1.0 - LOW), 1.0 + HIGH)
        loss[index] = -min(ratio * advantage, bounded * advantage)
        clipped[index] = bounded * advantage < ratio * advantage
        slope[index] = 0.0 if clipped[index] else -advantage * ratio
    return loss, slope, clipped


def batch(seed):
    """Ragged rows with holes in their masks; everything masked holds NaN or infinity."""
    random = np.random.default_rng(seed)
    mask = np.zeros((ROWS, WIDTH), dtype=bool)
    for row, length in enumerate(random.integers(2, WIDTH + 1, ROWS)):
        mask[row, 1:length] = random.random(length - 1) < 0.7
        mask[row, 1] = True
    logp = random.normal(-2.0, 1.0, mask.shape)
    old = logp + random.normal(0.0, 0.4, mask.shape)  # ratios on both sides of the clip
    advantages = random.normal(0.0, 1.5, mask.shape)
    for values, junk in ((logp, np.nan), (old, -np.inf), (advantages, np.nan)):
        values[~mask] = junk
    return logp, old, advantages, mask


def tensors(*arrays):
    return [torch.tensor(array, dtype=torch.bool if array.dtype == bool else torch.float32) for array in arrays]


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_of_every_token(seed):
    logp, old, advantages, mask = batch(seed)
    expected_loss, expected_slope, expected_clipped = numpy_loss_and_slope(logp, old, advantages, mask)
    assert expected_clipped.any() and not expected_clipped[mask].all()

    logprobs, old_logprobs, advantage, selected = tensors(logp, old, advantages, mask)
    logprobs.requires_grad_(True)
    terms = ppo_surrogate(logprobs, old_logprobs, advantage, selected, clip_low=LOW, clip_high=HIGH)
    terms.loss.sum().backward()

    np.testing.assert_allclose(terms.loss.detach().numpy(), expected_loss, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected_slope, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(terms.clipped.numpy(), expected_clipped)
    np.testing.assert_allclose(terms.ratio.numpy()[mask], np.exp((logp - old)[mask]), rtol=2e-5)
    assert (terms.ratio.numpy()[~mask] == 1.0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.56, 0.0),  # too likely and good: held at 1.28 · 2
        (1.5, -2.0, 3.0, 3.0),  # too likely and bad: pushed down, not held
        (0.5, 2.0, -1.0, -1.0),  # too unlikely and good: pulled up, not held
        (0.5, -2.0, 1.6, 0.0),  # too unlikely and bad: held at 0.8 · −2
        (1.0, 3.0, -3.0, -3.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_each_side_of_the_clip_by_hand(ratio, advantage, loss, slope):
    logprobs = torch.tensor([float(np.log(ratio)) - 1.0], requires_grad=True)
    terms = ppo_surrogate(
        logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([True]), clip_low=LOW, clip_high=HIGH
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-5)


def test_packed_and_padded_give_the_same():
    logp, old, advantages, mask = tensors(*batch(7))
    padded = ppo_surrogate(logp, old, advantages, mask, clip_low=LOW, clip_high=HIGH)
    everything = torch.ones(int(mask.sum()), dtype=torch.bool)
    packed = ppo_surrogate(logp[mask], old[mask], advantages[mask], everything, clip_low=LOW, clip_high=HIGH)
    assert torch.equal(padded.loss[mask], packed.loss)
    assert (padded.loss[~mask] == 0).all()


def test_several_updates_of_one_step_against_numpy():
    """A table of logits trained for three Updates by plain gradient descent; π_old stays that of the start."""
    random = np.random.default_rng(3)
    _, _, advantages, mask = batch(3)
    table = random.normal(0.0, 1.0, (ROWS, WIDTH, VOCABULARY))
    targets = random.integers(0, VOCABULARY, (ROWS, WIDTH))
    rate, updates, count = 40.0, 3, int(mask.sum())

    theirs = table.copy()
    one_hot = np.eye(VOCABULARY)[targets]

    def numpy_logp(values):
        normal = values - np.log(np.exp(values).sum(-1, keepdims=True))
        return np.take_along_axis(normal, targets[..., None], -1)[..., 0]

    old = numpy_logp(theirs)
    clipped_in_all = []
    for _ in range(updates):
        _, slope, clipped = numpy_loss_and_slope(numpy_logp(theirs), old, advantages, mask)
        probabilities = np.exp(theirs) / np.exp(theirs).sum(-1, keepdims=True)
        theirs = theirs - rate / count * slope[..., None] * (one_hot - probabilities)
        clipped_in_all.append(clipped.sum())
    assert clipped_in_all[0] == 0 and clipped_in_all[-1] > 0  # the test reaches the clip

    ours = torch.tensor(table, dtype=torch.float32, requires_grad=True)
    chosen, selected = tensors(advantages, mask)
    index = torch.tensor(targets)[..., None]
    frozen = torch.log_softmax(ours, -1).gather(-1, index).squeeze(-1).detach()
    for _ in range(updates):
        logprobs = torch.log_softmax(ours, -1).gather(-1, index).squeeze(-1)
        terms = ppo_surrogate(logprobs, frozen, chosen, selected, clip_low=LOW, clip_high=HIGH)
        (gradient,) = torch.autograd.grad(terms.loss.sum() / count, ours)
        with torch.no_grad():
            ours -= rate * gradient
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-4)


def test_nan_in_an_unmasked_slot_is_not_hidden():
    logp, old, advantages, mask = tensors(*batch(5))
    row, position = mask.nonzero()[0].tolist()
    advantages[row, position] = float("nan")
    terms = ppo_surrogate(logp, old, advantages, mask, clip_low=LOW, clip_high=HIGH)
    assert terms.loss.isnan().sum() == 1
