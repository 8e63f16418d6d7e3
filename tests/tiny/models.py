"""Tiny Llama models for tests: real Hugging Face folders, made on the spot by seed, that learn in seconds.

They load in transformers, in vLLM's CPU build (head size 32) and, the tokenizer, in plain `tokenizers`.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    import torch

    from tests.tiny.task import Example

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, BOS, EOS, *(f"<{role}>" for role in ROLES)]
CHARACTERS = string.ascii_lowercase + string.digits + string.ascii_uppercase + " +-*/=?!.,:;'\"()\n"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IGNORED = -100  # label of a position that is not learnt, as transformers has it
HEAD_SIZE = 32  # the smallest that vLLM's CPU attention takes


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per character: byte-pair encoding without merges. Characters it does not know are dropped."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 128,
    heads: int | None = None,
    kv_heads: int | None = None,
    max_positions: int = 256,
) -> Path:
    """Writes an untrained fp32 Llama (0.4 million parameters with the defaults) and its tokenizer; answers the folder.

    `heads` is hidden / 32 unless given. The same arguments give the same bytes.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    heads = heads or hidden // HEAD_SIZE
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
        initializer_range=0.05,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=ids[BOS], eos_token_id=ids[EOS], pad_token_id=ids[PAD]
    )
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [f"<{role}>" for role in ROLES],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return folder


def render(prompt: str) -> str:
    """What the chat template makes of one user message, up to where the answer begins."""
    return f"{BOS}<user>{prompt}{EOS}<assistant>"


def greedy_answers(model: Any, prompts: list[str], max_tokens: int) -> list[str]:
    """Greedy answers of a transformers model, cut at the end token; prompts of one length need no padding."""
    import torch

    tokenizer = make_tokenizer()
    answers: dict[str, str] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [prompt for prompt in prompts if len(prompt) == length]
        ids = torch.tensor([tokenizer.encode(render(prompt)).ids for prompt in group])
        width = ids.shape[1]
        with torch.no_grad():
            for _ in range(max_tokens):
                logits = model(input_ids=ids).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        for prompt, row in zip(group, ids[:, width:].tolist(), strict=True):
            end = tokenizer.token_to_id(EOS)
            kept = row[: row.index(end)] if end in row else row
            answers[prompt] = tokenizer.decode(kept)
    return [answers[prompt] for prompt in prompts]


def greedy_accuracy(folder: Path, examples: list[Example]) -> float:
    """Share of exact answers of the model in a folder, by plain transformers in fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(len(example.reference) for example in examples) + 1
    with _one_thread():
        answers = greedy_answers(model, [example.prompt for example in examples], longest)
    return sum(a == e.reference for a, e in zip(answers, examples, strict=True)) / len(examples)


@dataclass(frozen=True)
class Pretrained:
    """What pre-training made."""

    accuracy: float
    """Share of held-out prompts that the greedy answer gets right."""
    in_form: float
    """Share whose greedy answer is right or the tempting one."""
    updates: int


def pretrain(
    folder: Path,
    training: list[Example],
    heldout: list[Example],
    *,
    seed: int = 0,
    right_share: float = 0.4,
    wanted_in_form: float = 0.98,
    highest_accuracy: float = 0.45,
    learning_rate: float = 1e-3,
    batch_size: int = 32,
    max_updates: int = 2000,
) -> Pretrained:
    """Teaches the model in the folder both answers to each prompt, the right one in `right_share` of the cases.

    It then samples the right answer about that often, and its greedy answer is the tempting one: it can do the task and
    does not, which is what reinforcement has to change. Raises RuntimeError when `max_updates` were not enough.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    chooser = random.Random(seed)
    in_form = accuracy = 0.0
    with _one_thread():
        for update in range(1, max_updates + 1):
            chosen = chooser.sample(training, min(batch_size, len(training)))
            pairs = [(e.prompt, e.reference if chooser.random() < right_share else e.tempting) for e in chosen]
            ids, labels = _batch(pairs)
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            if update % 20:
                continue
            right = _greedy_is(model, [(example.prompt, example.reference) for example in heldout])
            tempting = _greedy_is(model, [(example.prompt, example.tempting) for example in heldout])
            in_form = float((right | tempting).double().mean())
            accuracy = float(right.double().mean())
            if in_form >= wanted_in_form and accuracy <= highest_accuracy:
                model.save_pretrained(folder)
                return Pretrained(accuracy, in_form, update)
    raise RuntimeError(f"{folder}: {in_form:.2f} in form, {accuracy:.2f} right, after {max_updates} updates")


@contextmanager
def _one_thread() -> Iterator[None]:
    """For so small a model a second thread is mostly waited for."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _greedy_is(model: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """For each (prompt, answer) whether greedy decoding gives it, [rows], in one forward: it does if and only if each
    next token, given the answer's tokens before it, is the likeliest."""
    import torch

    ids, labels = _batch(pairs)
    with torch.inference_mode():
        choices = model(input_ids=ids).logits[:, :-1].argmax(-1)
    right = (choices == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return right.all(dim=1)


def _batch(pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [rows, T], padded at the end; only the answer and its end token are labelled."""
    import torch

    tokenizer = make_tokenizer()
    rows = []
    for prompt, answer in pairs:
        before = tokenizer.encode(render(prompt)).ids
        after = tokenizer.encode(answer + EOS).ids
        rows.append((before + after, [IGNORED] * len(before) + after))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return ids, labels
