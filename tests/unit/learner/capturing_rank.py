"""A real rank for tests, `python -m tests.unit.learner.capturing_rank`: cuts Steps as told, keeps their gradients.

The environment variable CAPTURE names a folder; `cuts.json` in it says per step id: token_budget, layout,
learning_rate, and killed_rank, which gets SIGKILL in the middle of the Step. With ONE_LINE in the environment rows lie
in one line, as on a GPU, and plain torch attends over them.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

from services.learner.rank_main import main


def make_capturing_trainer(process, placement):
    import torch
    from deepspeed.utils import safe_get_full_grad

    from services.learner import deepspeed_trainer
    from services.learner.batching import Layout
    from services.learner.deepspeed_trainer import DeepSpeedTrainer

    if "ONE_LINE" in os.environ:
        from tests.unit.learner.cpu_varlen import cpu_kernel

        load = functools.partial(deepspeed_trainer.load_policy_model, kernel=cpu_kernel)
        deepspeed_trainer.load_policy_model = load
    folder = Path(os.environ["CAPTURE"])

    class CapturingTrainer(DeepSpeedTrainer):
        def train_step(self, work, report):
            step_id = work.header.step_id
            cuts = json.loads((folder / "cuts.json").read_text()).get(str(step_id), {})
            self._steps.token_budget = cuts.get("token_budget", process.settings.micro_batch_tokens)
            self._steps.layout = Layout(cuts.get("layout", Layout.SHARED.value))
            options = process.settings.optimizer
            if "learning_rate" in cuts:
                options = options.model_copy(update={"learning_rate": cuts["learning_rate"]})
            self._steps._options = options
            inner = type(self._engine).step
            count = 0

            def capture():
                nonlocal count
                count += 1
                if placement.rank == cuts.get("killed_rank"):
                    os.kill(os.getpid(), signal.SIGKILL)
                gradients = {name: safe_get_full_grad(p) for name, p in self._model.named_parameters()}
                if placement.rank == 0:
                    torch.save(gradients, folder / f"gradients-{step_id}-{count}.pt")
                inner(self._engine)

            self._engine.step = capture
            return super().train_step(work, report)

    return CapturingTrainer(process, placement.rank, placement.ranks, placement.rendezvous)


if __name__ == "__main__":
    sys.exit(main(make_capturing_trainer))
