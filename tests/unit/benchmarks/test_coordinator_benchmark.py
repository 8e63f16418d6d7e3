"""The coordinator's benchmark measures what it says, on sizes that take no time, and judges it as the README does."""

from __future__ import annotations

import asyncio
import cProfile
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import trajectory_pb2

from benchmarks import coordinator, ledger_writes, results, step_overhead
from services.coordinator import trajectories


def test_groups_have_the_size_that_is_claimed() -> None:
    groups = ledger_writes.make_groups(3, 2, 1024, seed=1)
    assert [len(group) for group in groups] == [2, 2, 2]
    every = [trajectory for group in groups for trajectory in group]
    assert {len(t.token_ids) for t in every} == {1024}
    assert len({tuple(t.token_ids) for t in every}) == 6
    for trajectory in every:
        trajectories.check(trajectory, list(trajectory.token_ids[:64]), max_tokens=960)


async def test_a_round_counts_what_the_file_holds(tmp_path: Path) -> None:
    groups = ledger_writes.make_groups(5, 3, 100, seed=1)
    done = await ledger_writes.measure(tmp_path, groups, at_once=2)
    with sqlite3.connect(tmp_path / "run.db") as connection:
        count, size = connection.execute("SELECT COUNT(*), SUM(LENGTH(message)) FROM trajectories").fetchone()
    assert (done.trajectories, done.message_bytes) == (count, size)
    assert count == 15
    assert done.per_second == pytest.approx(15 / done.seconds)
    assert done.syncs == 3  # five groups, two at a time
    assert not (tmp_path / "plain").exists()


async def test_a_file_that_lacks_a_trajectory_is_no_result(tmp_path: Path) -> None:
    groups = ledger_writes.make_groups(2, 2, 100, seed=1)
    await ledger_writes.measure(tmp_path, groups, at_once=2)
    with pytest.raises(RuntimeError, match="4 trajectories, not the 6"):
        await asyncio.to_thread(ledger_writes.check, tmp_path / "run.db", ledger_writes.make_groups(3, 2, 100, seed=1))


async def test_both_threads_of_the_ledger_are_profiled(tmp_path: Path) -> None:
    found = await ledger_writes.profile(tmp_path, ledger_writes.make_groups(20, 4, 100, seed=1), at_once=4)
    assert any("record_trajectories" in (row["function"], row["called_by"]) for row in found["asking"])
    assert any(row["called_by"] == "_insert" for row in found["writing"])


def test_own_seconds_are_told_by_caller() -> None:
    profile = cProfile.Profile()
    profile.runcall(lambda: [sorted(range(10_000)) for _ in range(20)])
    first = ledger_writes.own_seconds(profile)[0]
    assert (first["function"], first["calls"]) == ("<built-in method builtins.sorted>", 20)
    assert 0.5 < float(str(first["share"])) <= 1.0


def test_the_ledger_is_judged_by_the_median() -> None:
    rounds = [ledger_writes.Round(8000, 80_000, seconds, 0.5, 10) for seconds in (2.0, 5.0, 4.0)]
    found = coordinator.summarise_ledger(rounds)
    assert (found["trajectories_per_second"], found["trajectories_per_second_lowest"]) == (2000.0, 1600.0)
    assert found["reached"]
    assert found["mean_message_bytes"] == 10.0
    assert found["seconds_over_plain_write"] == 8.0
    assert found["plain_synced_write_seconds"] == 0.05


def run(workers: int, step: float, publish: float) -> step_overhead.Run:
    line = {f"time/{stage}": 0.01 for stage in ("generate", "score", "batch", "train")}
    return step_overhead.Run(workers, [{**line, "time/step": step, "time/publish": publish}] * 3, 0.04, 0.02)


