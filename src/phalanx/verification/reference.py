"""The reference training on one process: ordinary autograd, torch's optimizers and loss
scaler.

It uses nothing of the engine, not even its initialization. In float64 a built-in model
is computed by `plain.py`, which shares no code with it. In a narrow precision its own
modules are used, as roundings depend on the order of operations; the training then
follows PyTorch's documentation of mixed precision: weights and updates in float32, a
copy for computing, gradients accumulated in float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import Shape
from ..layout.adapters import adapts
from ..models import IGNORED, Decoder, DeepMlp, Router
from ..models.ahead import HIDDEN, look_ahead
from ..models.loss import CrossEntropy
from ..parallel import Model, Precision
from ..parallel.batch import VALID
from ..parallel.model import entries_named
from ..training.optimizer import Optimizer
from . import plain
from .adapters import adapter_start
from .cases import VARIED
from .mixers import own_start
from .optimizers import plain_optimizer

Batch = Mapping[str, Tensor]
Batches = Callable[[int], Batch]
# argument: the number of rows; result: the rows of each microbatch
Cut = Callable[[int], Sequence[Tensor]]
VALIDATIONS = 2  # batches of the validation after the last step


class Mismatch(NamedTuple):
    """An element whose copies on two ranks differ in their bits."""

    what: str  # start, gradient, weight, or a scalar: norm, logged loss, ...
    name: str  # of the parameter; "" for a scalar
    element: tuple[int, ...]
    ranks: tuple[int, int]
    values: tuple[float, float]


@dataclass(frozen=True)
class TracedStep:
    """One training step: loss per valid token, gradient norm, gradients, new weights,
    and outputs.

    `outputs` has one number for each token of every piece's output. `mismatches` has
    the first element of each tensor whose copies differ. `logged` is the mean loss that
    a run would log.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    scale: float = 1.0
    mismatches: tuple[Mismatch, ...] = ()
    # each token's experts, by piece
    routes: Mapping[str, Tensor] = field(default_factory=dict)
    # between the chosen scores and the next best
    gaps: Mapping[str, Tensor] = field(default_factory=dict)
    logged: float = 0.0


@dataclass(frozen=True)
class Trace:
    """A whole training: the weights before the first step, the steps, the validation
    loss.

    Copies that differ before the first step are mismatches of the first step.
    `breaches` name values with too few bits.
    """

    start: dict[str, Tensor]
    steps: list[TracedStep]
    validation: float | None = None
    breaches: tuple[str, ...] = ()


@dataclass
class Nudge:
    """Moves every value by one unit in the last place of its dtype, up or down at
    random."""

    generator: torch.Generator = field(default_factory=torch.Generator)

    def __call__(self, x: Tensor) -> Tensor:
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[
            x.element_size()
        ]
        up = (
            torch.randint(
                0, 2, x.shape, generator=self.generator, dtype=integer
            )
            * 2
            - 1
        )
        # Numbers of a float format are ordered like their bits, for either
        # sign.
        moved = (x.detach().contiguous().view(integer) + up).view(x.dtype)
        # 0 stays: its neighbour is denormal, far below any rounding.
        # Neighbours of the largest are infinite.
        return torch.where(
            (x == 0) | ~x.isfinite() | ~moved.isfinite(), x, moved
        )

    def apart(self) -> Nudge:
        """Return a nudge with independent random numbers."""
        # Far from the seeds of other nudges, which count up from 0.
        seed = self.generator.initial_seed() + 1000
        return Nudge(torch.Generator().manual_seed(seed))


@dataclass
class Passed:
    """A forward of one microbatch.

    `loss` is summed over its tokens, and so is `ahead`, the weighted loss of later
    tokens; `beside` are other losses, summed over its sequences. By piece: one number
    for each token of the output, each token's experts, and the gap between their scores
    and the next best. `gradients` are those that no loss has, of biases that balance
    experts.
    """

    loss: Tensor
    ahead: Tensor | float = 0.0
    beside: list[Tensor] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    routes: dict[str, Tensor] = field(default_factory=dict)
    gaps: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def step(
        self,
        norm: float,
        gradients: dict[str, Tensor],
        weights: dict[str, Tensor],
        scale: float = 1.0,
    ) -> TracedStep:
        """Return the training step that this was the forward of, with the mean loss of
        its tokens."""
        loss, outputs = float(self.loss), self.outputs
        step = TracedStep(
            loss, norm, gradients, weights, outputs, scale, logged=loss
        )
        return replace(step, routes=self.routes, gaps=self.gaps)


