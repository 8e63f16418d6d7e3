"""Chat templates, rendered as transformers renders them, without transformers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import ConfigError, InvalidRequest

Message = dict[str, str]
"""{"role": ..., "content": ...}"""


class ChatTemplate:
    """One template with the values that it is always given."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], origin: str, variables: Mapping[str, Any] | None = None
    ) -> None:
        """`variables` are chat_template_kwargs. Raises ConfigError when the template does not parse, or uses none of
        that name: jinja2 would ignore it.
        """
        self.wrote_the_date = False
        environment = _environment(self._now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: the chat template is not valid: {error} (line {error.lineno})") from None
        self._used = jinja2.meta.find_undeclared_variables(tree)
        known = self._used - {"messages", "tools", "documents", "add_generation_prompt"}
        for name in variables or {}:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it uses {', '.join(sorted(known)) or 'none'}"
                raise ConfigError(f"{origin}: the chat template uses no variable {name!r}; {hint}")
        self._given = {**special_tokens, **(variables or {})}
        self.source = source
        self.origin = origin

    @property
    def knows_tools(self) -> bool:
        return "tools" in self._used

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The conversation as text, up to where the assistant's answer begins.

        Raises InvalidRequest where the template refuses.
        """
        try:
            return self._template.render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=True, **self._given
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}") from None

    def _now(self, form: str) -> str:
        self.wrote_the_date = True
        return datetime.now().strftime(form)


class _GenerationBlocks(Extension):
    """Reads {% generation %} … {% endgeneration %}, which some templates put around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment(now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for (that of transformers)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now
    return environment
