# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One fixed-size collective by which all ranks learn whether they may go on together."""

from typing import Callable, List, Tuple, TypeVar

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

__all__ = ['DIGEST_BYTES', 'exchange', 'read_together']

DIGEST_BYTES = 16
_NO_DIGEST = bytes(DIGEST_BYTES)

Value = TypeVar('Value')


def exchange(word: bytes) -> List[bytes]:
    """The ``word`` of every rank of the world, in rank order. Collective; all ranks give equally many bytes.

    Raises RuntimeError where a rank is gone or does not come within the default group's timeout.
    """
    mine = torch.tensor(list(word), dtype=torch.uint8, device=get_accelerator().current_device_name())
    words = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(words, mine)
    except RuntimeError as error:
        raise RuntimeError(f'ZeRO storage: not every rank of the world made this call: {error}') from error
    return [bytes(other.tolist()) for other in words]


def read_together(read: Callable[[], Tuple[Value, bytes]], subject: str) -> Value:
    """The value that ``read`` returns with its digest, once all ranks are known to have read the same. One collective.

    A rank that fails takes part in the collective nevertheless, or the others would wait for it, and raises its own
    error then. Raises RuntimeError on the others, and on every rank if the digests of ``DIGEST_BYTES`` differ.
    """
    failure, value, digest = None, None, _NO_DIGEST
    try:
        value, digest = read()
    except Exception as error:
        failure = error
    digests = exchange(digest)
    if failure is not None:
        raise failure
    failed = [rank for rank, other in enumerate(digests) if other == _NO_DIGEST]
    if failed:
        raise RuntimeError(f'{subject} storage maps: ranks {failed} could not read their layout, see their errors')
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(f'{subject} storage maps: ranks {different} lay out the {subject} differently from rank 0; '
                           'was the model or the order of the parameter groups built differently there, or do they '
                           'call another method?')
    return value
