"""TensorBoard: event files in <run folder>/tensorboard, one for each life of the run."""

from __future__ import annotations

from collections.abc import Mapping

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.coordinator.sinks import Origin


class TensorBoard:
    """Scalars by name. On disk before `write` returns."""

    def __init__(self, origin: Origin, from_step: int | None) -> None:
        """What earlier files have from `from_step` on is hidden by the reader (a session that starts there)."""
        self._writer = EventFileWriter(str(origin.run_dir / "tensorboard"))
        if from_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(step=from_step, session_log=start))

    def write(self, step: int, numbers: Mapping[str, float], at: float) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        summary = summary_pb2.Summary(value=values)
        self._writer.add_event(event_pb2.Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
