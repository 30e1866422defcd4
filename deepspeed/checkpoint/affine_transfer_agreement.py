# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the ranks of a transfer tell each other besides its payload: that all may begin, that all are done, or why not.

Each exchange gathers one row of a few integers from every rank, always of the same size, so every rank reads the same
rows and draws the same conclusion, even where one constructs an executor while another one executes. Only when a rank
must explain itself does a second exchange follow, of text.

Ranks may hold plans cut down to their own segments, so plans are never compared as wholes. The sender of each pair
adds a hash of what it will send to its row, the receiver subtracts the hash of what it expects, and the sum over all
rows vanishes when every pair agrees (128 bits, as two sums modulo 2**64).
"""

import hashlib
import json
import secrets
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch

from .affine_transfer_schedule import AffineTransferExecutionError, PairDigest
from .affine_transfer_transport import Transport

__all__ = ['Agreement', 'Opening', 'Refused', 'Terms', 'ranks_text']

_CONSTRUCT, _OPEN, _SHARE, _READY, _CLOSE = range(5)
_WORD = 1 << 64
_CAUSE_BYTES = 1024
_DIFFERENCES_TOLD = 4


class _Status(NamedTuple):
    """One rank's row: what it is doing, whether it refuses, the hashes of what it holds (0 when executing), and what
    it tells when a call begins (0 at other times)."""
    phase: int
    executor: int
    refuses: int = 0
    settings: int = 0
    pairs_low: int = 0
    pairs_high: int = 0
    residency: int = 0
    lays_out: int = 0
    host: int = 0

    def doing(self) -> str:
        if self.phase == _CONSTRUCT:
            return 'constructs an executor'
        return f'{("begins", "shares memory for", "lays out", "ends")[self.phase - 1]} executor {self.executor:016x}'


class Refused(Exception):
    """All ranks have agreed not to go on, and why. No other exception means that, whatever raised it."""


class Terms(NamedTuple):
    """What must agree between ranks: settings by name on all of them, and per pair its segments on both ends."""
    settings: Dict[str, str]
    sends: Mapping[int, PairDigest]
    receives: Mapping[int, PairDigest]


class Opening(NamedTuple):
    """What the ranks told at the opening of a call: each one's residency and host, and whether any lays out."""
    residencies: List[int]
    hosts: List[int]
    lays_out: bool


class Agreement:
    """The status exchanges of one executor. All methods are called by every rank of the group.

    They raise Refused on every rank alike, after which the group is as usable as before, or RuntimeError when the
    transport failed.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._row = torch.zeros(len(_Status._fields), dtype=torch.int64, device='cpu')
        self._table = torch.zeros((transport.size, len(_Status._fields)), dtype=torch.int64, device='cpu')
        self._row_values, self._table_values = self._row.numpy(), self._table.numpy()
        # The executor's number, which no other one has.
        self.executor = 0

    def construct(self, fault: Optional[Exception], terms: Optional[Terms]) -> None:
        """Agree on the terms and on a number for the executor, or pass on why this rank cannot build one."""
        # The executor's number is the sum of what all ranks draw: the same on all, and no other executor's.
        drawn = secrets.randbelow(_WORD)
        hashes = (0, 0, 0) if terms is None else (_hash_of(terms.settings), *_sum_of_pairs(terms))
        statuses = self._exchange(_Status(_CONSTRUCT, drawn, int(fault is not None), *hashes))
        self._raise_if_any_refuses(statuses, fault)
        settings_differ = len({status.settings for status in statuses}) > 1
        pairs_differ = any(sum(status[lane] for status in statuses) % _WORD for lane in (4, 5))
        if settings_differ or pairs_differ:
            raise _disagreement(_differences([json.loads(text) for text in self._gather_text(_as_json(terms))]))
        self.executor = sum(status.executor for status in statuses) % _WORD

    def open(self, fault: Optional[Exception], residency: int, host: int, lays_out: bool) -> Opening:
        """Agree that every rank begins this call of ``execute``, or pass on why this rank refuses to.

        Returns what all ranks said of where their buffers lie and of the host that they share memory on, 0 for none,
        and whether one of them is yet to lay its messages out.
        """
        status = _Status(_OPEN,
                         self.executor,
                         int(fault is not None),
                         residency=residency,
                         lays_out=int(lays_out),
                         host=host)
        statuses = self._exchange(status)
        self._raise_if_any_refuses(statuses, fault)
        return Opening([status.residency for status in statuses], [status.host for status in statuses],
                       any(status.lays_out for status in statuses))

    def share(self, host: int) -> List[int]:
        """Every rank's host after a step to share memory on it, 0 for one that could not take the step."""
        return [status.host for status in self._exchange(_Status(_SHARE, self.executor, host=host))]

    def ready(self, fault: Optional[Exception]) -> None:
        """Agree that every rank has laid its messages out, or pass on why this rank could not."""
        self._raise_if_any_refuses(self._exchange(_Status(_READY, self.executor, int(fault is not None))), fault)

    def close(self) -> None:
        """Learn that every rank has moved its part of this call; RuntimeError where one is elsewhere."""
        try:
            self._exchange(_Status(_CLOSE, self.executor))
        except Refused as refused:
            raise RuntimeError(str(refused)) from refused

    def _exchange(self, status: _Status) -> List[_Status]:
        self._row_values[:] = [_signed(value) for value in status]
        self._table_values.fill(-1)
        try:
            self._transport.all_gather(self._table, self._row)
        except RuntimeError as error:
            raise RuntimeError(f'exchanging status with all ranks: {error}') from error
        statuses = [_Status._make([value % _WORD for value in row]) for row in self._table_values.tolist()]
        if statuses[self._transport.rank] != status:
            # A library may give up without a word and leave the table as it was.
            raise RuntimeError('exchanging status with all ranks brought no rows back')
        if len({status[:1] if status.phase == _CONSTRUCT else status[:2] for status in statuses}) > 1:
            raise _disagreement([f'rank {rank} {status.doing()}' for rank, status in enumerate(statuses)])
        return statuses

    def _raise_if_any_refuses(self, statuses: List[_Status], fault: Optional[Exception]) -> None:
        if not any(status.refuses for status in statuses):
            return
        causes = self._gather_text(_text_of(fault), _CAUSE_BYTES)
        told = '; '.join(f'rank {rank}: {text}' for rank, text in enumerate(causes) if statuses[rank].refuses)
        raise Refused(f'transfer refused before it began: {told}') from fault

    def _gather_text(self, text: str, limit_bytes: Optional[int] = None) -> List[str]:
        """Every rank's text, cut to ``limit_bytes``; without a limit, the longest one's size is found out first."""
        encoded = np.frombuffer(text.encode(errors='backslashreplace'), dtype=np.uint8)[:limit_bytes]
        if limit_bytes is None:
            sizes = torch.zeros((self._transport.size, 1), dtype=torch.int64, device='cpu')
            self._transport.all_gather(sizes, torch.tensor([len(encoded)], device='cpu'))
            limit_bytes = int(sizes.max())
        row = torch.zeros(limit_bytes, dtype=torch.uint8, device='cpu')
        row.numpy()[:len(encoded)] = encoded
        rows = torch.zeros((self._transport.size, limit_bytes), dtype=torch.uint8, device='cpu')
        self._transport.all_gather(rows, row)
        return [row.numpy().tobytes().rstrip(b'\0').decode(errors='ignore') for row in rows]


