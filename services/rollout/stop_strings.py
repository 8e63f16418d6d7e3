"""Stop strings, found in the text of sampled tokens while they are sampled."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"


class StopStrings:
    """Those of one request. The text is that of its sampled tokens, special tokens included, as vLLM makes it.

    Characters that need more tokens are held back until they are whole, so no stop string matches half of one.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = list(strings)
        self._longest = max(len(text) for text in self._strings)
        # The prompt is context only: some tokenizers write a token otherwise at the beginning of a text.
        self._stream = DecodeStream(ids=list(prompt_token_ids), skip_special_tokens=False)
        self._tail = ""

    def found(self, token_id: int) -> str:
        """Takes the next sampled token; answers the stop string that it completes, or "".

        Of several the one that is complete first, and of those that end together the one that was named first.
        """
        new = self._decoded(token_id)
        if not new:
            return ""
        text = self._tail + new
        ends = [(text.find(string) + len(string), string) for string in self._strings if string in text]
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(ends, key=lambda end: end[0])[1] if ends else ""

    def _decoded(self, token_id: int) -> str | None:
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises bare Exception
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Bytes that became another character with the next ones; vLLM begins anew there, too.
            self._stream = DecodeStream(skip_special_tokens=False)
            text = self._stream.step(self._tokenizer, token_id)
        return text
