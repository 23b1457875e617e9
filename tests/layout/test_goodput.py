"""Goodput of logs written by hand, with sums worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phalanx.layout.goodput import PARTS, Goodput

Record = dict[str, Any]


def record(
    event: str, clock: float, began: float, *, boot: str = "a", **values: Any
) -> Record:
    """Of a machine that was started at second 1000 of the calendar."""
    time = 1000 + clock
    return {
        "event": event,
        "time": time,
        "clock": clock,
        "boot": boot,
        "began": began,
        **values,
    }


def step(
    number: int, clock: float, began: float, count: int, **spent: float
) -> Record:
    phases = {
        name.replace("_", " "): seconds for name, seconds in spent.items()
    }
    return record("step", clock, began, step=number, steps=count, spent=phases)


# Two processes: 100 to 170 and 190 to 250; the second goes on at step 4 of 6.
LOG = [
    record(
        "start",
        110,
        100,
        step=0,
        spent={"starting": 4.0, "reading a checkpoint": 6.0},
    ),
    step(2, 125, 100, 2, first_step=8, in_a_step=3, compiling=4),
    record("validation", 130, 100, step=2, spent={"validating": 5.0}),
    step(4, 136, 100, 2, in_a_step=5, loading_data=1),
    record(
        "checkpoint",
        146,
        100,
        step=4,
        spent={"saving": 9.0, "between steps": 1.0},
    ),
    step(6, 166, 100, 2, in_a_step=20),
    record("resume", 195, 190, spent={"starting": 2.0}),
    record("start", 200, 190, step=4, spent={"reading a checkpoint": 5.0}),
    step(6, 206, 190, 2, in_a_step=6),
    record("end", 210, 190, step=6, spent={"saving": 4.0}),
]
# starting: 10 of the first, 5 + 5 of the second; down: 166 to 190.
PARTS_OF_LOG = {
    "steps": 11.0 + 6.0 + 6.0, "lost steps": 20.0, "starting": 20.0, "compiling": 4.0, "saving": 13.0,
    "validating": 5.0, "down": 24.0, "other": 1.0,
}  # fmt: skip


def parts(log: list[Record]) -> dict[str, float]:
    return Goodput(log).spent


def test_every_second_of_a_log_is_in_one_part() -> None:
    assert parts(LOG) == pytest.approx(PARTS_OF_LOG)
    assert sum(PARTS_OF_LOG.values()) == 210 - 100
    assert float(Goodput(LOG)) == pytest.approx(23 / 110)
    text = "goodput 20.9 % of 110 s: steps 20.9 %, lost steps 18.2 %, starting 18.2 %, compiling 3.64 %"
    assert str(Goodput(LOG)).startswith(text)


@pytest.mark.parametrize("jump", [-1e9, -40.0, 40.0, 1e6])
@pytest.mark.parametrize("at", range(1, len(LOG)))
def test_a_clock_that_is_set_changes_nothing(at: int, jump: float) -> None:
    moved = [{**r, "time": max(0.0, r["time"] + jump)} for r in LOG[at:]]
    assert parts([*LOG[:at], *moved]) == pytest.approx(PARTS_OF_LOG)


def test_on_another_machine_the_calendar_tells_the_time_between() -> None:
    # Its own clock began much later: 1166 to 1190 of the calendar were down.
    moved = [
        {**r, "boot": "b", "clock": r["clock"] - 185, "began": 5.0}
        for r in LOG[6:]
    ]
    assert parts([*LOG[:6], *moved]) == pytest.approx(PARTS_OF_LOG)
    # The calendar says that it began before the first ended: nothing of that is believed.
    before = [{**r, "time": r["time"] - 100} for r in moved]
    known = {**PARTS_OF_LOG, "starting": 15.0, "down": 0.0}
    assert parts([*LOG[:6], *before]) == pytest.approx(known)


def test_a_start_on_another_machine_is_one_also_at_the_same_second_of_its_clock() -> (
    None
):
    """Machines that were started together: the second process begins when the first one did."""
    moved = [
        {**r, "boot": "b", "clock": r["clock"] - 90, "began": 100.0}
        for r in LOG[6:]
    ]
    assert parts([*LOG[:6], *moved]) == pytest.approx(PARTS_OF_LOG)


def test_no_part_is_negative_where_phases_are_rounded_to_more_than_passed() -> (
    None
):
    log = [
        record("start", 110, 100, step=0, spent={}),
        step(1, 113, 100, 1, in_a_step=3.0004),
    ]
    assert parts(log) == dict.fromkeys(PARTS, 0.0) | {
        "starting": 10.0,
        "steps": 3.0004,
    }


def test_a_hang_is_time_down() -> None:
    hang = {
        "event": "hang",
        "time": 1226.0,
        "clock": 226.0,
        "boot": "a",
        "ranks": [1],
    }
    later = [record("start", 240, 230, step=6, spent={})]
    hung = {**PARTS_OF_LOG, "down": 24.0 + 16.0 + 4.0, "starting": 30.0}
    assert parts([*LOG, hang, *later]) == pytest.approx(hung)


def test_steps_without_a_record_are_lost_with_those_that_have_one() -> None:
    skip = record("skip", 216, 190, step=8, spent={"in a step": 6.0})
    later = [record("start", 230, 220, step=5, spent={})]
    # Of steps 5 and 6, three seconds each, one counts.
    lost = {
        **PARTS_OF_LOG,
        "steps": 20.0,
        "lost steps": 29.0,
        "starting": 30.0,
        "down": 28.0,
    }
    assert parts([*LOG, skip, *later]) == pytest.approx(lost)


def test_steps_that_are_lost_twice_are_counted_once_as_lost() -> None:
    """Three starts: the second repeats steps 3 to 6, of which the third repeats 4 to 6 once more."""
    log = [
        record("start", 100, 100, step=0, spent={}),
        step(4, 140, 100, 4, in_a_step=40),  # 10 s each
        step(6, 164, 100, 2, in_a_step=24),  # 12 s each
        record("start", 170, 170, step=2, spent={}),
        step(6, 190, 170, 4, in_a_step=20),  # 5 s each
        record("start", 200, 200, step=3, spent={}),
        step(6, 209, 200, 3, in_a_step=9),  # 3 s each
        step(7, 216, 200, 1, in_a_step=7),
    ]
    # Count: steps 1 and 2 of the first start, 3 of the second, 4 to 7 of the third.
    counts = 2 * 10 + 5 + 9 + 7
    lost = (2 * 10 + 2 * 12) + 3 * 5
    whole = dict.fromkeys(PARTS, 0.0) | {
        "steps": counts,
        "lost steps": lost,
        "down": 6.0 + 10.0,
    }
    assert parts(log) == pytest.approx(whole)
    assert float(Goodput(log)) == pytest.approx(41 / 116)
    # A fourth start from the beginning loses what counted, and nothing that was lost before.
    again = record("start", 220, 220, step=0, spent={})
    none = whole | {"steps": 0.0, "lost steps": counts + lost, "down": 20.0}
    assert parts([*log, again]) == pytest.approx(none)


def run_with_kills(
    chance: random.Random,
) -> tuple[list[Record], dict[str, float]]:
    """A log of several starts, and its parts: each execution of a step is listed, and lost when a later
    start is at an earlier step."""
    log: list[Record] = []
    # executions that count: a step and its seconds
    counting: list[tuple[int, float]] = []
    hand = dict.fromkeys(PARTS, 0.0)
    now, done, saved = 50.0, 0, 0
    for number in range(chance.randint(3, 6)):
        began = now
        if number:
            began += (down := float(chance.randint(1, 9)))
            hand["down"] += down
        starting = float(chance.randint(0, 5))
        hand["starting"] += starting
        now, done = began + starting, saved
        log.append(
            record(
                "start", now, began, step=done, spent={"starting": starting}
            )
        )
        hand["lost steps"] += sum(s for at, s in counting if at > done)
        counting = [(at, s) for at, s in counting if at <= done]
        # Steps of the line that is not written yet, and what they have taken.
        line, open_seconds = 0, 0.0
        for _ in range(chance.randint(0, 12)):
            seconds = float(chance.randint(1, 9))
            now, done, line, open_seconds = (
                now + seconds,
                done + 1,
                line + 1,
                open_seconds + seconds,
            )
            fresh = seconds  # not in a record so far
            if chance.random() < 0.3:
                now, saved = now + 2.0, done
                hand["saving"] += 2.0
                log.append(
                    record("checkpoint", now, began, step=done,
                           spent={"saving": 2.0, "in a step": fresh})
                )  # fmt: skip
                fresh = 0.0
            if chance.random() < 0.6 or not fresh:
                log.append(step(done, now, began, line, in_a_step=fresh))
                counting += [
                    (done - n, open_seconds / line) for n in range(line)
                ]
                line, open_seconds = 0, 0.0
            else:  # another record has it: a skipped step
                log.append(
                    record(
                        "skip",
                        now,
                        began,
                        step=done,
                        spent={"in a step": fresh},
                    )
                )
        # The process is killed; what no line of steps has is lost with the next start.
        counting += [(1 << 30, open_seconds)] if line else []
    hand["steps"] = sum(s for _, s in counting)
    return log, hand


@pytest.mark.parametrize("seed", range(60))
def test_of_any_run_with_kills_each_step_counts_once_as_it_was_last_done(
    seed: int,
) -> None:
    log, hand = run_with_kills(random.Random(seed))
    assert parts(log) == pytest.approx(hand)


def test_records_of_earlier_versions_count_by_the_calendar() -> None:
    old = [
        {"event": "start", "time": 0.0, "step": 0},
        *(
            {
                "event": "step",
                "time": 10.0 * n,
                "step": n,
                "steps": 1,
                "seconds": 5.0,
            }
            for n in (1, 2, 3)
        ),
        {"event": "start", "time": 50.0, "step": 2},
        {"event": "step", "time": 60.0, "step": 3, "steps": 1, "seconds": 5.0},
        # of each
        {"event": "step", "time": 70.0, "step": 6, "steps": 3, "seconds": 2.0},
    ]
    told = {"steps": 21.0, "lost steps": 5.0, "down": 20.0, "other": 24.0}
    assert parts(old) == pytest.approx(dict.fromkeys(PARTS, 0.0) | told)


def test_what_is_not_usable_is_passed_over_and_counted() -> None:
    garbage = [
        {"event": "step", "time": "now"}, {"event": "step", "time": 1150.0, "step": 3},
        {**LOG[1], "spent": {"saving": float("nan")}}, {**LOG[1], "spent": {"saving": -1.0}},
        {**LOG[1], "steps": True},
    ]  # fmt: skip
    goodput = Goodput([*LOG[:3], *garbage, *LOG[3:]])
    assert goodput.spent == pytest.approx(PARTS_OF_LOG)
    assert goodput.unusable == len(garbage)
