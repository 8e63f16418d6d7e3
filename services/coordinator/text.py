"""Text to token ids and back, exactly as the model's own tokenizer and chat template do it; without transformers.

Token ids are made once, here, and travel from then on: nothing is decoded and encoded again.
The start-up self-check compares them with what the engine and the trainer make of the same conversations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from services.common.errors import ConfigError, InvalidRequest

Message = dict[str, str]
"""{"role": ..., "content": ...}"""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Text:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder has no tokenizer.json."""
        self._folder = folder
        config = _read_json(folder / "tokenizer_config.json")
        config = {**_read_json(folder / "special_tokens_map.json"), **config}
        self.special_tokens = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        self._tokenizer = _load_tokenizer(folder)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        self._add_missing([*self.special_tokens.values(), *(_content(token) for token in extra)])
        source = _template_source(folder, config)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{folder}: the chat template is not valid: {error} (line {error.lineno})") from None
        self.stop_token_ids = self._find_stop_tokens()

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the assistant's answer begins.

        Raises ConfigError without a template, InvalidRequest where the template refuses.
        """
        if self._template is None:
            raise ConfigError(
                f"{self._folder} has no chat template: put one into chat_template.jinja there, or use "
                "data.format=text with prompts that are plain text"
            )
        try:
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}") from None

    def encode_conversation(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered conversation: as many beginning-of-sequence tokens as the template writes."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render` gave: nothing is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what tokenizer.json puts around a sequence (add_bos_token has no say)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool) -> str:
        """The text of token ids, with or without special tokens. For scorers and reports, never for training."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        return text

    def _add_missing(self, tokens: Sequence[str]) -> None:
        """Special tokens that only tokenizer_config.json names become tokens here too, as at their home."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        missing = [AddedToken(t, special=True, normalized=False) for t in tokens if t not in known]
        self._tokenizer.add_special_tokens(missing)

    def _find_stop_tokens(self) -> list[int]:
        """Every end-of-sequence token that generation_config.json, config.json and the tokenizer name."""
        found: set[int | None] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self._folder / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
        if "eos_token" in self.special_tokens:
            found.add(self._tokenizer.token_to_id(self.special_tokens["eos_token"]))
        return sorted(token for token in found if token is not None)


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot be read as a fast tokenizer: {error}") from None
    tokenizer.no_truncation()  # a file may switch both on; here length is checked, not cut
    tokenizer.no_padding()
    return tokenizer


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}.get("default")
    return template


class _GenerationBlocks(Extension):
    """Reads {% generation %} … {% endgeneration %}, which some templates put around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    return tree if isinstance(tree, dict) else {}
