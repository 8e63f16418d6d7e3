"""What the model sees: templates, system prompts, as many beginning-of-sequence tokens as there should be, lengths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from antiphon.types.v1 import policy_pb2, trajectory_pb2

from services.common.errors import ConfigError
from services.coordinator import trajectories
from services.coordinator.config import DataConfig
from services.coordinator.data import Dataset, load_dataset
from services.coordinator.text import Text
from tests.tiny.models import BOS, CHAT_TEMPLATE, EOS, PAD, make_tokenizer

USER = {"role": "user", "content": "ab"}
# Llama's way: the template writes <bos>, and the tokenizer adds one to plain text, too.
# Gemma's: so as well, and no system role. Qwen's: neither has any. The last: only the tokenizer adds one.
LLAMA = CHAT_TEMPLATE
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_BOS = CHAT_TEMPLATE.replace("{{ bos_token }}", "")
TOOLS = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}")
THINKING = CHAT_TEMPLATE + "{% if add_generation_prompt and not enable_thinking %}()\n{% endif %}"


def model_folder(folder: Path, template: str | None = CHAT_TEMPLATE, single: str = "$A", **settings: Any) -> Path:
    """A tokenizer of one token per character that puts `single` around plain text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[(BOS, 1), (EOS, 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


def load(folder: Path, text: Text, *rows: dict[str, Any], **config: Any) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"reference": "x"}) + "\n" for row in rows))
    settings = DataConfig(path=str(path), **config)
    return load_dataset(settings, settings, text)


def only(folder: Path, text: Text, row: dict[str, Any], **config: Any) -> tuple[str, tuple[int, ...]]:
    (prompt,) = load(folder, text, row, **config).prompts
    return prompt.text, prompt.token_ids


