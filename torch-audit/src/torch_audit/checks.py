"""Checks of one recorded run that need no reference."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from .precision import difference, eps_of, limit_of_norm, precision_of
from .records import (
    CLIPPED,
    GRADIENT,
    KINDS,
    UPDATED,
    WEIGHT,
    WIDTH,
    ClipRecord,
)
from .runs import Held, Names, Parameter, Run, Step
from .sketch import norm_of

_WORDS = {
    WEIGHT: "weights",
    GRADIENT: "gradients",
    CLIPPED: "clipped gradients",
    UPDATED: "updated weights",
}
# torch adds it to the norm before it divides.
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Finding:
    """Something that a check has seen in a step. A notice may be meant; a fault is wrong."""

    step: int
    check: str
    text: str
    fault: bool = True
    names: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


def check_run(run: Run) -> list[Finding]:
    found: list[Finding] = []
    before: Step | None = None
    for number, step in run.steps.items():
        found += check_step(number, step, before)
        before = step
    return found


def first_of_each(findings: list[Finding]) -> list[Finding]:
    """One finding of each check: a fault that persists is reported once, not at every step."""
    first: dict[tuple[str, bool], Finding] = {}
    for finding in findings:
        first.setdefault((finding.check, finding.fault), finding)
    return list(first.values())


def check_step(
    number: int, step: Step, before: Step | None = None
) -> list[Finding]:
    """All findings of a step, in the order in which a step computes; `before` is the step before it."""
    # All names of a tied parameter become one before anything is compared.
    names = Names()
    step.joined(names)
    step.join_tied(names)
    parameters = step.parameters(names)
    apart = parameters_apart(parameters)
    declared = {
        name: each for name, each in parameters.items() if name not in apart
    }
    # As a step computes: the first finding is the closest to its cause.
    found = [
        *_between(number, step, before),
        *_samples(number, step, before),
        *_finite(number, parameters),
        *_apart(number, apart),
        *_tiles(number, declared),
        *_copies(number, step, declared),
        *_norms(number, step, names, parameters, apart),
        *_clip(number, step),
        *_updates(number, declared),
    ]
    return list(found)


def parameters_apart(parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Parameters that ranks call the same and claim to hold whole, with other shapes or weights.

    They are shards that nobody declares, or copies that do not start alike.
    """
    apart = {}
    for name, parameter in parameters.items():
        shapes = {tuple(each.record.shape) for each in parameter.held}
        # Weights before the step, to the bit: copies must start alike.
        copies = parameter.copies(WEIGHT)
        if len(shapes) > 1 or any(
            _differing(group, WEIGHT, 0.0) for group in copies
        ):
            apart[name] = parameter
    return apart


def _between(
    number: int, step: Step, before: Step | None
) -> Iterator[Finding]:
    """Weights do not change between the update of a step and the next step."""
    names: dict[str, set[int]] = {}
    for rank, record in step.ranks.items() if before is not None else ():
        assert before is not None
        # By names: a parameter may have had another index in the step before.
        earlier = before.ranks[rank]
        index_of = {
            tuple(x.names): i for i, x in enumerate(earlier.parameters)
        }
        for index, parameter in enumerate(record.parameters):
            at = index_of.get(tuple(parameter.names), -1)
            after = earlier.sketches.get(UPDATED, {}).get(at)
            if (
                after is not None
                # Exact: nothing computes between an update and the next
                # forward.
                and record.sketches[WEIGHT].get(index) != after
            ):
                names.setdefault(parameter.names[0], set()).add(rank)
    if names:
        text = f"{len(names)} parameters were changed after their update, before this step"
        ranks = sorted(set().union(*names.values()))
        yield Finding(number, "weights", text, names=list(names), ranks=ranks)


def _samples(
    number: int, step: Step, before: Step | None
) -> Iterator[Finding]:
    """Samples of this step that are seen more often than others, or again after the step before."""
    counts = Counter(row for _, batch in step.batches() for row in batch.rows)
    times = Counter(counts.values())
    if len(times) > 1:
        usual = min(times)
        often = sum(many for count, many in times.items() if count != usual)
        text = (
            f"{often} of {len(counts)} samples are seen more often than the others: up to"
            f" {max(times)} times in one step"
        )
        yield Finding(number, "samples", text, fault=False)
    if before is None:
        return
    earlier = {row for _, batch in before.batches() for row in batch.rows}
    again = len(earlier & set(counts))
    if again:
        text = f"{again} of {len(counts)} samples were in the step before"
        yield Finding(number, "samples again", text, fault=False)


