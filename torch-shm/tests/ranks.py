"""Ranks for the tests: forked processes that meet in a file, each with one thread of torch."""

import os
import pickle
import tempfile
from contextlib import ExitStack

import torch
import torch.distributed as dist

LIMIT = 120.0  # seconds until a rank that has not ended is killed


def init(backend, path, rank, size, **more):
    store = dist.FileStore(path, size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, **more
    )


def apart(fn, size, *args):
    """What `fn(rank, size, path, ...)` returns in processes of their own, by rank. They may end as
    they like: a rank that has returned nothing is left out."""
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        pipes, ranks = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            stack.enter_context(ours)
            pipes.append(ours)
            path = os.path.join(place, "store")
            ranks.append(
                context.Process(
                    target=_run, args=(fn, rank, size, path, theirs, args)
                )
            )
            ranks[-1].start()
            theirs.close()
        got = {}
        for rank, pipe in enumerate(pipes):
            if pipe.poll(LIMIT):
                try:
                    got[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:  # it has ended without a result
                    continue
        for process in ranks:
            process.join(LIMIT)
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
        assert not late
        return got


def _run(fn, rank, size, path, pipe, args):
    torch.set_num_threads(1)
    # Plain pickle: multiprocessing's own would share tensors through a process that has ended.
    pipe.send_bytes(pickle.dumps(fn(rank, size, path, *args)))
    pipe.close()


def over_shm(fn, size=2):
    """What `fn(rank, size)` returns in a process group over shared memory, in rank order."""
    got = apart(_joined, size, fn)
    return [got[rank] for rank in range(size)]


def _joined(rank, size, path, fn):
    import torch_shm  # noqa: F401 - it registers the backend

    init("shm", path, rank, size)
    try:
        return fn(rank, size)
    finally:
        dist.destroy_process_group()
