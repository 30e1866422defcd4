# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The model that both sides build, and the text that it learns: the documentation of this repository, byte by byte."""

import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from options import MODEL_SIZES

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MICRO_BATCH = 2
PROMPTS = 4
PROMPT_TOKENS = 16

DTYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32}

transformers_logging.set_verbosity_error()


def build_model(options):
    """A LlamaForCausalLM of the asked size on the current default device, initialised from ``options.seed``."""
    size = MODEL_SIZES[options.model_size]
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=options.vocab_size,
                    hidden_size=size.hidden,
                    intermediate_size=size.intermediate,
                    num_hidden_layers=size.layers,
                    num_attention_heads=size.heads,
                    num_key_value_heads=size.kv_heads,
                    head_dim=size.head_dim,
                    max_position_embeddings=2 * size.sequence,
                    tie_word_embeddings=options.tie_embeddings))


def build_empty_model(options, dtype):
    """The same model in ``dtype`` on the meta device: shapes, and no storage."""
    with torch.device('meta'):
        return build_model(options).to(dtype)


def materialize(model):
    """Give a meta model storage on the host, NaN until something is written: what a transfer misses then shows.

    Embeddings that are tied, or that were before ``parallelize_module``, are tied afterwards.
    """
    model.to_empty(device='cpu')
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    if model.config.tie_word_embeddings:
        # to_empty() gave each module a parameter of its own, as parallelize_module does.
        model.lm_head.weight = model.model.embed_tokens.weight
    # The rotary frequencies are no parameters: nothing brings them, and to_empty() left garbage there.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def read_text():
    """The repository's documentation as one 1-D int64 tensor of byte values."""
    paths = [REPOSITORY / 'README.md', *REPOSITORY.glob('docs/**/*.rst'), *REPOSITORY.glob('examples/**/*.md')]
    text = b'\n'.join(path.read_bytes() for path in sorted(paths) if path.exists())
    return torch.tensor(list(text), dtype=torch.int64)


def training_batches(text, options, trainer):
    """Endless (MICRO_BATCH, sequence) batches of tokens cut from ``text`` at random, other ones for every trainer."""
    length = MODEL_SIZES[options.model_size].sequence
    generator = torch.Generator().manual_seed(options.seed * options.trainers + trainer)
    while True:
        starts = torch.randint(len(text) - length, (MICRO_BATCH, ), generator=generator)
        yield torch.stack([text[start:start + length] for start in starts])


def prompts(text):
    """(PROMPTS, PROMPT_TOKENS) tokens, spread evenly over ``text``."""
    stride = (len(text) - PROMPT_TOKENS) // PROMPTS
    return torch.stack([text[i * stride:i * stride + PROMPT_TOKENS] for i in range(PROMPTS)])