def _finite(
    number: int, parameters: dict[str, Parameter]
) -> Iterator[Finding]:
    for kind in KINDS:
        names = []
        for name, parameter in parameters.items():
            sketch = parameter.sketch(kind)
            # inf - inf and nan - nan are not a number, so they differ from 0.
            if sketch is not None and norm_of(sketch) - norm_of(sketch) != 0:
                names.append(name)
        if names:
            text = f"{_of(names, parameters)} {_WORDS[kind]} are not finite"
            yield Finding(number, "finite", text, names=names)


def _apart(number: int, apart: dict[str, Parameter]) -> Iterator[Finding]:
    if apart:
        text = (
            f"{len(apart)} parameters differ between ranks before the step: shards that nobody"
            " declares, or copies that are not alike"
        )
        yield Finding(number, "weights", text, fault=False, names=list(apart))


def _tiles(number: int, parameters: dict[str, Parameter]) -> Iterator[Finding]:
    names = [name for name, each in parameters.items() if not each.tiled]
    if names:
        text = (
            f"the shards of {_of(names, parameters)} parameters do not make up the whole: elements"
            " are missing, or two ranks that are no copies have the same"
        )
        yield Finding(number, "shards", text, names=names)


def _copies(
    number: int, step: Step, parameters: dict[str, Parameter]
) -> Iterator[Finding]:
    # The least precise dtype of the step decides what counts as rounding.
    eps = eps_of(precision_of(step, parameters))
    for kind in (GRADIENT, CLIPPED, UPDATED):
        largest = largest_norm(parameters, kind)
        names, ranks, worst = [], set(), 0.0
        for name, parameter in parameters.items():
            # Relative to the parameter, plus a share of the largest: some
            # gradients are nothing but rounding.
            limit = 64 * eps * norm_of(parameter.sketch(kind) or [0.0])
            limit += 64 * eps * eps * largest
            for group in parameter.copies(kind):
                lacking = [
                    each for each in parameter.held if kind not in each.numbers
                ]
                # One rank has a gradient and its copy none: it was not reduced
                # to all.
                if (
                    kind == GRADIENT
                    and lacking
                    and any(group[0].numbers[kind])
                ):
                    names.append(name)
                    ranks |= {each.rank for each in lacking}
                    worst = max(worst, 1.0)
                if by := _differing(group, kind, limit):
                    names.append(name)
                    ranks |= {each.rank for each in group}
                    size = norm_of(group[0].numbers[kind][1:])
                    worst = max(worst, by / size if size else float("inf"))
        if names:
            names = list(dict.fromkeys(names))
            text = (
                f"copies of {_of(names, parameters)} {_WORDS[kind]} differ between ranks, by up to"
                f" {worst:.2g} of their size"
            )
            yield Finding(
                number, "copies", text, names=names, ranks=sorted(ranks)
            )
            return  # what follows from it is not another finding


def largest_norm(parameters: dict[str, Parameter], kind: str) -> float:
    sketches = (parameter.sketch(kind) for parameter in parameters.values())
    return max((norm_of(x) for x in sketches if x is not None), default=0.0)


def _differing(group: list[Held], kind: str, limit: float) -> float:
    """The largest difference between copies, or 0 if it is within the limit."""
    # Entry 0 is the sum of squares; the sketch follows.
    first = group[0].numbers[kind][1:]
    largest = 0.0
    for other in group[1:]:
        largest = max(
            largest, norm_of(difference(other.numbers[kind][1:], first))
        )
    return largest if largest > limit else 0.0


def clip_norms(step: Step) -> list[dict[int, float]]:
    """The norms used by each clip of a step, by rank.

    Parts of a DTensor's norm, which the program has still to combine, are combined here.
    """
    calls = max(
        (len(record.clips) for record in step.ranks.values()), default=0
    )
    norms: list[dict[int, float]] = []
    for call in range(calls):
        clips = {
            r: x.clips[call]
            for r, x in step.ranks.items()
            if call < len(x.clips)
        }
        norms.append(_combined(clips))
    return norms


def _combined(clips: dict[int, ClipRecord]) -> dict[int, float]:
    # Ranks with an equal `part` are copies of it and count once.
    parts = {clip.part: clip for clip in clips.values() if clip.part}
    if not parts:
        return {rank: clip.norm for rank, clip in clips.items()}
    order = next(iter(parts.values())).order
    # A p-norm of parts: the p-th root of the sum of p-th powers.
    total = sum(clip.norm**order for clip in parts.values()) ** (1 / order)
    return dict.fromkeys(clips, total)


