"""First picks of plans stand within what practitioners run on such devices."""

from __future__ import annotations

import pytest

from phalanx.api.plan import plan

slow = pytest.mark.slow


# Model, cluster, sequence and tokens of a step; then the widest tp, the deepest pipeline
# and the ZeRO stages of what is run there.
@pytest.mark.parametrize(
    ("model", "cluster", "sequence", "tokens", "most", "stages"),
    [
        # Data parallelism alone, its states sharded or not.
        ("8b", "h100x64", 8192, "4Mi", (1, 1), {1, 2, 3}),
        ("1b", "rtx-4090x4", 2048, "512Ki", (1, 1), {0, 1, 2}),
        pytest.param("8b", "h100x8", 8192, "1Mi", (1, 1), {1, 2, 3}, marks=slow),
        pytest.param("8b", "h100x512", 8192, "4Mi", (1, 1), {1, 2, 3}, marks=slow),
        # Llama 3 70B: FSDP with recomputation, or tp and pp inside a few servers.
        pytest.param("70b", "h100x64", 8192, "4Mi", (8, 8), {1, 2, 3}, marks=slow),
        pytest.param("70b", "h100x256", 8192, "4Mi", (8, 8), {1, 2, 3}, marks=slow),
        pytest.param("70b", "h100x1024", 8192, "16Mi", (8, 8), {1, 2, 3}, marks=slow),
        # Grattafiori et al. 2024, table 4: tp8, pp16, states sharded.
        pytest.param("405b", "h100x16384", 8192, "16Mi", (8, 16), {1, 2}, marks=slow),
        # Mixtral: experts inside a server, a short pipeline over servers.
        pytest.param("8x7b", "h100x64", 4096, "4Mi", (4, 8), {1, 2, 3}, marks=slow),
    ],
)  # fmt: skip
def test_a_first_pick_is_what_practitioners_run(
    model: str,
    cluster: str,
    sequence: int,
    tokens: str,
    most: tuple[int, int],
    stages: set[int],
) -> None:
    asked = plan(model, cluster, sequence=sequence, batch_tokens=tokens, top=1)
    first = asked.plan.layouts[0]
    layout, device = first.layout, asked.request.hardware.memory
    widest, deepest = most
    assert layout.tp <= widest
    assert layout.pp <= deepest
    assert layout.zero in stages
    # Messages of tp and of experts stay inside a server.
    assert layout.tp * layout.ep <= asked.request.hardware.node
    # Usual fragmentation does not end it.
    _, fragmented = first.range(asked.request.profile)
    assert fragmented < device


@slow
def test_a_million_tokens_are_divided_over_ranks_of_a_sequence() -> None:
    asked = plan("8b", "h100x64", sequence=2**20, batch_tokens="4Mi", top=1)
    first = asked.plan.layouts[0]
    # Four sequences for 64 devices: each is divided over at least 16 of them.
    assert first.layout.cp * first.layout.tp >= 16
    assert first.layout.tp <= asked.request.hardware.node
    assert first.layout.pp == 1
    # A block's kept activations would not fit whole.
    assert first.layout.recompute != "none"
    _, fragmented = first.range(asked.request.profile)
    assert fragmented < asked.request.hardware.memory
