# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the processes of the job report, and how the launcher shows it: progress bars, and one row per step."""

import dataclasses
import sys
from typing import Optional

from tqdm import tqdm

COLUMNS = (('step', 4), ('loss', 8), ('MiB sent', 9), ('seconds', 8), ('GiB/s', 7), ('rounds', 7),
           ('peak staging / bound (KiB)', 27), ('elements verified', 18))


@dataclasses.dataclass(frozen=True)
class Progress:
    """One more of the ``total`` units of ``phase`` is done."""

    phase: str
    total: int


@dataclasses.dataclass(frozen=True)
class Note:
    """A line of text."""

    text: str


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one process did in one step; a trainer knows its loss, a rollout worker how many elements it verified."""

    step: int
    sent_bytes: int
    seconds: float
    rounds: int
    peak_staging_bytes: int
    staging_bound_bytes: int
    loss: Optional[float] = None
    verified_elements: int = 0


class Display:
    """Shows items of ``processes`` processes as they come."""

    def __init__(self, processes):
        self._processes = processes
        # On a terminal the bars give way to the rows; in a log the last state of each stays.
        self._bar_style = {'leave': False} if sys.stderr.isatty() else {'mininterval': 60}
        self._bars = {}
        self._reports_by_step = {}
        self._header_shown = False
        self.verified_elements = 0

    def __call__(self, label, item):
        if isinstance(item, Progress):
            self._advance(item)
        elif isinstance(item, Note):
            print(item.text, flush=True)
        else:
            reports = self._reports_by_step.setdefault(item.step, [])
            reports.append(item)
            if len(reports) == self._processes:
                self._show_row(reports)

    def close(self):
        """Take the bars away that a failure left unfinished."""
        for bar in self._bars.values():
            bar.close()

    def _advance(self, item):
        if item.phase not in self._bars:
            self._bars[item.phase] = tqdm(desc=item.phase, total=item.total, **self._bar_style)
        bar = self._bars[item.phase]
        bar.update(1)
        if bar.n == item.total:
            bar.close()
            del self._bars[item.phase]

    def _show_row(self, reports):
        if not self._header_shown:
            print(' '.join(title.rjust(width) for title, width in COLUMNS))
            self._header_shown = True
        print(' '.join(cell.rjust(width) for cell, (_, width) in zip(row_cells(reports), COLUMNS)), flush=True)
        self.verified_elements += sum(report.verified_elements for report in reports)


def row_cells(reports):
    """The cells of one row: sums and extremes over the processes' reports of one step."""
    losses = [report.loss for report in reports if report.loss is not None]
    sent_bytes = sum(report.sent_bytes for report in reports)
    seconds = max(report.seconds for report in reports)
    fullest = max(reports, key=lambda report: report.peak_staging_bytes)
    return (str(reports[0].step), f'{sum(losses) / len(losses):.4f}', f'{sent_bytes / 2**20:.2f}', f'{seconds:.3f}',
            f'{sent_bytes / 2**30 / seconds:.2f}', str(max(report.rounds for report in reports)),
            f'{fullest.peak_staging_bytes / 2**10:.0f} / {fullest.staging_bound_bytes / 2**10:.0f}',
            f'{sum(report.verified_elements for report in reports):,}')
