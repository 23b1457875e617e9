"""Slurm's lists of nodes, and which of its variables a step's ranks go by.

The lists are written by hand from the rules in Slurm's documentation (`scontrol show hostnames`, and
"hostlist expressions" in the manual of slurm.conf): brackets hold numbers and ranges, the zeros in front
of a range's first number are kept, several brackets multiply, and commas outside of brackets separate.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.environment import (
    EnvironmentMistake,
    first_node,
    node_command,
    rendezvous,
)

FIRST = {
    "node1": "node1",
    "node1,node2": "node1",
    "node[1-4]": "node1",
    "node[001-128]": "node001",
    "gpu[003-007,9],io1": "gpu003",
    "gpu[9,003-007]": "gpu9",
    "node[1-2]-ib": "node1-ib",
    "rack[1-2]node[01-04]": "rack1node01",
    "c[1-2]-[2-4]": "c1-2",
    "a[08-10]b[1,3]c[07]d": "a08b1c07d",
    "dgx-a100-[12,15-17].cluster.example": "dgx-a100-12.cluster.example",
    "io7,rack[1-2]node[01-04]": "io7",
    "node[0-0]": "node0",
    "node1[5-6]": "node15",
    "10.0.0.[4-7]": "10.0.0.4",
    "[1-3]": "1",
}


@pytest.mark.parametrize("nodes, first", FIRST.items())
def test_the_first_node_of_a_list_is_the_one_that_slurm_expands_first(
    nodes: str, first: str
) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    "nodes",
    [
        "",
        ",a",
        "a[",
        "a[1-2",
        "a]",
        "a[]",
        "a[x-y]",
        "a b",
        " a",
        "[a]",
        "a[[1-2]]",
        "[[1]]",
    ],
)
def test_text_that_is_no_list_has_no_first_node(nodes: str) -> None:
    assert first_node(nodes) == ""
    with pytest.raises(EnvironmentMistake, match="SLURM_JOB_NODELIST is"):
        rendezvous({**SLURM, "SLURM_JOB_NODELIST": nodes})


def expanded(nodes: str) -> list[str]:
    """All nodes of a list, in order."""
    names = []
    for item in re.split(r",(?![^\[]*\])", nodes):
        choices = []
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            numbers = []
            for one in ranges.split(","):
                first, _, last = one.partition("-")
                if first:
                    whole = range(int(first), int(last or first) + 1)
                    numbers += [
                        str(number).zfill(len(first)) for number in whole
                    ]
            choices.append([text] if text else numbers)
        names += ["".join(parts) for parts in product(*choices)]
    return names


def test_the_expander_of_this_test_gives_a_list_that_slurm_prints() -> None:
    want = [
        "r1n08",
        "r1n09",
        "r1n10",
        "r1n3",
        "r2n08",
        "r2n09",
        "r2n10",
        "r2n3",
        "io",
    ]
    assert expanded("r[1-2]n[08-10,3],io") == want


TEXT = st.text("abcz.-", min_size=1, max_size=4)
NUMBER = st.integers(0, 120)
WIDTH = st.integers(1, 4)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    first, more, width = draw(NUMBER), draw(st.integers(0, 3)), draw(WIDTH)
    begin = str(first).zfill(width)
    return f"{begin}-{first + more}" if more else begin


BRACKET = st.lists(ranges(), min_size=1, max_size=3).map(
    lambda each: f"[{','.join(each)}]"
)
ITEM = st.lists(TEXT | BRACKET, min_size=1, max_size=4).map("".join)


@given(st.lists(ITEM, min_size=1, max_size=3).map(",".join))
def test_the_first_node_is_the_first_of_the_whole_expansion(
    nodes: str,
) -> None:
    assert first_node(nodes) == expanded(nodes)[0]


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NODELIST": "nd[1-4]",
    "SLURM_NNODES": "4",
}


def test_a_step_on_some_nodes_of_its_job_meets_on_its_own_first_node() -> None:
    step = {
        "SLURM_STEP_NODELIST": "nd2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    at = rendezvous({**SLURM, **step})
    assert at is not None
    assert (at.host, at.size, at.one_host) == ("nd2", 2, True)
    whole = rendezvous(SLURM)
    assert whole is not None
    assert (whole.host, whole.size, whole.one_host) == ("nd1", 8, False)
    # An address that somebody has set wins over both lists.
    named = rendezvous({**SLURM, **step, "MASTER_ADDR": "head"})
    assert named is not None
    assert named.host == "head"


def test_steps_of_one_job_that_run_beside_each_other_have_other_ports() -> (
    None
):
    ports = set()
    for step in range(8):
        at = rendezvous({**SLURM, "SLURM_STEP_ID": str(step)})
        assert at is not None
        ports.add(at.port)
    assert len(ports) == 8


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
NUMBERS = [
    *(
        (TORCHRUN, n)
        for n in (
            "RANK",
            "WORLD_SIZE",
            "MASTER_PORT",
            "TORCHELASTIC_RESTART_COUNT",
        )
    ),
    *(
        (SLURM, n)
        for n in (
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_JOB_ID",
            "MASTER_PORT",
        )
    ),
    *((SKY, n) for n in SKY if n != "SKYPILOT_NODE_IPS"),
]


@pytest.mark.parametrize("value", ["x", "1.5", "0x1", "٣", "9" * 5000])
@pytest.mark.parametrize(
    "table, name", NUMBERS, ids=[name for _, name in NUMBERS]
)
def test_a_number_of_a_launcher_that_is_none_is_refused_by_its_name(
    table: dict[str, str], name: str, value: str
) -> None:
    environment = {**table, name: value}
    with pytest.raises(
        EnvironmentMistake, match=f"{name} is .*must be a whole number"
    ):
        rendezvous(environment) or node_command(environment, None)


def test_a_task_of_skypilot_without_addresses_is_refused() -> None:
    with pytest.raises(EnvironmentMistake, match="SKYPILOT_NODE_IPS is empty"):
        node_command({**SKY, "SKYPILOT_NODE_IPS": " \n"}, None)
