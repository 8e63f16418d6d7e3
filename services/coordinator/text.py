"""Text to token ids and back, exactly as the model's own tokenizer and chat template do it; without transformers.

Token ids are made once, here, and travel from then on: nothing is decoded and encoded again.
The start-up self-check compares them with what the engine and the trainer make of the same conversations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.common.digest import digest_vocabulary
from services.common.errors import ConfigError
from services.coordinator.chat_template import ChatTemplate, Message

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
        # Before tokens are added: what tokenizer.json says, which is what others read of it.
        self.vocabulary_digest = digest_vocabulary(self._tokenizer.get_vocab(with_added_tokens=True))
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        self._add_missing([*self.special_tokens.values(), *(_content(token) for token in extra)])
        source = _template_source(folder, config)
        self._template = None if source is None else ChatTemplate(source, self.special_tokens, str(folder))
        self.stop_token_ids = self._find_stop_tokens()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special_ids = frozenset(number for number, token in added if token.special)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def template(self) -> ChatTemplate:
        """The model's own chat template. Raises ConfigError with the ways out when it has none."""
        if self._template is None:
            raise ConfigError(
                f"{self._folder} has no chat template: put one into chat_template.jinja there, name one by "
                "data.template, or use data.format=text with prompts that are plain text"
            )
        return self._template

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation by the model's own template, up to where the assistant's answer begins.

        Raises ConfigError without a template, InvalidRequest where the template refuses.
        """
        return self.template().render(messages)

    def encode_conversation(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered conversation: as many beginning-of-sequence tokens as the template writes."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render` gave: nothing is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with what tokenizer.json puts around a sequence (add_bos_token has no say)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool) -> str:
        """The text of token ids, with or without special tokens. For scorers and reports, never for training."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        return text

    def decode_both(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The text without special tokens and with them; that of ids without any is made once."""
        plain = self.decode(token_ids, special_tokens=False)
        if self._special_ids.isdisjoint(token_ids):
            return plain, plain
        return plain, self.decode(token_ids, special_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token, if the model names one."""
        bos = self.special_tokens.get("bos_token")
        found: int | None = None if bos is None else self._tokenizer.token_to_id(bos)
        return found

    def special_contents(self) -> list[str]:
        """The text of every special token: in a prompt it becomes that token, not its letters."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

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