Weights = Mapping[str, nn.Parameter]  # by the model's names
Forward = Callable[[Weights, Batch], Passed]  # of a microbatch


def project(output: Tensor) -> Tensor:
    """Reduce each token (or row) of a piece's output to its dot product with a fixed
    vector.

    Any difference in a token's features changes the result, including one of sign or
    order.
    """
    # Random but fixed: two outputs of the same width have the same vector.
    width = output.shape[-1]
    vector = torch.randn(
        width,
        generator=torch.Generator().manual_seed(width),
        dtype=torch.float64,
    )
    # Divided by sqrt(width), so that sums of wide outputs are as large as
    # those of narrow ones.
    # Not a matrix-vector product: its rounding depends on the number of tokens.
    products = output.detach().double() * vector.to(output.device)
    return products.sum(-1) / math.sqrt(width)


def validation_of(batches: Batches, steps: int) -> list[Batch]:
    """Return the batches of a validation: ordinary ones after the last step, without
    dropout.

    The second one has targets in only half of its rows, so that a mean of means is not
    the mean over all tokens.
    """
    chosen: list[Batch] = []
    for index in range(VALIDATIONS):
        # Steps from VARIED on have ordinary batches.
        step = max(steps, VARIED) + index
        batch = {n: x for n, x in batches(step).items() if n != "noise"}
        if (
            index
            and "targets" in batch
            and not batch["targets"].is_floating_point()
        ):
            targets = batch["targets"].clone()
            # A mean of the batches' means would differ from the mean over all
            # tokens.
            targets[: targets.shape[0] // 2] = IGNORED
            batch["targets"] = targets
        chosen.append(batch)
    return chosen


def in_one(rows: int) -> list[Tensor]:
    """All rows as one microbatch."""
    return [torch.arange(rows)]


def reference(
    model: Model,
    batches: Batches,
    *,
    steps: int,
    optimizer: Optimizer,
    rate: Callable[[int], float],
    clip: Callable[[int], float],
    precision: Precision,
    seed: int,
    cut: Cut = in_one,
    own_losses: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    raised: Mapping[int, float] = MappingProxyType({}),
    forward: Forward | None = None,
    nudge: Nudge | None = None,
    validations: Sequence[Batch] | None = None,
) -> Trace:
    """Train the model on one process, as PyTorch's own documentation would.

    `forward` computes the model instead of its pieces; `cut` divides rows into
    microbatches, by default one. `raised` has factors by which the loss scale is
    multiplied before a step. `own_losses`: the pieces keep their losses instead of
    torch's.

    With `nudge`, the compute weights, the inputs of every piece, the gradients
    returning there, and each microbatch's weight gradient are moved by one unit in the
    last place: the resulting change is rounding.
    """
    train = {
        name: weight.requires_grad for name, weight in model.weights.items()
    }
    # A weight that is never updated needs no more precision than the compute dtype.
    held = {
        name: precision.master if train[name] else precision.compute
        for name in train
    }
    start = {
        name: draw(model, name, seed).to(held[name]) for name in model.weights
    }
    # Masters and, if they compute in another precision, copies: as in torch's
    # mixed precision.
    masters, copies = (
        {
            n: nn.Parameter(x.to(dtype, copy=True), requires_grad=train[n])
            for n, x in start.items()
        }
        for dtype in (precision.master, precision.compute)
    )
    # A nudge moves weights, which must not change the masters.
    same = precision.compute == precision.master and nudge is None
    copies = masters if same else copies
    forward = forward or Pieces(model, copies, nudge, own_losses=own_losses)
    # Balancing biases have no gradient of the loss; `_balance` moves them.
    trained = {
        name: x
        for name, x in masters.items()
        if train[name] and name not in model.rates
    }
    update = plain_optimizer(optimizer, trained, rate(0), model)
    # Independent of the nudges of values.
    nudge_gradients = nudge.apart() if nudge else None
    seen = []
    for step in range(steps):
        # Rates are those of a schedule, set by hand as torch's schedulers do.
        for group in update.param_groups:
            group["lr"] = rate(step)
        for master in masters.values():
            master.grad = None
        if not same:
            _copy(copies, masters, nudge)
        if scaler and step in raised:
            scaler.update(scaler.get_scale() * raised[step])
        # The loss scale before this step; the scaler may change it after.
        scale, scaled = (
            (float(scaler.get_scale()), scaler.scale)
            if scaler
            else (1.0, None)
        )
        passed = _gradients(
            forward,
            batches(step),
            masters,
            copies,
            cut,
            scaled,
            nudge_gradients,
        )
        if scaler:
            scaler.unscale_(update)
        # not parameters of the optimizer, so the scaler does not unscale them
        for name in model.rates:
            grad = masters[name].grad
            masters[name].grad = None if grad is None else grad / scale
        # Recorded before clipping, as the layout's are.
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad.clone()
            for name, x in masters.items()
            if train[name]
        }
        # clip_grad_norm_ returns the norm before clipping; an infinite limit
        # only measures.
        norm = float(
            nn.utils.clip_grad_norm_(trained.values(), clip(step) or math.inf)
        )
        if scaler:
            scaler.step(update)
            scaler.update()
        else:
            update.step()
        # A step that float16 skips leaves biases as they are.
        if math.isfinite(norm):
            _balance(model, masters, gradients)
        after = {name: x.detach().clone() for name, x in masters.items()}
        seen.append(passed.step(norm, gradients, after, scale))
    # The last update, for the validation.
    if not same:
        _copy(copies, masters, nudge)
    if validations is None:
        validations = validation_of(batches, steps)
    validation = _validation(forward, copies, validations, nudge)
    return Trace(start, seen, validation)


