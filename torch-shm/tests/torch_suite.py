"""Run PyTorch's own tests of a backend: `python torch_suite.py gloo|shm RANKS RESULTS.json`.

They come with torch. For shm they run as they do for gloo, with groups of shm wherever they ask for
gloo, so that what is meant for gloo only is not skipped.
"""

import json
import os
import sys
import tempfile
import unittest


def main(backend, size, out):
    # The tests read these when they are imported.
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=size,
        TEMP_DIR=tempfile.mkdtemp(),
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "shm":
        _put_shm_in_the_place_of_gloo(dist)
    from torch.testing._internal.distributed import distributed_test

    class Suite(
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    ):
        def setUp(self):
            super().setUp()
            self._start_processes(
                torch.multiprocessing.get_context("fork").Process
            )

    results = {}
    for name in unittest.TestLoader().getTestCaseNames(Suite):
        result = unittest.TestResult()
        Suite(name).run(result)
        bad = result.failures + result.errors
        results[name] = (
            bad[0][1]
            if bad
            else f"skipped {result.skipped}" * bool(result.skipped)
        )
        results[name] = results[name] or "ok"
        print(name, results[name].splitlines()[-1][:80], flush=True)
    with open(out, "w") as file:
        json.dump(results, file)


def _put_shm_in_the_place_of_gloo(dist):
    import torch_shm  # noqa: F401 - it registers the backend

    init, new = dist.init_process_group, dist.new_group

    def named(backend):
        return "shm" if backend == "gloo" else backend

    dist.init_process_group = lambda backend=None, *args, **more: init(
        named(backend), *args, **more
    )
    dist.new_group = (
        lambda ranks=None, timeout=None, backend=None, *args, **more: new(
            ranks, timeout, named(backend), *args, **more
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