@pytest.mark.parametrize(("slowest", "reached"), [(0.14, True), (0.15, False)])
def test_ratios_are_of_one_round(slowest: float, reached: bool) -> None:
    # The second round was twice as slow as the others for both: the ratio is the same.
    rounds = [[run(1, 0.07 * slow, 0.0), run(256, slowest * slow, 0.07 * slow)] for slow in (1, 2, 1)]
    found = coordinator.summarise_steps(rounds)
    first, last = found["by_workers"]
    assert (first["workers"], first["ratio_to_first"]) == (1, 1.0)
    assert last["ratio_to_first"] == pytest.approx(slowest / 0.07)
    assert last["without_publish_ratio"] == pytest.approx((slowest - 0.07) / 0.07)
    assert last["share_of_a_step"] == pytest.approx(slowest / 7.0)
    assert found["reached"] is reached


def test_the_work_of_the_services_is_no_overhead() -> None:
    found = coordinator.summarise_steps([[run(1, 7.05, 0.01), run(256, 7.1, 0.04)]], work_seconds=7.0)
    first, last = found["by_workers"]
    assert first["overhead_seconds"] == pytest.approx(0.05)
    assert last["ratio_to_first"] == pytest.approx(2.0)
    assert last["without_publish_ratio"] == pytest.approx(0.06 / 0.04)
    assert last["share_of_a_step"] == pytest.approx(0.1 / 7.0)
    assert found["reached"]


def test_sampling_ends_when_it_is_told_to() -> None:
    when = step_overhead.spread(5.0)

    def request(dataset: str, row: int) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(prompt_id=trajectory_pb2.PromptId(dataset=dataset, row=row))

    every = [when(request("train", row), number) for row in range(32) for number in range(8)]
    assert max(every) == 5.0
    assert every.count(5.0) == 8
    assert min(every) >= 1.0
    assert when(request("self-check", 0), 0) == 0.0


def test_answers_are_lengthened_but_those_of_the_self_check() -> None:
    def short(dataset: str) -> trajectory_pb2.Trajectory:
        trajectory = trajectory_pb2.Trajectory(
            prompt_id=trajectory_pb2.PromptId(dataset=dataset),
            token_ids=[1, 2, 3, 4],
            loss_mask=[False, False, True, True],
            behavior_logprobs=[0.0, 0.0, -1.0, -1.0],
            finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        )
        trajectory.version_spans.add(start=2, end=4, policy_version=7)
        return trajectory

    change = step_overhead.lengthen([5, 6], 100)
    own, checked = short("train"), short("self-check")
    change(own)
    change(checked)
    assert checked == short("self-check")
    assert list(own.token_ids[:3]) == [1, 2, 3]
    trajectories.check(own, [1, 2], max_tokens=100)
    assert sum(own.loss_mask) == 100
    trajectories.require_version(own, 7)


async def test_a_real_coordinator_is_measured(tmp_path: Path) -> None:
    shape = step_overhead.Shape(prompts=4, samples=4, tokens=256, sampling_seconds=0.1, training_seconds=0.05)
    found = await step_overhead.measure(tmp_path / "run", shape, workers=3, steps=12, warm_up=1, seed=5)
    assert [step["step"] for step in found.steps] == list(range(2, 14))
    for step in found.steps:
        assert step["trajectories"] == 16
        assert step["completions/mean_length"] == 256
        assert step["publish/engines"] == 3
        assert step["time/step"] > step["time/publish"]
        assert step["time/generate"] + step["time/train"] >= shape.work_seconds
    assert found.coordinator_cpu_seconds > 0


def test_the_command_writes_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rounds", "2", "--groups", "8", "--samples", "2", "--trajectory-tokens", "128"]
    coordinator.main(["--parts", "ledger", *sizes, "--folder", str(tmp_path), "--results", str(tmp_path / "out")])
    result = results.read(tmp_path / "out" / "coordinator-ledger.json")
    assert len(result.samples["trajectories_per_second"]) == 2
    assert "trajectories_per_second" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coordinator.main(["--parts", "ledgers"])
    assert "expected some of ledger, steps, work, got ledgers" in capsys.readouterr().err


def test_a_table_lines_up() -> None:
    rows: list[dict[str, Any]] = [{"workers": 1, "seconds": 0.12345}, {"workers": 256, "seconds": 2.0}]
    assert coordinator.table(rows) == "workers  seconds\n      1    0.123\n    256        2"
    assert json.dumps(rows)
