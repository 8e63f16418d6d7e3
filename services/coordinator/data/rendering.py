"""From messages, or a plain prompt, to the token ids that the model sees. They are made once, here, and only here."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from services.common.errors import ConfigError, InvalidRequest
from services.coordinator.chat_template import ChatTemplate, Message
from services.coordinator.config import DataConfig, is_template
from services.coordinator.data.conversations import Problem
from services.coordinator.data.rows import shown
from services.coordinator.text import Text

# Of templates that are in use: in a prompt they mean that it was rendered for some other model.
FOREIGN = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<start_of_turn>|<\|(?:user|assistant)\|>|<｜(?:User|Assistant)｜>"
)
_PROBE = "antiphon-probe"


class Renderer:
    """Renders the prompts of one configuration, and counts what is allowed and may not be meant."""

    def __init__(self, config: DataConfig, text: Text) -> None:
        """Raises ConfigError when there is no chat template for chats, or an option has no effect."""
        self._config = config
        self._text = text
        self._bos = text.special_tokens.get("bos_token", "")
        self._specials = _any_of(text.special_contents())
        self._before = self._head = self._tail = ""
        self._template: ChatTemplate | None = None
        if config.format == "chat":
            self._template = self._find_template()
            self._find_what_is_around_a_prompt(self._template)
        elif config.add_special_tokens:
            self._refuse_an_end_after_prompts()
        self.seen: Counter[str] = Counter()
        """Oddity to number of rows."""
        self.first: dict[str, str] = {}
        """Oddity to the place of its first row."""

    def chat(self, messages: list[Message], tools: list[Any] | None, place: str) -> tuple[str, list[int]]:
        """The conversation as text, special tokens included, and its token ids. Raises Problem."""
        assert self._template is not None
        for number, message in enumerate(messages):
            self._refuse_rendered(message["content"], f"message {number}")
        contents = "\n".join(message["content"] for message in messages)
        if FOREIGN.search(contents):
            self._note("look rendered by the template of another model", place)
        elif self._specials is not None and self._specials.search(contents):
            self._note("hold the text of special tokens, which becomes those tokens", place)
        if tools and not self._template.knows_tools:
            self._note("have tools, which the chat template does not mention", place)
        try:
            rendered = self._template.render(messages, tools)
        except InvalidRequest as error:
            raise Problem(str(error)) from None
        ids = self._text.encode_rendered(rendered)
        if not ids:
            raise Problem(f"expected at least one token, the chat template makes none of {shown(contents)}")
        self._refuse_two_beginnings(ids, "the chat template writes one, and the prompt begins with another")
        return rendered, ids

    def plain(self, prompt: str, place: str) -> tuple[str, list[int]]:
        """The prompt as text, special tokens included, and its token ids. Raises Problem."""
        if self._config.input_template is not None:
            prompt = self._config.input_template.replace("{}", prompt)
        ids = self._text.encode_plain(prompt, special_tokens=self._config.add_special_tokens)
        if not ids:
            raise Problem(f"expected at least one token, the tokenizer makes none of {shown(prompt)}")
        self._refuse_two_beginnings(
            ids, "the tokenizer adds one, and the text begins with another; set add_special_tokens: false"
        )
        bos = self._text.bos_token_id
        if not self._config.add_special_tokens and bos in self._text.encode_plain(prompt)[:1] and ids[0] != bos:
            self._note("have no beginning-of-sequence token, which the tokenizer would have added", place)
        return self._text.decode(ids, special_tokens=True), ids

    def remarks(self) -> list[str]:
        """What may not be meant, of all rows so far and of the template."""
        found = [f"{count} row(s) {what}; the first is {self.first[what]}" for what, count in self.seen.items()]
        if self._template is None:
            return found
        if self._template.wrote_the_date:
            found.append("the chat template writes today's date: the same row is another prompt tomorrow")
        adds = self._bos and self._text.bos_token_id in self._text.encode_plain(_PROBE)
        if adds and self._bos not in self._before:
            found.append(f"the tokenizer begins plain text with {self._bos!r}, the chat template does not")
        return found

    def _find_template(self) -> ChatTemplate:
        config = self._config
        source = config.own_template()
        if source is None:
            home = self._text.template()
            return ChatTemplate(home.source, self._text.special_tokens, home.origin, config.chat_template_kwargs)
        own = config.template or ""
        origin = "data.template" if is_template(own) else own
        return ChatTemplate(source, self._text.special_tokens, origin, config.chat_template_kwargs)

    def _find_what_is_around_a_prompt(self, template: ChatTemplate) -> None:
        """The last line that the template writes before a user's words, without the beginning-of-sequence token, and
        the first after them.
        """
        try:
            self._before, found, after = template.render([{"role": "user", "content": _PROBE}]).partition(_PROBE)
        except InvalidRequest:  # it wants more than one message; the rows will tell
            return
        if not found:
            raise ConfigError(f"{template.origin}: the chat template leaves out what the user says")
        lines = [line.strip() for line in self._before.splitlines() if line.strip()]
        self._head = lines[-1].removeprefix(self._bos).strip() if lines else ""
        self._tail = next((line.strip() for line in after.splitlines() if line.strip()), "")

    def _refuse_rendered(self, content: str, where: str) -> None:
        if not self._head or not self._tail or self._tail not in content:
            return
        unmistakable = self._specials is not None and self._specials.search(self._head)
        begins = content.lstrip().removeprefix(self._bos).lstrip().startswith(self._head)
        if begins or (unmistakable and self._head in content):
            raise Problem(
                f"{where}: expected words, found what the chat template makes of them ({self._head!r} … "
                f"{self._tail!r}): it would be rendered twice; use format: text for prompts that are rendered already"
            )

    def _refuse_two_beginnings(self, ids: list[int], why: str) -> None:
        bos = self._text.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise Problem(f"expected one beginning-of-sequence token, found two: {why}")

    def _refuse_an_end_after_prompts(self) -> None:
        bare = self._text.encode_plain(_PROBE, special_tokens=False)
        added = self._text.encode_plain(_PROBE)
        if added[-1:] != bare[-1:] and added[-1] in self._text.stop_token_ids:
            raise ConfigError(
                "data.format=text: the tokenizer ends plain text with an end-of-sequence token, after which no answer "
                "follows; set data.add_special_tokens=false"
            )

    def _note(self, what: str, place: str) -> None:
        self.seen[what] += 1
        self.first.setdefault(what, place)


def _any_of(contents: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, contents))) if contents else None
