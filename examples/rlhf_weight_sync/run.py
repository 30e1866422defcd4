# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Train with ZeRO, feed the weights to tensor parallel rollout workers after every step, and check every element.

One command starts all processes of the job on this machine, over gloo: ``python run.py --help``.
"""

import os
import signal
import sys
import tempfile

from display import Display
from options import parse_options
from processes import Worker, WorkerFailed, run_workers


def main(arguments=None):
    """Run the job that ``arguments`` ask for; the exit status of the program: 0 when everything was verified."""
    options = parse_options(arguments)
    display = Display(options.processes)
    print(f'starting {options.trainers} trainers and {options.tp} rollout workers', flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix='rlhf_weight_sync_') as folder:
            run_workers(job_workers(options, folder), display)
    except WorkerFailed as error:
        display.close()
        print(f'FAILED: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        display.close()
        print('interrupted', file=sys.stderr)
        return 128 + signal.SIGINT
    print(f'OK: all {display.verified_elements:,} elements on the rollout workers are the trainers\' own, '
          'and so are the generated tokens')
    return 0


def job_workers(options, folder):
    """The processes of the job, which find one another in ``folder``."""
    trainers = [Worker(f'trainer {i}', be_trainer, (options, i, folder)) for i in range(options.trainers)]
    rollouts = [Worker(f'rollout worker {i}', be_rollout, (options, i, folder)) for i in range(options.tp)]
    return trainers + rollouts


def be_trainer(report, *args):
    # Imported by the worker: the launcher needs neither torch nor deepspeed, and starts at once.
    from trainer import run_trainer
    run_trainer(report, *args)


def be_rollout(report, *args):
    from rollout import run_rollout
    run_rollout(report, *args)


if __name__ == '__main__':
    # The job lives in host memory, whatever accelerator this machine has; its processes read this.
    os.environ['DS_ACCELERATOR'] = 'cpu'
    # Not the default, which would leave the folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
