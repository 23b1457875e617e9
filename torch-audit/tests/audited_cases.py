"""Ranks that record one case after another: audited_cases.py FOLDER DTYPE RANKS:LAYOUT/BUG,... ...

Each case has a recorder of its own, installed as the hook installs it. All ranks are forked from one
process that has imported torch, which takes longer than the cases do.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from audited_lm import LAYOUTS
from experts_lm import SPREAD
from sliced_lm import SLICED

from torch_audit.recorder import Recorder


def folder_of(folder: Path, case: str) -> Path:
    return folder / case.replace("/", "_").replace(" ", "-")


def record_case(
    folder: Path, case: str, steps: int = 3, perturbed: int = 0
) -> None:
    layout, _, bug = case.partition("/")
    out = folder_of(folder, case)
    out.mkdir(parents=True, exist_ok=True)
    zeros = "/zeros" if bug == "zeros" else ""
    recorder = Recorder(
        out,
        steps,
        perturbed,
        contents=layout == "one",
        find_in=folder_of(folder, f"one{zeros}") if layout in SLICED else None,
    )
    recorder.install()
    (LAYOUTS | SLICED | SPREAD)[layout](bug)
    recorder.finish()


def run_rank(folder: Path, rank: int, ranks: int, cases: list[str]) -> None:
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks
    )
    for case in cases:
        print(f"rank {rank}: {case}", flush=True)
        record_case(folder, case)
    dist.destroy_process_group()


def run_world(folder: Path, ranks: int, cases: list[str]) -> bool:
    """True if all ranks have recorded all cases."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                run_rank(folder, rank, ranks, cases)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    return not any(ends)


def main(folder: str, dtype: str, *worlds: str) -> int:
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_num_threads(1)
    for world in worlds:
        ranks, _, cases = world.partition(":")
        if not run_world(Path(folder), int(ranks), cases.split(",")):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
