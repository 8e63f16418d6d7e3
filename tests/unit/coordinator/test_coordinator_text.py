"""Token ids as transformers' own tokenizer and chat template make them, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from services.common.errors import ConfigError, InvalidRequest
from services.coordinator.selfcheck import awkward_conversations
from services.coordinator.text import Text
from tests.tiny.models import BOS, CHAT_TEMPLATE, EOS, PAD, make_tokenizer

LLAMA = (
    "{{- bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    "    {%- set system_message = '' %}\n"
    "{%- endif %}\n"
    "{{- '<system>' + system_message + eos_token }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<' + message['role'] + '>' + message['content'] | trim + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set role = 'assistant' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<' + role + '>' + message['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<assistant>'}}{% endif %}"
)
FEATURES = (
    "{% for message in messages %}\n"
    "  {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "  {{ message | tojson }}\n"
    "  {% generation %}{{ message.content }}{% endgeneration %}\n"
    "  {% if loop.index0 == 8 %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }}<assistant>"
)


def write_folder(folder: Path, template: str | None = CHAT_TEMPLATE, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


def home(folder: Path) -> Any:
    """The tokenizer as transformers loads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def test_awkward_conversations_are_awkward(tmp_path: Path) -> None:
    conversations = awkward_conversations(Text(write_folder(tmp_path)))
    contents = [message["content"] for messages in conversations for message in messages]
    assert any(not content.strip() for content in contents)
    assert any(EOS in content for content in contents)
    assert any(not content.isascii() for content in contents)
    assert {message["role"] for messages in conversations for message in messages} == {"system", "user", "assistant"}


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, LLAMA, GEMMA, FEATURES], ids=["tiny", "llama", "gemma", "features"]
)
def test_equals_transformers(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, template)
    ours, theirs = Text(folder), home(folder)
    compared = 0
    for messages in awkward_conversations(ours):
        try:
            expected = theirs.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception:  # the template refuses: so must we
            with pytest.raises(InvalidRequest, match="refuses the conversation"):
                ours.render(messages)
            continue
        rendered = theirs.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == rendered
        assert ours.encode_conversation(messages) == expected
        assert ours.decode(expected, special_tokens=True) == theirs.decode(expected)
        assert ours.decode(expected, special_tokens=False) == theirs.decode(expected, skip_special_tokens=True)
        ordinary = [number for number in expected if number not in theirs.all_special_ids]
        for ids in (expected, ordinary):
            assert ours.decode_both(ids) == (theirs.decode(ids, skip_special_tokens=True), theirs.decode(ids))
        compared += 1
    assert compared >= 8
    assert ours.encode_plain("plain 123") == theirs("plain 123")["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"extra_special_tokens": ["<think>", "</think>"]},
        {"additional_special_tokens": ["<think>"]},
        {"bos_token": {"__type": "AddedToken", "content": BOS, "lstrip": False, "rstrip": False, "normalized": False}},
    ],
    ids=["bos", "bos-eos", "no-bos", "extra", "additional", "token-as-object"],
)
def test_settings_beside_the_tokenizer_count(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_folder(tmp_path, **settings)
    ours, theirs = Text(folder), home(folder)
    for text in ["plain 123", "<think>deep</think> thought", f"{BOS}{EOS}"]:
        assert ours.encode_plain(text) == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "<think>2 + 3"}]
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_conversation(messages) == expected
    assert expected.count(1) == 1  # as many <bos> as the template writes, whatever the tokenizer adds to plain text


def test_plain_text_gets_what_the_tokenizer_puts_around_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ours, theirs = Text(folder), home(folder)
    assert ours.encode_plain("ab") == theirs("ab")["input_ids"] == [1, 6, 7]
    # The template has its own <bos>: one of it, not two.
    messages = [{"role": "user", "content": "ab"}]
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_conversation(messages) == expected == [1, 4, 6, 7, 2, 5]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert Text(folder).encode_plain("abcdef") == [6, 7, 8, 9, 10, 11]


def test_the_template_file_comes_before_the_one_in_the_settings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "old")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Text(folder).render([{"role": "user", "content": "a"}]) == "a!"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert Text(write_folder(tmp_path / "named", chat_template=named)).render([]) == "d"


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    text = Text(write_folder(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(InvalidRequest):
        text.render([{"role": "user", "content": "a"}])
    with pytest.raises(InvalidRequest):
        Text(write_folder(tmp_path, "{{ messages.append(1) }}")).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, [2]),
        ({"eos_token_id": 5}, {}, [2, 5]),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": [4, 5]}, [2, 3, 4, 5]),
    ],
)
def test_stop_tokens_are_all_that_the_folder_names(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: list[int]
) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Text(folder).stop_token_ids == expected


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        Text(tmp_path)
    with pytest.raises(ConfigError, match="chat template is not valid"):
        Text(write_folder(tmp_path, "{% if %}"))
    folder = write_folder(tmp_path / "broken")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not JSON"):
        Text(folder)