def true_norms(
    step: Step, names: Names, parameters: dict[str, Parameter]
) -> list[float]:
    """The norm of all gradients that the ranks together gave to each call that clips."""
    norms = []
    for call in range(len(clip_norms(step))):
        given: set[str] = set()
        for record in step.ranks.values():
            if call < len(record.clips):
                for index in record.clips[call].parameters:
                    given.add(names.of(record.parameters[index].names[0]))
        wholes = [
            # No gradient counts as zeros: `WIDTH` is the sum of squares and
            # the sketch.
            parameters[name].whole(GRADIENT) or [0.0] * WIDTH
            for name in given
        ]
        # Sums of squares of disjoint parameters add up.
        norms.append(sum(whole[0] for whole in wholes) ** 0.5)
    return norms


def _norms(
    number: int,
    step: Step,
    names: Names,
    parameters: dict[str, Parameter],
    apart: dict[str, Parameter],
) -> Iterator[Finding]:
    limit = limit_of_norm(precision_of(step, parameters))
    true = true_norms(step, names, parameters)
    for call, norms in enumerate(clip_norms(step)):
        least, most = min(norms.values()), max(norms.values())
        if most - least > limit * most:
            text = f"ranks clipped by different gradient norms: {least:.6g} to {most:.6g}"
            yield Finding(number, "norm", text, ranks=sorted(norms))
            # True norms mean nothing once the ranks disagree.
            continue
        clips = [
            x.clips[call] for x in step.ranks.values() if call < len(x.clips)
        ]
        summed = any(parameter.summed for parameter in parameters.values())
        if apart or summed or any(clip.order != 2.0 for clip in clips):
            continue  # the sum of squares of the whole gradient is not known
        # Relative to the larger of the two, as either may be near zero.
        if abs(most - true[call]) > limit * max(most, true[call]):
            ratio = most / true[call] if true[call] else float("inf")
            text = (
                f"the clip used the norm {most:.6g}; the gradients have the norm"
                f" {true[call]:.6g} (used = {ratio:.4f} x true)"
            )
            yield Finding(number, "norm", text)


def _clip(number: int, step: Step) -> Iterator[Finding]:
    """Gradients after the clip are those before it, times one coefficient."""
    names: dict[str, set[int]] = {}
    for rank, record in step.ranks.items():
        if (
            # Several clips scale one after the other, and parts do not tell
            # the whole norm.
            len(record.clips) != 1
            or record.clips[0].part
            or not record.clips[0].most
        ):
            continue
        clip = record.clips[0]
        # As torch computes it: max_norm / (norm + 1e-6), at most 1.
        coefficient = min(1.0, clip.most / (clip.norm + _CLIP_EPS))
        before, after = (
            record.sketches.get(kind, {}) for kind in (GRADIENT, CLIPPED)
        )
        for index in set(before) & set(after) & set(clip.parameters):
            scaled = [coefficient * each for each in before[index][1:]]
            eps = eps_of(record.parameters[index].dtype)
            by = norm_of(difference(after[index][1:], scaled))
            # 1e-300 lets exact zeros pass.
            if by > 64 * eps * norm_of(scaled) + 1e-300:
                name = record.parameters[index].names[0]
                names.setdefault(name, set()).add(rank)
    if names:
        text = (
            f"{len(names)} gradients were changed between the clip and the update by something else"
            " than the clip's coefficient"
        )
        ranks = sorted(set().union(*names.values()))
        yield Finding(number, "clip", text, names=list(names), ranks=ranks)


def _updates(
    number: int, parameters: dict[str, Parameter]
) -> Iterator[Finding]:
    left_out = [name for name, each in parameters.items() if not each.stepped]
    if left_out:
        text = f"{_of(left_out, parameters)} trainable parameters are in no optimizer"
        yield Finding(number, "update", text, fault=False, names=left_out)
    still, narrow = [], False
    # Equal to the bit: a weight that moved by one unit has another sketch.
    for name, parameter in parameters.items():
        gradient, before, after = (
            parameter.sketch(kind) for kind in (GRADIENT, WEIGHT, UPDATED)
        )
        moved = (
            gradient is not None
            and norm_of(gradient) > 0
            and parameter.rate > 0
        )
        if moved and after is not None and after == before:
            still.append(name)
            # In 16 bits a small update may round to no change at all.
            narrow = narrow or parameter.dtype in ("bfloat16", "float16")
    if still:
        text = f"{_of(still, parameters)} parameters have a gradient and are not changed by the update"
        yield Finding(number, "update", text, fault=not narrow, names=still)
    missing = [
        name
        for name, each in parameters.items()
        if each.stepped and each.sketch(GRADIENT) is None
    ]
    if missing:
        text = f"{_of(missing, parameters)} parameters of an optimizer have no gradient"
        yield Finding(number, "update", text, fault=False, names=missing)


def _of(names: list[str], parameters: dict[str, Parameter]) -> str:
    return f"{len(names)} of {len(parameters)}"
