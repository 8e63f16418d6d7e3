"""cases.md M20: token ids never decide what counts. Rows of end tokens, or of what fills gaps, are like others."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.packing import pack
from services.learner.policy_model import load_policy_model
from tests.tiny.models import make_tiny_model
from tests.unit.learner.plain_policy import token_logprobs

FILLS, END = 0, 2
ROWS = [
    ([1, 7, 8, END, END, END], 3),  # the true end, and two more that were sampled after it
    ([1, 7, 9, 10, 11, 12, 13, END], 3),
    ([1, 7, FILLS, FILLS], 2),
    ([END, END, FILLS, END], 1),  # ends within the prompt, too
    ([1, 7, 8, 9], 3),  # one token, cut
]
"""Token ids and the length of the prompt."""


def test_rows_of_end_tokens_have_the_log_probs_that_each_has_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", hidden=32, heads=1)
    policy = load_policy_model(str(folder), "float32", gradient_checkpointing=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = [Row(ids, list(range(prompt, len(ids)))) for ids, prompt in ROWS]
    for layout in (Layout.PADDED, Layout.SHARED):
        found: dict[int, torch.Tensor] = {}
        for micro_batch in plan_micro_batches(rows, ranks=1, token_budget=1000, layout=layout)[0]:
            packed = pack(micro_batch, rows, layout, torch.device("cpu"))
            with torch.no_grad():
                logprobs, _ = policy(packed, 0.6)
            found |= dict(zip(packed.rows, logprobs.split(packed.counts), strict=True))
        assert {n: len(values) for n, values in found.items()} == {0: 3, 1: 5, 2: 2, 3: 3, 4: 1}
        for number, (ids, prompt) in enumerate(ROWS):
            expected = token_logprobs(plain, ids, 0.6).detach()[prompt:]
            torch.testing.assert_close(found[number].double(), expected, rtol=1e-5, atol=1e-5)
