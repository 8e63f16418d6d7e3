"""One token drawn from logits, and its log-probability in the very distribution it was drawn from."""

from __future__ import annotations

import torch


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """A token of softmax(logits / temperature) and its log-probability; logits: [vocabulary].

    All in float64, by the inverse of the cumulative distribution at one uniform number of the generator: the draw
    depends on nothing else, and a token without probability is never drawn. At temperature 0 the likeliest token, the
    first of equals, with its log-probability at temperature 1; the generator is left alone.
    Raises ValueError for logits that are no distribution.
    """
    table = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if bool(table.isnan().any()):  # of one NaN, two infinities, or no finite value at all
        raise ValueError("the model's logits are no distribution")
    if temperature == 0:
        token = int(logits.argmax())
    else:
        cumulative = table.exp().cumsum(-1)
        total = cumulative[-1]
        number = torch.rand((), dtype=torch.float64, generator=generator) * total
        token = int(torch.searchsorted(cumulative, number, right=True))
        if token == len(cumulative):  # the product was rounded up to the total
            token = int(torch.searchsorted(cumulative, total))  # the last that has any probability
    return token, float(table[token])
