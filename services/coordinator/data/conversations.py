"""From a row's columns to messages: strings, OpenAI messages, ShareGPT turns, alpaca instructions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.coordinator.chat_template import Message
from services.coordinator.data.columns import CONVERSATIONS, Columns, value_of
from services.coordinator.data.rows import shown

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
MEDIA = ("images", "image", "videos", "audios")


class Problem(Exception):
    """What is wrong with one row: column, expected, found."""


def plain_prompt(columns: Mapping[str, Any], names: Columns) -> str:
    """The prompt as a string. Raises Problem."""
    where = f"column {names.prompt!r}"
    value = _required(columns, names.prompt)
    if not isinstance(value, str):
        raise Problem(f"{where}: expected a string, found {shown(value)}")
    if not value.strip():
        raise Problem(f"{where}: expected a prompt, found {shown(value)}")
    return _with_input(value, columns, names)


def conversation(columns: Mapping[str, Any], names: Columns) -> tuple[list[Message], str | None]:
    """The messages up to where the answer is asked for, and the answer that stood after them in SFT data.

    Raises Problem.
    """
    where = f"column {names.prompt!r}"
    value = _required(columns, names.prompt)
    if isinstance(value, str) and names.prompt in CONVERSATIONS:
        value = _from_json(value, where)
    if isinstance(value, str):
        if not value.strip():
            raise Problem(f"{where}: expected a prompt, found {shown(value)}")
        turns = [*_history(columns, names), {"role": "user", "content": _with_input(value, columns, names)}]
        return _with_system(turns, columns, names), None
    if not isinstance(value, list) or not value:
        raise Problem(f"{where}: expected a string or a list of messages, found {shown(value)}")
    messages = [_message(f"{where}, message {number}", item) for number, item in enumerate(value)]
    answer = None
    if messages[-1]["role"] == "assistant":
        if names.prompt not in CONVERSATIONS or len(messages) == 1:
            raise Problem(f"{where}: expected a last message that asks for an answer, found one of the assistant")
        answer = messages.pop()["content"]
    if messages[-1]["role"] in ("system", "assistant"):
        raise Problem(
            f"{where}: expected a last message that asks for an answer, found one of the {messages[-1]['role']}"
        )
    if not messages[-1]["content"].strip():
        raise Problem(f"{where}: expected a prompt, found {shown(messages[-1]['content'])}")
    return _with_system(messages, columns, names), answer


def tools_of(columns: Mapping[str, Any], names: Columns) -> list[Any] | None:
    """Descriptions of tools, which may be JSON text. Raises Problem."""
    value = None if names.tools is None else value_of(columns, names.tools)
    if isinstance(value, str) and value.strip():
        value = _from_json(value, f"column {names.tools!r}")
    if not value:
        return None
    if not isinstance(value, list):
        raise Problem(f"column {names.tools!r}: expected a list of tools, found {shown(value)}")
    return value


def refuse_media(columns: Mapping[str, Any]) -> None:
    """Raises Problem for a row with pictures or sound: the prompt would be another without them."""
    for name in MEDIA:
        if columns.get(name):
            raise Problem(
                f"column {name!r}: expected text only, found {shown(columns[name])}; no such model is covered"
            )


def _message(where: str, item: Any) -> Message:
    """{role, content} or ShareGPT's {from, value}; keys that are null, as parquet fills them, are not there."""
    given = {k: v for k, v in item.items() if v is not None or k == "content"} if isinstance(item, dict) else {}
    if set(given) == {"from", "value"}:
        role = SHAREGPT_ROLES.get(given["from"])
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise Problem(f"{where}: expected from to be one of {known}, found {shown(given['from'])}")
        given = {"role": role, "content": given["value"]}
    if set(given) != {"role", "content"}:
        raise Problem(f"{where}: expected {{role, content}}, found {shown(item)}")
    if given["role"] not in ROLES:
        raise Problem(f"{where}: expected a role of {', '.join(ROLES)}, found {shown(given['role'])}")
    content = given["content"]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Problem(f"{where}: expected content as a string, found {shown(content)}")
    return {"role": given["role"], "content": content}


def _required(columns: Mapping[str, Any], name: str) -> Any:
    value = value_of(columns, name)
    if value is None:
        found = "null" if name in columns else f"only {', '.join(map(repr, columns)) or 'no column'}"
        raise Problem(f"column {name!r}: expected it, found {found}")
    return value


def _with_input(instruction: str, columns: Mapping[str, Any], names: Columns) -> str:
    more = columns.get(names.input) if names.input else None
    if more is not None and not isinstance(more, str):
        raise Problem(f"column {names.input!r}: expected a string, found {shown(more)}")
    return f"{instruction}\n{more}" if more and more.strip() else instruction


def _history(columns: Mapping[str, Any], names: Columns) -> list[Message]:
    turns: list[Message] = []
    for pair in (columns.get(names.history) if names.history else None) or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise Problem(f"column {names.history!r}: expected pairs of question and answer, found {shown(pair)}")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _with_system(messages: list[Message], columns: Mapping[str, Any], names: Columns) -> list[Message]:
    """A system prompt of the row's own column comes first."""
    value = value_of(columns, names.system) if names.system else None
    if value is None or value == "":
        return messages
    if not isinstance(value, str):
        raise Problem(f"column {names.system!r}: expected a string, found {shown(value)}")
    if messages[0]["role"] == "system":
        raise Problem(
            f"column {names.system!r}: the conversation has a system message, too; set columns: {{system: null}}"
        )
    return [{"role": "system", "content": value}, *messages]


def _from_json(value: str, where: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise Problem(f"{where}: expected JSON, found {shown(value)}: {error}") from None