def passes(
    model: Model,
    batch: Batch,
    seed: int,
    forwards: Callable[[Weights], Sequence[Forward]],
) -> list[Trace]:
    """Run one forward and backward of a batch in float64, by each of the forwards.

    Weights are perturbed from their start: a zero bias or sink would hide how it is
    used.
    """
    found = []
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: draw(model, name, seed).double()
        # On the scale of weights: 0.1 is large beside a start of 0.02.
        + 0.1
        * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in model.weights.items()
    }
    weights = {
        n: nn.Parameter(x, requires_grad=n not in model.frozen)
        for n, x in moved.items()
    }
    for forward in forwards(weights):
        for weight in weights.values():
            weight.grad = None
        passed = _gradients(forward, batch, weights, weights, in_one, None)
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad.clone()
            for name, x in weights.items()
            if x.requires_grad
        }
        norm = math.sqrt(
            sum(float(x.square().sum()) for x in gradients.values())
        )
        found.append(Trace(moved, [passed.step(norm, gradients, moved)]))
    return found


# ---- initial weights


def draw(model: Model, name: str, seed: int) -> Tensor:
    """Return the initial value of a weight, by the rule in `docs/verified.md`: a
    generator seeded with the first 63 bits of the SHA-256 of `seed:name`; a matrix has
    one for each tile."""
    if model.own_start is not None:  # the class's own constructor
        return model.own_start(seed)[name].clone()
    size, owner = (
        model.weights[name].shape,
        getattr(model.draw, "__self__", None),
    )
    # As a matrix: all dimensions but the last are rows.
    whole = torch.empty(size).view(size[:-1].numel(), -1)
    high, wide = whole.shape
    tiled = isinstance(owner, Decoder | DeepMlp) or model.draw is Model.draw
    if tiled := tiled and len(size) > 1 and not adapts(name):
        wide = min(256, wide)
        high = 65536 // wide
    # In the order of rows, then columns; the first tile has no number in its
    # seed.
    corners = product(
        range(0, len(whole), high), range(0, whole.shape[1], wide)
    )
    for number, (i, j) in enumerate(corners):
        tile, more = (
            whole[i : i + high, j : j + wide],
            f":{number}" if number else "",
        )
        numbers = _drawn(
            model, name, f"{seed}:{name}{more}", tile.shape if tiled else size
        )
        tile.copy_(numbers.view(tile.shape))
    for _, piece in model.pieces if model.draw is Model.draw else ():
        for module in piece.modules():
            row = (
                module.padding_idx
                if isinstance(module, nn.Embedding)
                else None
            )
            if row is not None and module.weight is model.weights[name]:
                whole[row] = (
                    0.0  # the default rule initializes it as torch does
                )
    return whole.view(size)


