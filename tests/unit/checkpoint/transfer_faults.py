# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a rank is lost to a transfer between four ranks, and what the others must say of it, and when."""

import itertools
import os
import re
import signal
import threading
import time

import pytest

from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutionError
from unit.checkpoint.transfer_four_ranks import assert_moved, assert_untouched, buffers_of
from unit.checkpoint.transfer_groups import text_of
from unit.ranks import RankFailure, run_ranks

# Where the group waits for a minute or more, every other rank must know within this time.
QUICK_S = 5
UNDEFINED = 'transfer failed after it began, targets are undefined: '
UNTOUCHED = 'transfer failed before it began, targets are untouched: '


def failure_of(rank, executor):
    """The text of the failure that one call after another, each with other values, comes to.

    A further call must repeat it at once. Sources must be as they were, and so must targets where the text says so.
    """
    started = time.monotonic()
    for base in itertools.count(0, 100):
        sources, targets = buffers_of(rank, base)
        try:
            executor.execute(sources, targets)
        except AffineTransferExecutionError as error:
            text = str(error)
            break
        assert_moved(rank, targets, base)
        assert time.monotonic() - started < QUICK_S
    assert text_of(lambda: executor.execute(sources, targets)) == f'this executor can no longer be used: {text}'
    assert time.monotonic() - started < QUICK_S, text
    assert_untouched(rank, 'source', sources, base)
    if text.startswith(UNTOUCHED):
        assert_untouched(rank, 'target', targets, base)
    return text


def was_waiting_for(rank, text):
    return re.search(rf'(sending to|receiving from) rank {rank}( through shared memory)?: ', text) is not None


def names(rank, text):
    """Whether a message to or from this rank failed, or it is among those that had gone."""
    return was_waiting_for(rank, text) or re.search(rf'; no longer reachable: ranks? (\d, )*{rank}\b',
                                                    text) is not None


def explains(text, rank, lost):
    """Whether what ``rank`` says leads to the lost one: it names that, or rank 0, which tells all ranks and may have
    given up before the last connection of the lost one was closed."""
    return names(lost, text) or (rank != 0 != lost and names(0, text))


def told_of_ranks(function, size, *args, **options):
    """What is told of the ranks that did not return; those that met with anything unexpected are among them."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, size, *args, **options)
    return str(caught.value)


def die(delay_s=0.):
    if delay_s:
        threading.Timer(delay_s, die).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
