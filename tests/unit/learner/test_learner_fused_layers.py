"""Which rotations the kernel may take over. The kernels themselves are tried on a GPU (kernel_checks.py)."""

from __future__ import annotations

import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from services.learner.fused_layers import rotates_halves


def test_the_rotation_of_halves_is_known():
    assert rotates_halves(modeling_llama.apply_rotary_pos_emb)
    assert rotates_halves(modeling_qwen2.apply_rotary_pos_emb)


def test_neighbours_and_parts_of_a_head_are_left_alone():
    assert not rotates_halves(modeling_cohere.apply_rotary_pos_emb)
    assert not rotates_halves(modeling_glm.apply_rotary_pos_emb)


def test_what_cannot_be_called_so_is_left_alone():
    assert not rotates_halves(lambda q, k, freqs: (q, k))
    assert not rotates_halves(lambda q, k, cos, sin: torch.cat((q, k), 1))