@pytest.mark.parametrize(
    ("template", "single", "chat_bos", "plain_bos"),
    [(LLAMA, f"{BOS} $A", 1, 1), (GEMMA, f"{BOS} $A", 1, 1), (NO_BOS, "$A", 0, 0), (NO_BOS, f"{BOS} $A", 0, 1)],
    ids=["llama", "gemma", "qwen", "tokenizer-only"],
)
def test_as_many_beginnings_as_at_home(
    tmp_path: Path, template: str, single: str, chat_bos: int, plain_bos: int
) -> None:
    """cases.md M37, against transformers itself."""
    import transformers

    folder = model_folder(tmp_path / "model", template, single)
    home, text = transformers.AutoTokenizer.from_pretrained(folder), Text(folder)
    _, chat = only(tmp_path, text, {"prompt": "ab"})
    assert list(chat) == home.apply_chat_template([USER], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert chat.count(1) == chat_bos
    _, plain = only(tmp_path, text, {"prompt": "ab"}, format="text")
    assert list(plain) == home("ab")["input_ids"]
    assert plain.count(1) == plain_bos


def test_a_template_that_writes_no_beginning_is_told(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", NO_BOS, f"{BOS} $A"))
    assert load(tmp_path, text, {"prompt": "ab"}).remarks == (
        "the tokenizer begins plain text with '<bos>', the chat template does not",
    )


def test_two_beginnings_are_refused_and_can_be_mended(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", LLAMA, f"{BOS} $A"))
    rendered = {"prompt": "<bos><user>ab<eos><assistant>"}
    with pytest.raises(ConfigError, match="row 0, expected one beginning-of-sequence token, found two: the tokenizer"):
        load(tmp_path, text, rendered, format="text")
    assert only(tmp_path, text, rendered, format="text", add_special_tokens=False) == (
        rendered["prompt"],
        (1, 4, 6, 7, 2, 5),
    )
    bare = load(tmp_path, text, {"prompt": "ab"}, format="text", add_special_tokens=False)
    assert "1 row(s) have no beginning-of-sequence token" in bare.remarks[0]
    bos_in_the_words = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="the chat template writes one, and the prompt begins with another"):
        load(tmp_path, Text(model_folder(tmp_path / "bare", bos_in_the_words)), {"prompt": "<bos>ab"})


def test_a_tokenizer_that_ends_plain_text_is_refused(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", LLAMA, f"{BOS} $A {EOS}"))
    with pytest.raises(ConfigError, match=r"ends plain text with an end-of-sequence token.*add_special_tokens=false"):
        load(tmp_path, text, {"prompt": "ab"}, format="text")
    assert only(tmp_path, text, {"prompt": "ab"})[1] == (1, 4, 6, 7, 2, 5)  # a chat has none of it


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}"


@pytest.mark.parametrize("template", [LLAMA, GEMMA, CHATML, INST], ids=["llama", "gemma", "chatml", "inst"])
def test_a_prompt_that_was_rendered_already_is_refused(tmp_path: Path, template: str) -> None:
    text = Text(model_folder(tmp_path / "model", template, extra_special_tokens=["<|im_start|>", "<|im_end|>"]))
    once = text.render([USER])
    for prompt in (once, once.removeprefix(BOS), [{"role": "user", "content": once}]):
        with pytest.raises(ConfigError, match="it would be rendered twice; use format: text"):
            load(tmp_path, text, {"prompt": prompt})
    known = re.sub(r"[\[\]]", "", once)  # the tiny tokenizer drops brackets
    assert only(tmp_path, text, {"prompt": once}, format="text")[0] == known
    assert only(tmp_path, text, {"prompt": "ab"})[0] == once  # and words are none


def test_words_that_look_like_a_template_are_told(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model"))
    rows = [{"prompt": "[INST] ab [/INST]"}, {"prompt": "a"}, {"prompt": "a<eos>b"}, {"prompt": "<eos>"}]
    remarks = load(tmp_path, text, *rows).remarks
    assert [re.sub(r"is /.*/", "is ", remark) for remark in remarks] == [
        "1 row(s) look rendered by the template of another model; the first is rows.jsonl, line 1",
        "2 row(s) hold the text of special tokens, which becomes those tokens; the first is rows.jsonl, line 3",
    ]


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", template=None))
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with pytest.raises(ConfigError, match=r"has no chat template: .* name one by data\.template"):
        load(tmp_path, text, {"prompt": "ab"})
    expected = "user: ab\nassistant:"
    assert only(tmp_path, text, {"prompt": "ab"}, template=own)[0] == expected
    (tmp_path / "own.jinja").write_text(own)
    assert only(tmp_path, text, {"prompt": "ab"}, template=str(tmp_path / "own.jinja"))[0] == expected
    # It comes before the model's own.
    assert only(tmp_path, Text(model_folder(tmp_path / "other")), {"prompt": "ab"}, template=own)[0] == expected
    for template, complaint in [
        (str(tmp_path / "none.jinja"), r"data\.template: .*none\.jinja: cannot be read"),
        ("{% if %}", r"data\.template: the chat template is not valid"),
        ("{{ 'words' }}", "leaves out what the user says"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            load(tmp_path, text, {"prompt": "ab"}, template=template)


def test_variables_of_the_template(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", THINKING))
    row = {"prompt": "ab"}
    assert only(tmp_path, text, row)[0] == "<bos><user>ab<eos><assistant>()\n"
    assert only(tmp_path, text, row, chat_template_kwargs={"enable_thinking": True})[0] == (
        "<bos><user>ab<eos><assistant>"
    )
    for name, complaint in [
        ("enable_thinkin", "uses no variable 'enable_thinkin'; did you mean 'enable_thinking'"),
        ("zzz", "it uses bos_token, enable_thinking, eos_token"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            load(tmp_path, text, row, chat_template_kwargs={name: True})


def test_a_template_that_writes_the_date_is_told(tmp_path: Path) -> None:
    dated = "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}" + CHAT_TEMPLATE + "{{ date }}"
    text = Text(model_folder(tmp_path / "model", dated))
    (remark,) = load(tmp_path, text, {"prompt": "ab"}).remarks
    assert "writes today's date: the same row is another prompt tomorrow" in remark
    assert load(tmp_path, text, {"prompt": "ab"}, chat_template_kwargs={"date": "2026"}).remarks == ()


def test_the_system_prompt_is_for_conversations_without_one(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model"))
    rows = [
        {"prompt": "ab"},
        {"prompt": "ab", "system": "of the row"},
        {"prompt": [{"role": "system", "content": "of the chat"}, USER]},
    ]
    data = load(tmp_path, text, *rows, system_prompt="of all")
    systems = [re.findall("<system>(.*?)<eos>", prompt.text) for prompt in data.prompts]
    assert systems == [["of all"], ["of the row"], ["of the chat"]]
    assert data.prompts[0].messages == ({"role": "system", "content": "of all"}, USER)
    assert data.remarks == ("2 row(s) keep a system message of their own, not system_prompt",)
    gemma = Text(model_folder(tmp_path / "gemma", GEMMA))
    with pytest.raises(ConfigError, match="row 0, the chat template refuses the conversation: System role not"):
        load(tmp_path, gemma, {"prompt": "ab"}, system_prompt="of all")


def test_plain_prompts_in_an_input_template(tmp_path: Path) -> None:
    text = Text(model_folder(tmp_path / "model", template=None))
    found, _ = only(tmp_path, text, {"prompt": "what is x{1} or {}"}, format="text", input_template="Q: {}\nA:")
    assert found == "Q: what is x1 or \nA:"  # the tiny tokenizer knows no braces
    alpaca = {"instruction": "add", "input": "2 + 3"}
    assert only(tmp_path, text, alpaca, format="text", input_template="Q: {}\nA:")[0] == "Q: add\n2 + 3\nA:"
    with pytest.raises(ConfigError, match="expected a prompt, found ' '"):
        load(tmp_path, text, {"prompt": "a"}, {"prompt": " "}, format="text", input_template="Q: {}\nA:")


def test_tools_are_described_and_counted(tmp_path: Path) -> None:
    """cases.md D02: the length is that of the final ids, descriptions of tools included."""
    tool = {"name": "calculator"}
    described = f"<bos>{json.dumps([tool])}<user>ab<eos><assistant>"
    text = Text(model_folder(tmp_path / "model", TOOLS))
    for tools in ([tool], json.dumps([tool])):
        rendered, ids = only(tmp_path, text, {"prompt": "ab", "tools": tools})
        assert rendered == described
    bare = len(only(tmp_path, text, {"prompt": "ab", "tools": None})[1])
    assert bare == 6
    assert len(ids) > bare + 5
    with pytest.raises(ConfigError, match=f"expected at most max_prompt_tokens = {bare + 5} tokens, found {len(ids)}"):
        load(tmp_path, text, {"prompt": "ab"}, {"prompt": "ab", "tools": [tool]}, max_prompt_tokens=bare + 5)
    data = load(tmp_path, text, {"prompt": "ab", "tools": [tool]}, max_prompt_tokens=len(ids))
    assert len(data.prompts[0].token_ids) == len(ids)
    deaf = load(tmp_path, Text(model_folder(tmp_path / "deaf")), {"prompt": "ab", "tools": [tool]})
    assert "1 row(s) have tools, which the chat template does not mention" in deaf.remarks[0]


@pytest.mark.parametrize("single", ["$A", f"{BOS} $A"])
def test_an_empty_prompt_is_refused_with_and_without_a_beginning(tmp_path: Path, single: str) -> None:
    """cases.md D04: with a beginning-of-sequence token the ids of an empty prompt would not be empty."""
    text = Text(model_folder(tmp_path / "model", single=single))
    for form in ("chat", "text"):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, {"prompt": "a"}, {"prompt": ""}, {"prompt": "  \n"}, format=form)
        assert "line 2, row 1, column 'prompt': expected a prompt, found ''" in str(caught.value)
        assert "line 3, row 2, column 'prompt': expected a prompt" in str(caught.value)
    with pytest.raises(ConfigError, match="line 2, row 1, column 'prompt': expected a string or a list"):
        load(tmp_path, text, {"prompt": "a"}, {"prompt": []})


def test_an_end_token_within_a_prompt_is_kept_and_masked_by_length(tmp_path: Path) -> None:
    """cases.md M20, M35: pad = eos, and the prompt holds it; what is trained is all after the prompt, its end too."""
    text = Text(model_folder(tmp_path / "model", pad_token=EOS))
    _, ids = only(tmp_path, text, {"prompt": [USER, {"role": "assistant", "content": "c"}, USER]})
    assert ids == (1, 4, 6, 7, 2, 5, 8, 2, 4, 6, 7, 2, 5)
    answer = [9, 2]
    trajectory = trajectory_pb2.Trajectory(
        token_ids=[*ids, *answer],
        loss_mask=[False] * len(ids) + [True] * 2,
        behavior_logprobs=[0.0] * len(ids) + [-1.0] * 2,
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        version_spans=[policy_pb2.VersionSpan(start=len(ids), end=len(ids) + 2, policy_version=0)],
    )
    trajectories.check(trajectory, ids, max_tokens=2)
    assert trajectories.sampled_ids(trajectory) == answer
