"""The gradient of one batch is the same however it is cut: on 1, 2 and 4 ranks, side by side, shared or in one line.

tests/system/test_deepspeed_trainer.py has one and two ranks side by side and shared; here are the rest.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.system.learner_group import TEMPERATURE, Group, assert_same_gradients
from tests.unit.learner.batches import make_batch
from tests.unit.learner.plain_policy import PlainTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def seventeen_rows(vocabulary: int) -> list:
    """What 8 trajectories of several turns may come to: no number of ranks divides it."""
    batch = [row for seed in (31, 32, 33) for row in make_batch(vocabulary, seed=seed)][:17]
    for number, row in enumerate(batch):
        row.trajectory_id = f"train/0/{number}/0"
    return batch


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(1, ["one line"]), (2, ["one line"]), (4, ["one line"]), (4, ["padded", "shared"])],
    ids=["1-one-line", "2-one-line", "4-one-line", "4-side-by-side"],
)
async def test_every_cut_gives_the_gradient_of_plain_torch(tmp_path, ranks, layouts):
    """Updates of 8, 8 and 1 rows, each as 1×8, 2×4, 4×2 and 8×1 micro-batches, against float64 row by row."""
    group = Group(tmp_path, ranks=ranks, tied=False, one_line=layouts == ["one line"])
    vocabulary = group.plain.config.vocab_size
    batch = seventeen_rows(vocabulary)
    plan = [list(range(8)), list(range(8, 16)), [16]]
    longest = max(len(row.token_ids) for row in batch)
    plain = PlainTrainer(group.plain, 0.0)
    plain.begin_step(batch, TEMPERATURE)
    expected = [plain.update([batch[i] for i in rows], TEMPERATURE) for rows in plan]
    await group.ranks.start()
    try:
        for layout in layouts:
            norms = set()
            for budget in (8 * longest, 4 * longest, 2 * longest, 1):
                result = await group.step(batch, plan=plan, cuts={"layout": layout, "token_budget": budget})
                for number, wanted in enumerate(expected, start=1):
                    assert_same_gradients(group.gradients(number), wanted["gradients"])
                    metrics = result.updates[number - 1]
                    for name in ("loss", "gradient_norm", "entropy", "ratio_mean", "ratio_max"):
                        assert getattr(metrics, name) == pytest.approx(wanted[name], rel=1e-4), (layout, budget, name)
                    assert metrics.tokens == sum(sum(batch[i].loss_mask) for i in plan[number - 1])
                norms.add(tuple(round(metrics.gradient_norm, 4) for metrics in result.updates))
            assert len(norms) == 1
    finally:
        await group.ranks.stop()


async def test_the_same_update_moves_the_weights_alike_on_any_number_of_ranks(tmp_path):
    """One AdamW Update after clipping, on 1, 2 and 4 ranks: the weights agree to float32 rounding."""
    weights = []
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        group = Group(folder, ranks=ranks, tied=False, seed=5)
        await group.ranks.start()
        try:
            batch = seventeen_rows(group.plain.config.vocab_size)
            await group.step(batch, cuts={"learning_rate": 1e-3, "token_budget": 1 if ranks == 2 else 500})
            weights.append((await group.weights("after"))[1])
        finally:
            await asyncio.wait_for(group.ranks.stop(), 30)
    start = dict(group.plain.state_dict())
    for name, one in weights[0].items():
        moved = (one - start[name]).abs().max().item()
        assert moved == pytest.approx(1e-3, rel=0.05), name  # AdamW's first Update
        for other in weights[1:]:
            # Where a gradient is rounding alone its sign is, too; nearly everywhere it is not.
            off = (other[name] - one).abs() > 1e-5
            assert off.float().mean() < 1e-3, name
            assert torch.isfinite(other[name]).all()
