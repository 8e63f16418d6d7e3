"""The sync schedule, played through: one batch at a time, the next one only after its policy was published."""

from __future__ import annotations

from antiphon.events.v1 import events_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.schedule import SCHEDULES, Counts, Sync

BATCH = 4


def test_by_hand() -> None:
    def may(running: int, finished: int, trained: int, published: int) -> bool:
        return Sync().may_admit(Counts(running, finished, trained, published, BATCH))

    assert may(0, 0, 0, 0)
    assert may(3, 0, 0, 0)
    assert not may(4, 0, 0, 0)
    assert not may(1, 3, 0, 0)
    assert not may(0, 0, 4, 0)  # trained, the new policy not out yet
    assert may(0, 0, 4, 1)
    assert not may(2, 2, 4, 1)
    assert not Sync().may_admit(Counts(0, 0, 0, -1, BATCH))  # nothing was published yet


@given(st.lists(st.sampled_from(["admit", "finish", "train", "publish"]), max_size=200))
def test_no_group_is_ever_older_than_its_step(wishes: list[str]) -> None:
    """Whatever the timing, what is admitted under version v is trained in Step v + 1."""
    running: list[int] = []
    finished: list[int] = []
    trained, learner, published = 0, 0, 0
    for wish in wishes:
        counts = Counts(len(running), len(finished), trained, published, BATCH)
        if wish == "admit" and Sync().may_admit(counts):
            running.append(published)
        elif wish == "finish" and running:
            finished.append(running.pop(0))
        elif wish == "train" and len(finished) >= BATCH:
            assert finished[:BATCH] == [learner] * BATCH
            del finished[:BATCH]
            trained += BATCH
            learner += 1
        elif wish == "publish" and Sync().publishes_after(learner):
            published = learner


def test_every_worker_has_its_own_gpu() -> None:
    kinds = {events_pb2.WORKER_KIND_ROLLOUT, events_pb2.WORKER_KIND_REWARD, events_pb2.WORKER_KIND_LEARNER}
    assert Sync().holders(events_pb2.RUN_PHASE_TRAIN) == Sync().holders(events_pb2.RUN_PHASE_GENERATE) == kinds
    assert {"sync": Sync} == SCHEDULES
