"""A user-defined schedule: 1F1B whose ranks start more microbatches before their first backward.

While a message travels, 1F1B has nothing to do: each rank starts exactly as many microbatches as there
are stages from it to the last. `early` starts twice as many, which hides the messages and holds more
activations.

    .venv/bin/phalanx draw examples/early.py:early --costs F=1,B=2,send=0.5
"""

from phalanx.program import Op


def early(stages: int, microbatches: int, chunks: int = 1) -> list[list[Op]]:
    """One list of operations for each rank; the piece of an operation is the rank's own stage."""
    rows = []
    for rank in range(stages):
        forwards = [Op("F", rank, m) for m in range(microbatches)]
        backwards = [Op("B", rank, m) for m in range(microbatches)]
        warmup = min(2 * (stages - rank - 1), microbatches)
        row, forwards = forwards[:warmup], forwards[warmup:]
        while backwards:
            row += forwards[:1] + backwards[:1]
            forwards, backwards = forwards[1:], backwards[1:]
        rows.append(row)
    return rows
