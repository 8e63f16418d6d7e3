"""The copies that a model's loader makes, noted and made again; against the loader itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from antiphon.types.v1.transfer_pb2 import ELEMENT_TYPE_BFLOAT16, ELEMENT_TYPE_FLOAT32, TensorSpec

from services.rollout.vllm_copies import NotedCopies, NotPlain


class Model(torch.nn.Module):
    """Loads as vLLM's layers do: shards of a packed layer, a slice of a row-parallel one, a padded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((6, 4), 7.0))
        self.row = torch.nn.Parameter(torch.full((4, 3), 7.0))
        self.embedding = torch.nn.Parameter(torch.full((5, 4), 7.0))
        self.head = torch.nn.Parameter(torch.full((3, 4), 7.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in list(weights):
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, 2 * "qkv".index(name), 2).copy_(weight)
                loaded.add("qkv")
            elif name == "row":
                self.row.data.copy_(weight.narrow(1, 3, 3))  # the second of two ranks
                loaded.add("row")
            elif name == "embedding":
                self.embedding[: weight.shape[0]].data.copy_(weight)
                self.embedding[weight.shape[0] :].data.fill_(0)
                loaded.add("embedding")
            else:
                self.load_head(weight)
                loaded.add("head")
        return loaded

    def load_head(self, weight: torch.Tensor) -> None:
        self.head.data.copy_(weight)


def spec(name: str, *shape: int, element_type: int = ELEMENT_TYPE_FLOAT32) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, element_type=element_type)  # type: ignore[arg-type]


# The embedding goes to the head, too: the learner's model is tied, this one holds both.
TENSORS = [
    (spec("q", 2, 4), ["q"]),
    (spec("k", 2, 4), ["k"]),
    (spec("v", 2, 4), ["v"]),
    (spec("row", 4, 6), ["row"]),
    (spec("embedding", 3, 4), ["embedding", "head"]),
]


def test_the_noted_copies_are_those_of_the_loader() -> None:
    model, expected = Model(), Model()
    before = [parameter.clone() for parameter in model.parameters()]
    noted = NotedCopies(model, TENSORS)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)), "noting changed the model"
    assert noted.loaded == {"qkv", "row", "embedding", "head"}
    for seed in range(2):
        torch.manual_seed(seed)
        buffer = torch.randn(200)  # tensors arrive as views of one message
        arrived, start = [], 3
        for each, _ in TENSORS:
            size = each.shape[0] * each.shape[1]
            arrived.append((each, buffer[start : start + size].view(tuple(each.shape))))
            start += size
        noted.make(arrived[:2])
        noted.make(arrived[2:])
        noted.fill()
        expected.load_weights(
            [(name, t) for (_, names), (_, t) in zip(TENSORS, arrived, strict=True) for name in names]
        )
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (lambda model, weight: model.head.data.copy_(weight + 1), "something made of the tensors"),
        (lambda model, weight: model.head.data.copy_(weight.to(torch.float64)), "something made of the tensors"),
        (lambda model, weight: model.head.data.add_(1), "add_"),
        (lambda model, weight: None, "copied nowhere"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_told(monkeypatch: pytest.MonkeyPatch, loader: object, says: str) -> None:
    monkeypatch.setattr(Model, "load_head", loader)
    model = Model()
    with pytest.raises(NotPlain, match=says):
        NotedCopies(model, [(spec("head", 3, 4), ["head"])])
    assert torch.equal(model.head, torch.full((3, 4), 7.0))


def test_a_cast_is_no_plain_copy() -> None:
    with pytest.raises(NotPlain):
        NotedCopies(Model(), [(spec("head", 3, 4, element_type=ELEMENT_TYPE_BFLOAT16), ["head"])])
