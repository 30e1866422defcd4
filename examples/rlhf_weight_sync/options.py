# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What one run of the demo is made of, and the command line that says so."""

import argparse
import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The sizes of a Llama model. ``heads`` and ``kv_heads`` must divide by the tensor parallel size."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence: int
    micro_batches: int


# Hidden and intermediate sizes are small multiples of primes: three or five trainers cannot share most parameters
# evenly, and with two the cuts fall inside rows.
MODEL_SIZES = {
    'demo': ModelSize(424, 1172, layers=12, heads=8, kv_heads=4, head_dim=48, sequence=128, micro_batches=2),
    'tiny': ModelSize(44, 58, layers=2, heads=4, kv_heads=2, head_dim=8, sequence=32, micro_batches=1),
}

# One token per byte value, and three of the kind that tokenizers add; odd, so that tensor parallel shards of the
# vocabulary differ in size.
BYTE_VALUES = 256
DEFAULT_VOCAB_SIZE = BYTE_VALUES + 3


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """One run. ``corrupt`` is the rollout worker whose shard is spoilt after the last transfer, or None."""

    stage: int = 3
    offload: str = 'cpu'
    dtype: str = 'bf16'
    steps: int = 3
    trainers: int = 2
    tp: int = 2
    bytes_per_peer: int = 1 << 20
    tie_embeddings: bool = False
    vocab_size: int = DEFAULT_VOCAB_SIZE
    model_size: str = 'demo'
    seed: int = 0
    corrupt: Optional[int] = None

    @property
    def processes(self):
        """How many processes the job has."""
        return self.trainers + self.tp

    def __post_init__(self):
        kv_heads = MODEL_SIZES[self.model_size].kv_heads
        if min(self.steps, self.trainers, self.tp, self.bytes_per_peer) < 1:
            raise ValueError('--steps, --trainers, --tp and --bytes-per-peer must be at least 1')
        if kv_heads % self.tp:
            raise ValueError(f'--tp {self.tp} cannot share the {kv_heads} key/value heads of the {self.model_size} '
                             'model: every rollout worker needs whole heads')
        itemsize = {'bf16': 2, 'fp32': 4}[self.dtype]
        if self.bytes_per_peer < itemsize:
            raise ValueError(f'--bytes-per-peer {self.bytes_per_peer} has no room for one {self.dtype} element')
        if self.vocab_size < BYTE_VALUES:
            raise ValueError(f'--vocab-size {self.vocab_size} has no room for the {BYTE_VALUES} byte values')
        if self.corrupt is not None and not 0 <= self.corrupt < self.tp:
            raise ValueError(f'--corrupt {self.corrupt} names no rollout worker: they are 0..{self.tp - 1}')


def parse_options(arguments=None):
    """The JobOptions that the command line asks for; exits with a usage message when they make no sense."""
    parser = argparse.ArgumentParser(
        prog='run.py',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description='Train a small Llama with ZeRO and feed its weights to tensor parallel rollout workers.')
    parser.add_argument('--stage', type=int, choices=(1, 2, 3), help='ZeRO stage of the trainers')
    parser.add_argument('--offload', choices=('none', 'cpu'), help='where the trainers keep the optimizer state')
    parser.add_argument('--dtype', choices=('bf16', 'fp32'), help='dtype of the weights on both sides')
    parser.add_argument('--steps', type=int, help='optimizer steps, each followed by a transfer')
    parser.add_argument('--trainers', type=int, help='processes that train')
    parser.add_argument('--tp', type=int, help='rollout workers: the tensor parallel size')
    parser.add_argument('--bytes-per-peer', type=int, help='staging bytes per peer and round of a transfer')
    parser.add_argument('--tie-embeddings', action='store_true', help='share lm_head with the embedding')
    parser.add_argument('--vocab-size', type=int, help='rows of the embedding')
    parser.add_argument('--model-size', choices=tuple(MODEL_SIZES), help='tiny is for tests')
    parser.add_argument('--seed', type=int, help='seed of the weights and of the batches')
    parser.add_argument('--corrupt',
                        type=int,
                        metavar='WORKER',
                        help='spoil one element of this rollout worker after the last transfer, to see the check fail')
    parser.set_defaults(**{field.name: field.default for field in dataclasses.fields(JobOptions)})
    try:
        return JobOptions(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