def _drawn(model: Model, name: str, seed: str, size: torch.Size) -> Tensor:
    digest = hashlib.sha256(seed.encode()).hexdigest()
    # Half of the first 64 bits: a seed of torch is a signed 64-bit integer.
    generator = torch.Generator().manual_seed(int(digest[:16], 16) // 2)
    owner: Any = getattr(model.draw, "__self__", None)
    if adapts(name):
        return adapter_start(name, size, generator)
    if isinstance(owner, DeepMlp):
        return torch.normal(
            0.0, math.sqrt(2 / owner.width), size, generator=generator
        )
    if not isinstance(owner, Decoder):
        # The model's own rule.
        model.draw(name, whole := torch.empty(size), generator)
        return whole
    if name.endswith("bias"):
        return torch.zeros(size)
    own = own_start(name, size, generator)
    if own is not None:
        return own
    # If weights are stored minus one, 0 means 1.
    if name.endswith("norm.weight"):
        return torch.full(
            size, float(model.shape is None or model.shape.norm != "rms1")
        )
    # Blocks that predict later tokens are not counted.
    layers = sum(piece.startswith("layers.") for piece, _ in model.pieces)
    layers -= model.shape.predictors if model.shape else 0
    # into the residual stream
    into = ".wo.weight", ".attn.out.weight", ".down.weight", ".routed.down"
    last = name.endswith(into)
    # 0.02 / sqrt(2 N), as GPT-2 scales the weights into the residual stream
    # (Radford et al. 2019).
    spread = 0.02 / math.sqrt(2 * layers) if last else 0.02
    return torch.normal(0.0, spread, size, generator=generator)


def _install(model: Model, weights: Mapping[str, nn.Parameter]) -> None:
    """Replace the model's meta weights by real ones; tied weights stay one object."""
    # By identity: a tied parameter is found in every module that has it.
    names = {parameter: name for name, parameter in model.weights.items()}
    for _, piece in model.pieces:
        for module in piece.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = weights[names[parameter]]
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty(
                        buffer.shape, dtype=buffer.dtype
                    )
            # Buffers such as rotary angles, which meta tensors lost.
            reset = getattr(module, "reset_buffers", None)
            if callable(reset):
                reset()


class _PlainCrossEntropy(nn.Module):
    """torch's cross-entropy of all logits at once, plus PaLM's z-loss by its
    formula."""

    def __init__(self, z: float) -> None:
        super().__init__()
        self.z = z

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        # logits: (batch, time, words), targets: (batch, time)
        wide = logits.to(
            torch.promote_types(logits.dtype, torch.float32)
        ).flatten(0, -2)
        flat = targets.flatten()
        losses = nn.functional.cross_entropy(
            wide, flat, ignore_index=IGNORED, reduction="sum"
        )
        if not self.z:
            return losses
        return (
            losses
            + self.z * wide.logsumexp(-1)[flat != IGNORED].square().sum()
        )


def _install_losses(model: Model) -> None:
    """Replace our memory-efficient loss, which has its own backward, by torch's."""
    for _, piece in model.pieces:
        for module in piece.modules():
            for name, child in module.named_children():
                if type(child) is CrossEntropy:
                    setattr(module, name, _PlainCrossEntropy(child.z))


@torch.no_grad()
def _copy(
    copies: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    nudge: Nudge | None,
) -> None:
    for name, copy in copies.items():
        narrow = masters[name].to(copy.dtype)
        copy.copy_(nudge(narrow) if nudge else narrow)


# ---- a step


class Pieces:
    """The chained forward of a model's own pieces, which keep the weights given
    here."""

    def __init__(
        self,
        model: Model,
        weights: Weights,
        nudge: Nudge | None = None,
        *,
        own_losses: bool = False,
    ) -> None:
        self.model, self.nudge = model, nudge
        _install(model, weights)
        if not own_losses:
            _install_losses(model)

    def __call__(self, weights: Weights, batch: Batch) -> Passed:
        passed = Passed(torch.zeros(()))
        with ExitStack() as hooks:
            for name, router in routers(self.model.pieces):
                made = hooks.enter_context(_logits_of(router))
                hook = partial(self._routed, passed, name, made)
                hooks.callback(router.register_forward_hook(hook).remove)
            self._chain(batch, passed)
        return passed

    def _chain(self, batch: Batch, passed: Passed) -> None:
        model, nudge, outputs = self.model, self.nudge, passed.outputs
        if model.shape and model.shape.predictors:
            batch = {**batch, **look_ahead(batch, model.shape.predictors)}
        x: Tensor | None = None
        hidden: dict[str, Tensor] = {}  # passes by blocks, to the head
        for number, (name, piece) in enumerate(model.pieces):
            # The first piece has no previous output, so its first argument
            # comes from the batch, too.
            takes = entries_named(model.takes(number)[number > 0 :], batch)
            named = {key: batch[key] for key in takes if key in batch}
            named |= {key: hidden[key] for key in takes if key in hidden}
            if nudge:
                named = {
                    k: nudge(v) if v.is_floating_point() else v
                    for k, v in named.items()
                }
            gave = piece(**named) if x is None else piece(x, **named)
            x = gave["x"] if isinstance(gave, dict) else gave
            if isinstance(gave, dict):
                hidden |= {n: gave[n] for n in gave if n == HIDDEN}
                for name_, loss in getattr(piece, "extra_losses", {}).items():
                    passed.ahead = loss.share * loss.factor * gave[name_]
            # A loss has no dimension.
            if x.dim():
                outputs[name] = project(_without_padding(x, batch.get(VALID)))
                x = _nudged(x, nudge) if nudge else x
        assert x is not None
        passed.loss = x

    def _routed(
        self,
        passed: Passed,
        name: str,
        made: list[Tensor],
        router: Router,
        args: tuple[Any, ...],
        out: tuple[Tensor, Tensor],
    ) -> None:
        """Record a router's choices, their margins, and its losses."""
        logits, chosen = (
            _without_padding(each, args[1]) for each in (made.pop(), out[1])
        )
        if self.model.shape is not None:
            passed.beside.append(
                _router_loss(self.model.shape, logits, chosen)
            )
        # Scores of all experts, by which it chooses the top k.
        ranked = router.ranked(router.scored(logits))
        passed.routes[name], passed.gaps[name] = (
            chosen.sort(-1).values,
            _gap(ranked, router.top_k),
        )


class PlainForward:
    """The forward of `plain.py`, for a built-in model of this shape."""

    def __init__(self, shape: Shape, z_loss: float = 0.0) -> None:
        self.shape, self.z_loss = shape, z_loss

    def __call__(self, weights: Weights, batch: Batch) -> Passed:
        if self.shape.kind == "mlp":
            found = plain.deep_mlp(self.shape, weights, batch)
        else:
            found = plain.decoder(
                self.shape, weights, batch, z_loss=self.z_loss
            )
        passed = Passed(found.loss, found.ahead)
        passed.outputs = {
            name: project(x) for name, x in found.outputs.items()
        }
        for name, routing in found.routings.items():
            # A mean over sequences, turned into a sum.
            passed.beside.append(routing.loss * _rows(batch))
            passed.routes[name] = routing.chosen.sort(-1).values
            passed.gaps[name] = _gap(routing.scores, self.shape.top_k)
            if self.shape.balance == "bias":
                passed.gradients[f"{name}.mlp.router.bias"] = routing.excess
        return passed


def _gap(ranked: Tensor, top_k: int) -> Tensor:
    """Return the difference (B, T) between the last chosen score and the next, from
    scores (B, T, experts)."""
    # Without a next one the gap is the score itself.
    ranked = ranked.detach().sort(-1, descending=True).values
    last = ranked[..., top_k - 1]
    return last - ranked[..., top_k] if top_k < ranked.shape[-1] else last


@contextmanager
def _logits_of(router: Router) -> Iterator[list[Tensor]]:
    """Collect a router's logits, so that its losses are computed from them.

    Recomputed logits would give the router's input and weight a second gradient, which
    would be rounded to 16 bits separately from the first.
    """
    own: Any = router
    plain, made = own.logits, list[Tensor]()

    def logits(x: Tensor) -> Tensor:
        made.append(plain(x))
        return made[-1]

    own.logits = logits
    try:
        yield made
    finally:
        del own.logits  # restores the method of the class


def _router_loss(shape: Shape, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the router's loss for logits (B, T, experts) and chosen experts (B, T,
    top_k): B times the mean over sequences."""
    p = logits.softmax(-1) if shape.scores == "softmax" else logits.sigmoid()
    # For sigmoid scores; a softmax sums to 1 already.
    p = p / p.sum(-1, keepdim=True)
    # (B, T, experts)
    f = nn.functional.one_hot(chosen, shape.experts).sum(-2).to(logits)
    each = shape.experts * (f.mean(1) * p.mean(1)).sum(-1)
    batch = shape.experts * (f.mean((0, 1)) * p.mean((0, 1))).sum()
    z = logits.exp().sum(-1).log().square().mean(1)
    return (
        shape.sequence_loss * each
        + shape.batch_loss * batch
        + shape.z_loss * z
    ).sum()


def routers(
    pieces: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, Router]]:
    """Yield the routers of these pieces, with the pieces' names."""
    for name, piece in pieces:
        yield from (
            (name, each)
            for each in piece.modules()
            if isinstance(each, Router)
        )


def _gradients(
    forward: Forward,
    batch: Batch,
    masters: Mapping[str, nn.Parameter],
    copies: Mapping[str, nn.Parameter],
    cut: Cut,
    scaled: Callable[[Tensor], Tensor] | None,
    nudge: Nudge | None = None,
) -> Passed:
    """Return the loss per valid token and the records of every piece; accumulate
    gradients in `masters`.

    With `nudge`, the gradients and loss of each microbatch are moved, as they may be
    rounded to the compute dtype.
    """
    # At least 1: a batch without targets has a loss of 0, not NaN.
    count, total = max(1, _valid(batch)), 0.0
    parts = []
    for rows in cut(_rows(batch)):
        passed = forward(copies, {name: x[rows] for name, x in batch.items()})
        loss = passed.loss.detach()
        total += float(nudge.apart()(loss) if nudge else loss)
        # In float16 the loss times the loss scale would overflow.
        wide = passed.loss.to(
            torch.promote_types(passed.loss.dtype, torch.float32)
        )
        # Losses of tokens are divided by all tokens of the step, others by its
        # sequences.
        of_tokens = (wide + passed.ahead) / count
        whole = of_tokens + sum(passed.beside) / _rows(batch)
        share = scaled(whole) if scaled else whole
        share.backward()  # type: ignore[no-untyped-call]
        for name, gradient in passed.gradients.items():
            known = copies[name].grad
            copies[name].grad = gradient if known is None else known + gradient
        parts.append(passed)
        # One copy: autograd has accumulated there already.
        if copies is masters:
            continue
        for name, copy in copies.items():
            if copy.grad is not None:
                master = masters[name]
                moved = nudge(copy.grad) if nudge else copy.grad
                part = moved.to(master.dtype)
                master.grad = (
                    part if master.grad is None else master.grad + part
                )
                copy.grad = None
    outputs, routes, gaps = (
        _joined([getattr(part, what) for part in parts])
        for what in ("outputs", "routes", "gaps")
    )
    mean = torch.tensor(total / count, dtype=torch.float64)
    return Passed(mean, outputs=outputs, routes=routes, gaps=gaps)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([part[name] for part in parts]) for name in parts[0]
    }


