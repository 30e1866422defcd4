# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Published model configurations, and the parameter shapes that Hugging Face transformers makes of them.

Only what determines a shape is written out; the values are those of each model's published ``config.json``.
"""

from typing import Dict, Mapping, NamedTuple, Tuple, Union

import torch

Shape = Tuple[int, ...]


class ModelConfig(NamedTuple):
    """``architecture`` is a prefix of class names: Llama stands for LlamaConfig and LlamaForCausalLM."""
    architecture: str
    arguments: Mapping[str, int]


def _llama_3(layers: int, hidden: int, intermediate: int, heads: int) -> ModelConfig:
    return ModelConfig(
        'Llama',
        dict(vocab_size=128256,
             hidden_size=hidden,
             intermediate_size=intermediate,
             num_hidden_layers=layers,
             num_attention_heads=heads,
             num_key_value_heads=8))


MODELS = {
    'Llama-3-8B':
    _llama_3(layers=32, hidden=4096, intermediate=14336, heads=32),
    'Llama-3-70B':
    _llama_3(layers=80, hidden=8192, intermediate=28672, heads=64),
    'Llama-3.1-405B':
    _llama_3(layers=126, hidden=16384, intermediate=53248, heads=128),
    'Mixtral-8x22B':
    ModelConfig(
        'Mixtral',
        dict(vocab_size=32768,
             hidden_size=6144,
             intermediate_size=16384,
             num_hidden_layers=56,
             num_attention_heads=48,
             num_key_value_heads=8,
             num_local_experts=8)),
    # Its model_type is its own, its published code is DeepSeek-V3's.
    'Kimi-K2':
    ModelConfig(
        'DeepseekV3',
        dict(vocab_size=163840,
             hidden_size=7168,
             intermediate_size=18432,
             moe_intermediate_size=2048,
             num_hidden_layers=61,
             num_attention_heads=64,
             num_key_value_heads=64,
             n_shared_experts=1,
             n_routed_experts=384,
             n_group=1,
             topk_group=1,
             first_k_dense_replace=1,
             q_lora_rank=1536,
             kv_lora_rank=512,
             qk_rope_head_dim=64,
             qk_nope_head_dim=128,
             v_head_dim=128)),
}


def llama_of(scale: float) -> ModelConfig:
    """A Llama with about ``scale`` * 264 million parameters, narrower as it is smaller, all dimensions even."""
    head = max(2, 2 * round(32 * scale**0.5))
    return ModelConfig(
        'Llama',
        dict(vocab_size=500 * head,
             hidden_size=16 * head,
             intermediate_size=56 * head,
             num_hidden_layers=14,
             num_attention_heads=16,
             num_key_value_heads=8))


def parameter_shapes(model: Union[str, ModelConfig]) -> Dict[str, Shape]:
    """The shape of every parameter of a model, or of one of ``MODELS``, by name, without allocating any.

    transformers keeps the experts of a layer in one parameter with the expert as its first dimension.
    """
    # Takes seconds to import, and whoever asks for no shapes does not need it.
    import transformers

    architecture, arguments = MODELS[model] if isinstance(model, str) else model
    config = getattr(transformers, f'{architecture}Config')(**arguments, tie_word_embeddings=False)
    with torch.device('meta'):
        module = getattr(transformers, f'{architecture}ForCausalLM')(config)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
