"""The reference policy: log-probabilities of sequences under a frozen model, computed in micro-batches.

What waits is computed oldest first, together with what fits beside it: at the same temperature, of the most similar
lengths, in at most `micro_batch_tokens` tokens, padding counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import Conflict, InvalidRequest, Unavailable
from services.reward.reference_process import ReferenceProcess


@dataclass(eq=False)
class _Waiting:
    token_ids: Sequence[int]
    temperature: float
    result: asyncio.Future[list[float]]


class Reference:
    """Any number of callers; one micro-batch at a time. It and its process are to be `run` beside the server."""

    def __init__(self, process: ReferenceProcess, micro_batch_tokens: int) -> None:
        self.process = process
        self.micro_batch_tokens = micro_batch_tokens
        self._waiting: list[_Waiting] = []
        self._some = asyncio.Event()

    def check_header(self, temperature: float, tokenizer_digest: bytes) -> None:
        """Raises InvalidRequest, Conflict for another tokenizer, Unavailable while the model is loading."""
        info = self.process.info
        if info is None:
            raise Unavailable(self.process.problem or "the reference model is loading")
        if not (math.isfinite(temperature) and temperature > 0.0):
            raise InvalidRequest(f"temperature {temperature}; expected a finite one above 0")
        if tokenizer_digest and tokenizer_digest != info.tokenizer_digest:
            raise Conflict(
                f"the token ids are of a tokenizer with digest {tokenizer_digest.hex()[:16]}, the reference model "
                f"{info.path} has {info.tokenizer_digest.hex()[:16]}: its log-probs of them would mean nothing; take a "
                "reference with the policy's tokenizer"
            )

    def check_sequence(self, name: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest."""
        info = self.process.info
        assert info is not None  # the header was checked before
        if not 1 <= len(token_ids) <= info.max_sequence_tokens:
            raise InvalidRequest(
                f"sequence {name}: {len(token_ids)} tokens; the reference model takes 1 to {info.max_sequence_tokens}"
            )
        unknown = next((i for i in token_ids if not 0 <= i < info.vocabulary_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"sequence {name}: token {unknown}; the reference model knows 0 to {info.vocabulary_size - 1}"
            )

    async def logprobs(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Of each token given those before it, the first one 0. Raises Unavailable with the cause."""
        waiting = _Waiting(token_ids, temperature, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._some.set()
        try:
            return await waiting.result
        finally:
            if waiting in self._waiting:  # the caller left
                self._waiting.remove(waiting)

    async def run(self) -> None:
        """Computes what waits, until cancelled."""
        while True:
            await self._some.wait()
            chosen = self._choose()
            if not chosen:
                self._some.clear()
                continue
            try:
                rows = await self.process.compute([one.token_ids for one in chosen], chosen[0].temperature)
            except Unavailable as error:
                for one in chosen:
                    if not one.result.done():
                        one.result.set_exception(Unavailable(str(error)))
                continue
            for one, row in zip(chosen, rows, strict=True):
                if not one.result.done():
                    one.result.set_result(row)

    def _choose(self) -> list[_Waiting]:
        """The next micro-batch, taken out of what waits."""
        if not self._waiting:
            return []
        oldest = self._waiting[0]
        alike = [waiting for waiting in self._waiting if waiting.temperature == oldest.temperature]
        numbers = fill([len(waiting.token_ids) for waiting in alike], self.micro_batch_tokens)
        chosen = [alike[number] for number in numbers]
        taken = set(map(id, chosen))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        return chosen


def fill(lengths: Sequence[int], token_budget: int) -> list[int]:
    """The rows of one micro-batch: row 0, and with it those nearest in length that fit.

    Rows lie side by side, each padded to the longest: rows · longest ≤ token_budget, unless row 0 alone is longer.
    """
    chosen, longest = [0], lengths[0]
    for number in sorted(range(1, len(lengths)), key=lambda n: (abs(lengths[n] - lengths[0]), n)):
        wider = max(longest, lengths[number])
        if (len(chosen) + 1) * wider <= token_budget:
            chosen.append(number)
            longest = wider
    return chosen