@torch.no_grad()
def _balance(
    model: Model,
    masters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
) -> None:
    """Make experts with fewer tokens than the mean more likely to be chosen, and the
    others less."""
    for name, rate in model.rates.items():
        master = masters[name]
        few, many = (
            each.to(master)
            # By the sign alone: the bias moves at a constant rate.
            for each in (gradients[name] < 0, gradients[name] > 0)
        )
        master.add_(few, alpha=rate).sub_(many, alpha=rate)


def _without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Remove padding: tokens of x (rows, time, ...) that are not `valid` (rows, time),
    at the end of each row."""
    # Padding is at the end, and of equal length in all rows.
    return x if valid is None else x[:, : int(valid[0].sum())]


def _nudged(x: Tensor, nudge: Nudge) -> Tensor:
    """Move x by one unit in the last place, and likewise the gradient that returns
    here."""
    # The value is moved, and the gradient passes as if it were not.
    moved = x + (nudge(x) - x).detach()
    if moved.requires_grad:
        moved.register_hook(nudge)  # type: ignore[no-untyped-call]
    return moved


@torch.no_grad()
def _validation(
    forward: Forward,
    weights: Weights,
    batches: Sequence[Batch],
    nudge: Nudge | None = None,
) -> float | None:
    """Return the mean loss over all valid tokens of all batches."""
    each = (forward(weights, batch).loss.detach() for batch in batches)
    losses = sum(
        float(nudge.apart()(loss) if nudge else loss) for loss in each
    )
    tokens = sum(map(_valid, batches))
    return losses / tokens if tokens else None


def _valid(batch: Batch) -> int:
    targets = batch.get("targets")
    if targets is None or targets.is_floating_point():
        return _rows(batch)
    # -100 is not counted; a model without targets counts rows.
    return int((targets != IGNORED).sum())


def _rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
