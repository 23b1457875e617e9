"""A training job in terms shared by all trainers, each of which has its own options.

`quantities` are numbers (`tp`, `microbatch`, `layers`), and texts for the blocks of
stages. `choices` are one word for each group, such as `zero3` for `zero`. The table in
trainers.toml uses the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from .adapters import AdapterSizes
from .choices import ACCUM, COMPILE, INTERLEAVED
from .layout import Layout
from .mixers import unusual_mixers
from .pieces import work_of_pieces
from .shape import Shape
from .stages import stage_blocks

# Keys of a shape that trainers' files need not have.
UNASKED = frozenset(
    (
        *["name", "source", "batch", "sequence", "freeze", "kind"],
        *(each.name for each in fields(AdapterSizes)),
    )
)
# Sizes with one meaning in all trainers.
_SIZES = """layers hidden ffn heads kv_heads head_dim vocab rope_theta eps experts top_k"""
SIZES = tuple(_SIZES.split())


@dataclass(frozen=True)
class Job:
    """A layout, the model that it trains, and the sequences and tokens of a step.

    `shape` is None if a file does not describe the model; `batch` and `sequence` may
    then be 0. `per_node` is the number of ranks on each machine.
    """

    layout: Layout
    shape: Shape | None
    batch: int = 0
    sequence: int = 0
    per_node: int = 8


# ---- quantities


def quantities(job: Job) -> dict[str, Any]:
    """Every quantity of a job that exceeds its minimum."""
    layout, shape = job.layout, job.shape
    found = dict(_mesh(layout, shape is not None and shape.experts > 0))
    found |= {"sequence": job.sequence, "batch": job.batch}
    found["per_node"] = min(job.per_node, layout.ranks)
    # Machines, rounded up: the last one may be used in part.
    found["nodes"] = -(-layout.ranks // job.per_node)
    if job.batch:
        found |= _batches(layout, job.batch)
    if layout.recompute.startswith("every="):
        found["every"] = int(layout.recompute.removeprefix("every="))
    if layout.schedule == INTERLEAVED:
        found["chunks"] = layout.chunks
    if shape is not None:
        found |= _sizes(shape)
        found |= {"positions": job.sequence or shape.sequence}
        if layout.pp > 1:
            found |= _stages(layout, shape)
    # 0 means that a trainer needs no option for it.
    return {name: value for name, value in found.items() if value}


def _mesh(layout: Layout, experts: bool) -> Iterator[tuple[str, int]]:
    yield from ((name, layout.mesh.of(name)) for name in ("tp", "pp", "cp"))
    yield "ring", layout.mesh.of("cp.ring")
    yield "ulysses", layout.mesh.of("cp.ulysses")
    yield "ranks", layout.ranks
    yield "data", layout.data
    replicas = layout.mesh.of("dp.replicate")
    shard = layout.mesh.of("dp.shard")
    sharded = layout.zero > 0
    # Without ZeRO every data-parallel rank is a replica.
    yield "dp_replicate", replicas if sharded else layout.dp
    # Ranks of ep hold shards of everything but the experts.
    yield "dp_shard", (shard if sharded else 1) * layout.ep
    if sharded and replicas > 1:
        yield "replicas", replicas
        yield "shard_size", shard
    if experts:
        yield "ep", layout.ep_ranks
        # Ranks of tp inside an expert: one if they share whole experts.
        yield "etp", 1 if "tp" in layout.experts else layout.tp


def _batches(layout: Layout, batch: int) -> dict[str, int]:
    """Sequences of a microbatch and of a rank's batch, and the number of microbatches."""
    microbatches = layout.microbatches
    # Sequences of a microbatch on one rank.
    each = batch // (layout.data * microbatches)
    piped = layout.pp > 1
    return {
        "microbatch": each,
        "microbatches": microbatches,
        "accumulation": microbatches,
        # In a pipeline torchtitan divides a rank's local batch into its
        # microbatches.
        "pipe_microbatch": each if piped else 1,
        "local_batch": each * microbatches if piped else each,
    }


def _sizes(shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(shape, name) for name in SIZES}
    # An integral rope_theta is written as 10000, not 10000.0.
    if shape.rope_theta.is_integer():
        found["rope_theta"] = int(shape.rope_theta)
    if not shape.experts:
        found |= {"experts": 0, "top_k": 0}
    else:
        found["expert_ffn"] = shape.expert_ffn
        # Other trainers give the width of the shared expert, not the number
        # merged into it.
        found["shared_ffn"] = shape.shared_experts * shape.expert_ffn
        if shape.dense_layers:
            sparse = shape.layers - shape.dense_layers
            # Megatron's notation for which blocks have experts:
            # `([0]*3+[1]*58)`.
            found["sparse_blocks"] = f"([0]*{shape.dense_layers}+[1]*{sparse})"
    if shape.kv_latent:
        found |= {
            "q_latent": shape.q_latent,
            "kv_latent": shape.kv_latent,
            "nope_dim": shape.head_dim - shape.turned,
            "rope_dim": shape.turned,
            "value_dim": shape.valued,
            # Other trainers derive these from the latent's sizes: 0 leaves
            # them out.
            "head_dim": 0,
            "kv_heads": 0,
        }
    # As many as query heads is the default of trainers.
    elif shape.kv_heads == shape.heads:
        found["kv_heads"] = 0
    return found


