# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A simulated accelerator that works asynchronously, on a machine without any.

It is a device of torch (``simulated``) and DeepSpeed's accelerator in the process that installs it. Its memory cannot
be read by the host, its streams work late and in any order that their waits and events allow, and it finds races
between streams, the host and messages whatever the bytes hold. It follows CUDA where it matters to a program:

- ``non_blocking`` copies with pinned memory run late, other copies between host and device hold the host up;
- copies between host and device that convert or whose device side is not one piece allocate on the device;
- freed device memory is reused, last in first out, by the stream that it was allocated on.

Files, each using only those before it: ``races`` (clocks and byte ranges), ``synchronizations`` (leaving a wait out),
``hosts`` (the host of each rank), ``scheduler``, ``streams``, ``dlpack`` and ``memory``, ``host_accesses``,
``operators``, ``simulation``, ``transport``, ``ranks``, ``accelerator``.

A test lies in this folder and takes its seeds from the fixture::

    def test_copies_arrive(seeds):
        for seed in seeds:
            with Simulation(seed):                       # the calling thread is the only rank
                ...                                      # get_accelerator(), torch.empty(3, device='simulated'), ...

    def test_messages_arrive(seeds):
        def body(transport):                             # on a thread for each rank
            ...
            return here().device_usage                   # live_bytes, peak_bytes, allocations; also pinned_usage

        for seed in seeds:
            usages = run_ranks(body, 2, seed, memory={'device'})

    def test_every_wait_is_needed():
        with observed('executor.py') as calls:           # waits, records, ... called from files named so
            run_ranks(body, 2, 0)
        for site in calls:
            with omitted(site, 'executor.py'), pytest.raises((DeviceRace, RankFailure, Deadlock)):
                run_ranks(body, 2, 0)

The same seed gives the same run. Tensors of a simulation cannot be used after it, nor by another rank. The tests run
in a pytest process of their own, since the device is for good: ``test_in_its_own_process.py`` starts it, and by hand::

    python -m pytest tests/unit/simulated_accelerator --simulated-accelerator --seeds 100 -k copies
"""
