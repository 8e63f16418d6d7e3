"""Log lines of a service: time, level, worker, trace, module, message. One format, to standard error."""

from __future__ import annotations

import logging
import sys

from services.common import trace


class _TraceFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.trace = trace.trace_id()[:8] or "-"
        return True


def configure(worker_id: str, level: str = "INFO") -> None:
    """Sets up the root logger of this process. Call once, first thing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_TraceFilter())
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {worker_id} %(trace)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