def _stages(layout: Layout, shape: Shape) -> dict[str, Any]:
    """Blocks of uneven stages, and the layers of a chunk."""
    blocks = blocks_of_stages(layout, shape)
    found: dict[str, Any] = {}
    if len(set(blocks)) > 1:
        # Megatron's notation: E the embedding, t a block, L the loss.
        stages = ["t" * count for count in blocks]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        found["stage_layout"] = "|".join(stages)
    if layout.schedule == INTERLEAVED:
        # torchtitan counts the embedding and the head as one layer each.
        found["layers_of_chunk"] = math.ceil(
            (shape.layers + 2) / layout.virtual_stages
        )
    return found


def blocks_of_stages(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """Blocks of every virtual stage."""
    return stage_blocks(layout, shape.name, work_of_pieces(shape))


# ---- choices


def choices_of(job: Job) -> dict[str, tuple[str, ...]]:
    """The words of every group."""
    layout = job.layout
    found: dict[str, tuple[str, ...]] = {
        **dict(_frequencies(layout)),
        "zero": (f"zero{layout.zero}",),
        "precision": (f"{layout.precision} {layout.matmul}".strip(),),
        # "every=2" -> "every"; the number is a quantity.
        "recompute": (layout.recompute.partition("=")[0],),
        "offload": layout.offload,
        "compile": (_compiled(layout),),
        "overlap": ("overlap",) if layout.overlap else (),
        "order": order_of(layout),
    }
    if layout.tp > 1:
        found["seq"] = ("seq" if layout.seq else "no seq",)
    if layout.cp > 1:
        found["cp"] = (_context(layout),)
    if layout.schedule != ACCUM:
        found["schedule"] = (layout.schedule,)
    if job.shape is not None:
        found |= model_choices(job.shape)
    return found


def _frequencies(layout: Layout) -> Iterator[tuple[str, tuple[str]]]:
    """Frequency of gathers and reductions, if not the default."""
    # What the same mesh and stage would have without words for it.
    usual = Layout(mesh=layout.mesh, zero=layout.zero, offload=layout.offload)
    for name in ("gather", "reduce", "prefetch"):
        value = getattr(layout, name)
        if value != getattr(usual, name):
            yield name, (f"{name}:{value}",)


def _compiled(layout: Layout) -> str:
    if not layout.compile:
        return "no compile"
    return (
        "compile" if layout.compile == COMPILE else f"compile:{layout.compile}"
    )


def _context(layout: Layout) -> str:
    used = [
        way for way in ("ring", "ulysses") if layout.mesh.of(f"cp.{way}") > 1
    ]
    return " and ".join(used)


def order_of(layout: Layout) -> tuple[str, ...]:
    """The order of pp and dp if both exist, otherwise empty.

    The other axes are inside of them: ep, then cp, then tp. Any other order is spelled
    out.
    """
    names = [axis.name for axis in layout.mesh.axes]
    # The usual order inside pp and dp.
    usual = [name for name in ("ep", "cp", "tp") if name in names]
    inner = [name for name in names if name in usual]
    outer = [name for name in names if name not in usual]
    # Any other order is spelled out whole.
    if names != outer + usual or inner != usual:
        return (" ".join(names),)
    # Without dp, ep takes its place in the order.
    if "pp" in names and "ep" in names and "dp" not in names:
        return ("pp dp",)
    return (" ".join(outer),) if len(outer) > 1 else ()


def model_choices(shape: Shape) -> dict[str, tuple[str, ...]]:
    """The words of a model's choices."""
    activation = shape.activation or ("silu" if shape.gated else "gelu")
    grouped = not shape.kv_latent and shape.kv_heads != shape.heads
    return {
        "norm": (shape.norm,),
        "rope": (shape.positions,),
        "mlp": (f"{'gated' if shape.gated else 'plain'} {activation}",),
        "output": ("tied" if shape.tied else "untied",),
        "bias": (shape.bias,),
        "qk_norm": ("qk_norm",) if shape.qk_norm else (),
        "latent": ("latent",) if shape.kv_latent else (),
        "grouped": ("grouped",) if grouped else (),
        "mixers": unusual_mixers(shape.mixers),
        "output_gate": ("output_gate",) if shape.output_gate else (),
    }


@cache
def shipped(name: str) -> Shape:
    """A shape that comes with phalanx."""
    return Shape.load(name)


def unlike(a: Shape, b: Shape) -> Mapping[str, tuple[Any, Any]]:
    """The sizes in which two models differ, with both values.

    Only those that a trainer's file should have.
    """
    names = [each.name for each in fields(Shape) if each.name not in UNASKED]
    values = {name: (getattr(a, name), getattr(b, name)) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}
