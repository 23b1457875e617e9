"""`phalanx cost`: shows FLOPs, bytes and messages of each operation of a model's
pieces, on one rank of a layout.

Each piece is run on meta tensors with a backend that sends nothing; results are cached
in $XDG_CACHE_HOME/phalanx/costs. F is forward and B backward; if the schedule splits
backward, I is the input gradient and W the weight gradient. R is recomputation. With
an optimizer of whole matrices, the cost of their updates per step is added: of all ranks
that share a piece's matrices, that of the busiest.

  phalanx cost --model 8b "tp4 seq bf16"
  phalanx cost --model 405b "tp8 seq cp16 bf16" --sequence 131072 --json
  phalanx cost --model examples/stranger.py:Stranger tp2
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from textwrap import wrap

from ..api.request import model_of, refuse_illegal
from ..cost import cached_costs
from ..drawing import text_table
from ..layout import Layout, piece_layout, staged_pieces
from ..layout.numbers import si_text
from ..layout.optimizers import OPTIMIZERS
from ..planner.matrices import owners_work, row_matrices
from ..program import Load, PieceCost, ops
from .parser import Parser, length, whole
from .usage import result


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add(
        "layout",
        nargs="*",
        metavar="LAYOUT",
        help='such as "tp4 seq bf16"; default: one rank',
    )
    add(
        "--model",
        default="8b",
        metavar="SHAPE|FILE.py:Class",
        help="the model",
    )
    add("--rows", type=whole(), default=1, help="sequences of a microbatch")
    add(
        "--sequence",
        type=length,
        default=0,
        help="tokens in a sequence; default the shape's",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="one of whole matrices adds the cost of their updates",
    )
    add(
        "--target",
        default="cuda",
        choices=("cuda", "cpu"),
        help="device whose kernels are used",
    )
    args = parser.read(argv)
    layout = Layout.parse(" ".join(args.layout))
    shape, make = model_of(args.model)
    # one microbatch of a batch is costed
    batch = max(shape.batch, layout.data * layout.microbatches)
    refuse_illegal(layout, shape, batch=batch, sequence=args.sequence)
    cut, model = piece_layout(layout), args.model if make else shape
    pieces = cached_costs(
        model, [layout], sequence=args.sequence, target=args.target
    )[cut]
    # Pieces of the program by equal cost.
    alike = defaultdict[Callable[[float], PieceCost], list[int]](list)
    parts = (part for piece in pieces for part in piece.parts)
    for number, part in enumerate(parts):
        alike[part].append(number)
    kinds = [(numbers, part(args.rows)) for part, numbers in alike.items()]
    # FLOPs and bytes of the first piece of each kind.
    work = list[tuple[float, float]]()
    update = OPTIMIZERS[args.optimizer].matrices
    rows = pieces.rows or staged_pieces(layout, shape).rows
    # The cost of updates depends on the piece's matrices alone.
    for numbers, _ in kinds if update else ():
        assert update is not None
        matrices = row_matrices(rows[numbers[0]])
        cpu = args.target == "cpu"
        work.append(owners_work(update, matrices, layout, cpu=cpu))
    figures = {
        "model": shape.name,
        "layout": str(layout),
        "cut": str(cut),
        "rows": args.rows,
        "sequence": args.sequence or shape.sequence,
        "target": args.target,
        "pieces": [
            {"pieces": numbers, **_facts(cut, found)}
            for numbers, found in kinds
        ],
        **(
            {"matrix_updates": [{"flops": f, "moved": b} for f, b in work]}
            if update
            else {}
        ),
    }
    tokens = f" of {args.sequence or shape.sequence:,} tokens" * (
        shape.kind == "decoder"
    )
    text = (
        f"{shape.name} as {str(cut) or 'one rank'}\n"
        f"one rank, rows in a microbatch: {args.rows}{tokens}; kernels of {args.target}\n"
    )
    lines = [""]
    for n, (numbers, found) in enumerate(kinds):
        lines += _lines(cut, numbers, found)
        if update and work[n][0]:
            flops, moved = map(si_text, work[n])
            lines += [
                f"  {update.title}, once a step: {flops} FLOPs, {moved}B moved"
            ]
        lines += [""]
    return result(args, figures, text + "\n".join(lines))


def _operations(cut: Layout, found: PieceCost) -> dict[str, Load]:
    loads = {ops.FORWARD: found.forward}
    if cut.splits_backward:
        loads[ops.INPUT_GRADIENT] = found.input_gradient
        loads[ops.WEIGHT_GRADIENT] = found.weight_gradient
    else:
        loads[ops.BACKWARD] = found.backward
    return loads | (
        {ops.RECOMPUTE_PART: found.recompute} if found.selected else {}
    )


def _facts(cut: Layout, found: PieceCost) -> dict[str, object]:
    sizes = (
        "kept",
        "kept_after_i",
        "input",
        "selected",
        "temporary",
        "weights",
        "edge",
    )
    loads = {
        name: {"flops": load.flops, "flops_full": _full(load), **asdict(load)}
        for name, load in _operations(cut, found).items()
    }
    return {
        **{name: getattr(found, name) for name in sizes},
        "operations": loads,
    }


def _full(load: Load) -> float:
    """Return FLOPs, counting every pair of attention."""
    return load.flops + sum(a.full - a.flops for a in load.attention)


def _lines(cut: Layout, numbers: list[int], found: PieceCost) -> Iterator[str]:
    span = (
        f"piece {numbers[0]}"
        if len(numbers) == 1
        else f"pieces {numbers[0]}-{numbers[-1]}"
    )
    yield (
        f"{span}: {si_text(found.weights)} weights; keeps {si_text(found.kept)}B"
        f" (input {si_text(found.input)}B); temporary {si_text(found.temporary)}B"
    )
    if found.selected:
        yield f"  until {ops.RECOMPUTE_PART} it keeps {si_text(found.selected)}B"
    if cut.splits_backward:
        yield f"  after I it keeps {si_text(found.kept_after_i)}B"
    rows = []
    for name, load in _operations(cut, found).items():
        flops, moved = (
            map(si_text, (load.flops, _full(load))),
            f"{si_text(load.moved)}B",
        )
        first, *more = _messages(load) or [""]
        rows.append((name, *flops, moved, f"{load.launches:.0f}", first))
        rows += [("", "", "", "", "", message) for message in more]
    head = ("", "FLOPs", "all pairs", "moved", "launches", "messages")
    yield from text_table(head, rows, left="lrrrrl", indent=2).splitlines()
    for name, load in _operations(cut, found).items():
        if products := ", ".join(_multiplied(load)):
            lines = wrap(f"{name}: {products}", 74, subsequent_indent="   ")
            yield from (f"  {line}" for line in lines)


def _messages(load: Load) -> list[str]:
    """Return the number and total bytes of messages by axis and collective."""
    counts = Counter((m.axis, m.op) for m in load.messages)
    return [
        f"{axis} {n} {op} {si_text(sum(m.bytes for m in load.messages if (m.axis, m.op) == (axis, op)))}B"
        for (axis, op), n in counts.items()
    ]


def _multiplied(load: Load) -> list[str]:
    """List the matmuls by shape, m x k x n, and attention as queries x keys."""
    shapes = Counter(
        ("" if p.batch == 1 else f"{p.batch:g} of ")
        + f"{p.m:g}x{p.k:g}x{p.n:g}"
        for p in load.products
    )
    cores = Counter(
        f"attention {a.queries:g}x{a.keys:g}{' causal' * bool(a.causal)}"
        for a in load.attention
    )
    return [
        f"{n} {shape}" if n > 1 else shape
        for shape, n in (shapes + cores).items()
    ]
