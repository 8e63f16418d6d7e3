"""How a command that could not do its work says so: lines, or one JSON object with a stable code."""

from __future__ import annotations

import json
import sys

from services.common.errors import AntiphonError, ConfigError

WHAT_TO_DO = {
    ConfigError.code: "correct what the problems name, each says how; nothing was started",
}


def tell(error: AntiphonError, *, as_json: bool) -> None:
    """To stderr: the message, or {"code", "message", "problems", "what_to_do"}."""
    if not as_json:
        print(error, file=sys.stderr)
        return
    message, *problems = str(error).splitlines()
    tree = {
        "code": error.code,
        "message": message,
        "problems": [line.strip() for line in problems],
        "what_to_do": WHAT_TO_DO.get(error.code, message.rpartition(";")[2].strip()),
    }
    print(json.dumps(tree, ensure_ascii=False), file=sys.stderr)
