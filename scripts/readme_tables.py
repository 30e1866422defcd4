# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Write the README's tables of engines with and without storage maps, from the lists that the code and tests use.

Run from anywhere, with the fork installed, after those lists have changed: ``python scripts/readme_tables.py``.
"""

import re
from pathlib import Path

from deepspeed.runtime.zero.zero_affine import (REFUSED_CONFIGURATIONS, REFUSED_ENGINES, SUPPORTED_CONFIGURATIONS,
                                                SUPPORTED_WITHOUT_OPTIMIZER)

README = Path(__file__).resolve().parents[1] / 'README.md'


def supported_table():
    """One row for each stage and class of optimizer that DeepSpeed builds."""
    dtypes_by_row = {}
    for stage, device, dtype, optimizer_class in SUPPORTED_CONFIGURATIONS + SUPPORTED_WITHOUT_OPTIMIZER:
        devices = dtypes_by_row.setdefault((stage, optimizer_class), {})
        devices.setdefault(device, []).append(dtype)
    rows = []
    for (stage, optimizer_class), devices in dtypes_by_row.items():
        dtypes, = {tuple(dtypes) for dtypes in devices.values()}
        name = f'{optimizer_class} (no optimizer)' if optimizer_class == 'DeepSpeedZeRoOffload' else optimizer_class
        rows.append((str(stage), ', '.join(devices), ', '.join(dtypes), name))
    return _table(('ZeRO stage', 'offload_optimizer', 'model dtype', 'as DeepSpeed builds it'), rows)


def refused_table():
    return _table(('refused', 'why, and what to use'),
                  [(f'`{rule.key}`', rule.instead) for rule in REFUSED_CONFIGURATIONS + REFUSED_ENGINES])


def _table(head, rows):
    return '\n'.join('| ' + ' | '.join(cells) + ' |' for cells in (head, ('---', ) * len(head), *rows))


def with_tables(text):
    """The text with a table between each pair of marks ``<!-- name -->`` and ``<!-- end of name -->``."""
    for name, table in (('supported engines', supported_table()), ('refused engines', refused_table())):
        text, count = re.subn(f'(<!-- {name} -->\n).*?(<!-- end of {name} -->)',
                              lambda found: f'{found[1]}{table}\n{found[2]}',
                              text,
                              flags=re.DOTALL)
        if count != 1:
            raise ValueError(f'{README.name} has {count} places for the table of {name}, expected one')
    return text


if __name__ == '__main__':
    README.write_text(with_tables(README.read_text('utf-8')), 'utf-8')
