"""Findings and verdicts as text and as JSON."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .checks import Finding
from .compare import EQUAL, NOT_COMPARABLE, Different, Verdict
from .own import Repeated
from .precision import MIXED
from .where import Begins, Where

_SHOWN = 12  # groups of parameters that a report lists


def finding_text(finding: Finding) -> str:
    """A finding as one line, with the kinds of parameters and the ranks."""
    kind = "WRONG" if finding.fault else "note"
    text = f"step {finding.step}: {kind}: {finding.text}"
    if finding.names:
        text += f": {kinds_text(finding.names)}"
    if finding.ranks:
        text += f" (ranks {ranges(finding.ranks)})"
    return text


def verdict_text(
    verdict: Verdict, run: str, reference: str, *, repeated: bool = False
) -> str:
    """A verdict as some lines: the result, what differs, by how much, and why it may."""
    lines = []
    if verdict.result == EQUAL:
        lines.append(
            f"{run} equals {reference}: {verdict.parameters} parameters, {verdict.steps} steps,"
            f" {verdict.precision}"
        )
        if verdict.worst:
            lines.append(
                f"  largest difference of a gradient: {verdict.worst:.1e} of its size"
                f" ({verdict.worst_name})"
            )
    else:
        lines.append(f"{run} is {_result(verdict)} {reference}")
        # Without a compared step there is no first one.
        if verdict.parameters:
            lines.append(
                f"  first difference: step {verdict.step}, {verdict.quantity}"
            )
        lines.append(f"  {verdict.text}")
        lines += [f"    {line}" for line in _groups(verdict)]
        if verdict.equal_before:
            lines.append(
                f"  equal before it: {', '.join(verdict.equal_before)}"
            )
        if verdict.where is not None:
            lines.append(f"  begins: {where_text(verdict.where)}")
        lines += [f"  likely: {cause}" for cause in verdict.causes]
        in_float64 = verdict.precision in ("float64", MIXED)
        reported = in_float64 and verdict.result != NOT_COMPARABLE
        if reported and not repeated:
            lines.append(
                "  These runs compute in float64. Repeat them in the dtype that you train in before you"
                " report this: libraries take other code paths in float64. --repeat does it for runs"
                " that were recorded with --float64."
            )
    lines += [f"  note: {note}" for note in verdict.notes]
    if not verdict.measured and verdict.precision not in ("float64", MIXED):
        lines.append(
            f"  Limits are those usual for {verdict.precision}. Record perturbed runs of the reference"
            " (--perturb 3) to measure them."
        )
    return "\n".join(lines)


def repeated_text(repeated: Repeated, run: str, reference: str) -> str:
    """The verdict in the run's own dtype, below one in float64."""
    verdict = repeated.verdict
    dtype = verdict.precision
    if verdict.result != EQUAL:
        text = verdict_text(verdict, run, reference)
        lines = [f"  {line}" for line in text.splitlines()]
        return "\n".join([f"  Repeated in {dtype}:", *lines])
    if repeated.hidden:
        return (
            f"  Repeated in {dtype}: equal, but rounding there is larger than this difference, so"
            " it stays a difference."
        )
    return (
        f"  Repeated in {dtype}: equal. Only float64 shows the difference, so a library takes"
        " another code path in it: this is no fault of your runs."
    )


def where_text(where: Where) -> str:
    """The place at which a wrong gradient begins, as a sentence."""
    if where.begins == Begins.UNKNOWN:
        return f"not known, as {where.reason}"
    by = f"off by {where.relative:.2g} of its size"
    if where.ranks:
        by += f" (ranks {ranges(where.ranks)})"
    scaled = f"{where.factor:.4f} x the reference's"
    if where.begins == Begins.OUTPUT:
        after = "the first of the step"
        if where.before:
            after = f"while that of {where.before} before it is equal"
        return f"the output of {where.module} is {by}, {after}"
    if where.begins == Begins.LOSS:
        return (
            f"at the loss. All outputs are equal, and the loss's gradient by the output of {where.module}"
            f" is no multiple of the reference's: {by}"
        )
    if where.begins == Begins.BACKWARD:
        return (
            f"in the backward. All outputs are equal, and so is the gradient of {where.before}'s output;"
            f" that of {where.module}'s output, which follows from it, is {by}"
        )
    return (
        "behind the modules. All outputs are equal, and their gradients are"
        f" {scaled} ({where.compared} compared): look at how gradients of parameters are accumulated,"
        " summed over ranks and scaled"
    )


def _result(verdict: Verdict) -> str:
    if verdict.result == NOT_COMPARABLE:
        return "not comparable with"
    return "not equal to"


def _groups(verdict: Verdict) -> list[str]:
    """A line for each kind of parameter; one line for many kinds that have one factor."""
    by_factor: dict[str, list[Different]] = {}
    for each in verdict.different:
        # By factor, so that "all gradients twice as large" is one line.
        factor = "" if each.factor is None else f"{each.factor:.4f}"
        by_factor.setdefault(factor, []).append(each)
    groups: list[tuple[str, str, list[Different]]] = []
    for factor, members in by_factor.items():
        kinds = kinds_of([each.name for each in members])
        # Many kinds with one factor have one cause, so they are reported together.
        if factor and len(kinds) > 4:
            text = kinds_text([each.name for each in members], 3)
            groups.append(
                (f"{len(members)} parameters ({text})", factor, members)
            )
            continue
        for kind, names in kinds.items():
            chosen = [each for each in members if each.name in names]
            shown = names[0] if len(names) == 1 else f"{kind} ({len(names)})"
            groups.append((shown, factor, chosen))
    lines = []
    for shown, factor, members in groups:
        relative = [each.relative for each in members]
        ends = [f"{min(relative):.2g}", f"{max(relative):.2g}"]
        by = " to ".join(dict.fromkeys(ends))
        line = f"{shown}: off by {by} of its size"
        if factor:
            line += f"; = {factor} x reference"
        ranks = sorted({rank for each in members for rank in each.ranks})
        if ranks:
            line += f"; ranks {ranges(ranks)}"
        lines.append(line)
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more kinds"]
    return lines


def kind_of(name: str) -> str:
    """A parameter's name with stars for the numbers of layers and experts."""
    # Numbers between dots only: "layers.3.w1" -> "layers.*.w1".
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def kinds_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Names by their kind."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


def kinds_text(names: Sequence[str], shown: int = 6) -> str:
    parts = [
        members[0] if len(members) == 1 else f"{kind} ({len(members)})"
        for kind, members in kinds_of(names).items()
    ]
    more = (
        f" and {len(parts) - shown} more kinds" if len(parts) > shown else ""
    )
    return ", ".join(parts[:shown]) + more


def ranges(ranks: Sequence[int]) -> str:
    """Ranks as text, such as 0-3, 6."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(
        str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        for part in parts
    )


def verdict_json(
    verdict: Verdict, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        **asdict(verdict),
        "findings": [asdict(finding) for finding in findings],
    }
