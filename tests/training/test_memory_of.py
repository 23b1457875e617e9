"""How much memory a rank says that it held."""

from __future__ import annotations

import pytest
import torch

from phalanx.training.log import memory_of


def test_ranks_that_share_a_gpu_have_their_part_of_all_that_is_held_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 1,000 bytes 300 are free, of the others 500 torch's, of which 450 were in use at most: 200 are
    # NCCL's, kernels and other programs.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 450)
    assert memory_of(torch.device("cuda", 0)) == 650
    assert memory_of(torch.device("cuda", 0), 2) == 325


def test_a_rank_on_a_cpu_has_held_its_process_s_memory() -> None:
    block = bytearray(1 << 26)
    assert memory_of(torch.device("cpu")) > len(block)
