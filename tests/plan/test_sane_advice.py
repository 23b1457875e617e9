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