def _text_of(fault: Optional[Exception]) -> str:
    if fault is None or isinstance(fault, AffineTransferExecutionError):
        return str(fault or '')
    return f'{type(fault).__name__}: {fault}'


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _hash_of(settings: Mapping[str, str]) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).digest(), 'little')


def _sum_of_pairs(terms: Terms) -> Tuple[int, int]:
    """The two words of this rank's share in the sum over all pairs."""
    signed = [(1, pair.value) for pair in terms.sends.values()] + [(-1, pair.value)
                                                                   for pair in terms.receives.values()]
    return (sum(sign * (value % _WORD)
                for sign, value in signed) % _WORD, sum(sign * (value // _WORD) for sign, value in signed) % _WORD)


def _as_json(terms: Terms) -> str:
    sends, receives = ({
        peer: [pair.segments, pair.elements, pair.value]
        for peer, pair in side.items()
    } for side in (terms.sends, terms.receives))
    return json.dumps({'settings': terms.settings, 'sends': sends, 'receives': receives})


def _differences(told: List[dict]) -> List[str]:
    """What differs between the terms that each rank told: the settings first, then pair by pair."""
    differences = []
    # Ranks with another version of this file may have other settings.
    for name in sorted({name for terms in told for name in terms['settings']}):
        ranks_by_value: Dict[str, List[int]] = {}
        for rank, terms in enumerate(told):
            ranks_by_value.setdefault(terms['settings'].get(name, 'unknown'), []).append(rank)
        if len(ranks_by_value) > 1:
            values = ', '.join(f'{value} on {ranks_text(ranks)}' for value, ranks in ranks_by_value.items())
            differences.append(f'{name}: {values}')
    pairs = {(rank, int(peer)) for rank, terms in enumerate(told) for peer in terms['sends']}
    pairs |= {(int(peer), rank) for rank, terms in enumerate(told) for peer in terms['receives']}
    for source, target in sorted(pairs):
        sent, expected = told[source]['sends'].get(str(target)), told[target]['receives'].get(str(source))
        if sent != expected:
            differences.append(f'rank {source} sends {_pair(sent)} to rank {target}, which expects {_pair(expected)}'
                               f'{_why(sent, expected)}')
    return differences


def ranks_text(ranks: List[int]) -> str:
    return f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {", ".join(map(str, ranks))}'


def _pair(pair: Optional[List[int]]) -> str:
    return 'nothing' if pair is None else f'{pair[0]} segments of {pair[1]} elements'


def _why(sent: Optional[List[int]], expected: Optional[List[int]]) -> str:
    same_sums = sent is not None and expected is not None and sent[:2] == expected[:2]
    return ' at other addresses, of other parameters or in another order' if same_sums else ''


def _disagreement(differences: List[str]) -> Refused:
    told = differences[:_DIFFERENCES_TOLD]
    if len(differences) > len(told):
        told.append(f'and {len(differences) - len(told)} more')
    return Refused(f'ranks disagree about the transfer schedule: {"; ".join(told)}')
