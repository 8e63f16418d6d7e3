from __future__ import annotations

import asyncio
import logging
import re

import pytest

from services.common import logs, trace

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_header_is_w3c_and_new_where_there_is_no_trace() -> None:
    first, second = trace.outgoing(), trace.outgoing()
    for headers in (first, second):
        assert re.fullmatch(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01", headers["traceparent"])
    assert first["traceparent"][3:35] != second["traceparent"][3:35]
    assert trace.trace_id() == ""


def test_a_caller_s_trace_goes_on() -> None:
    with trace.incoming({"traceparent": HEADER}):
        assert trace.trace_id() == "0af7651916cd43dd8448eb211c80319c"
        assert trace.outgoing()["traceparent"] == HEADER
    assert trace.trace_id() == ""


@pytest.mark.parametrize("header", ["", "rubbish", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_header_that_is_none_is_ignored(header: str) -> None:
    with trace.incoming({"traceparent": header}):
        assert trace.trace_id() == ""


async def test_traces_of_tasks_do_not_mix() -> None:
    async def child(header: str) -> str:
        trace.adopt({"traceparent": header})
        await asyncio.sleep(0.01)
        return trace.trace_id()

    other = HEADER.replace("0af765", "1af765")
    with trace.root():
        mine = trace.trace_id()
        assert await asyncio.gather(*(asyncio.create_task(child(h)) for h in (HEADER, other))) == [
            "0af7651916cd43dd8448eb211c80319c",
            "1af7651916cd43dd8448eb211c80319c",
        ]
        assert trace.trace_id() == mine
        with trace.root():
            assert trace.trace_id() not in ("", mine)


def test_a_line_says_who_when_which_trace_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure("rollout-0", "INFO")
        logs.configure("rollout-0", "INFO")  # twice must not double the lines
        with trace.incoming({"traceparent": HEADER}):
            logging.getLogger("services.rollout.x").info("loaded %d", 3)
        logging.getLogger("services.rollout.x").warning("bare")
        logging.getLogger("services.rollout.x").debug("hidden")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{stamp} INFO    rollout-0 0af76519 services\.rollout\.x: loaded 3", lines[0])
    assert re.fullmatch(rf"{stamp} WARNING rollout-0 - services\.rollout\.x: bare", lines[1])
    assert len(lines) == 2
