"""The recorder of one rank: it hooks torch, sketches some steps, and takes its hooks out again.

It sends no messages and changes no number, unless it is asked to perturb the weights. Where it looks:

- global hooks of modules: the input of the outermost module is the batch; outputs, and their gradients;
- `torch.autograd.backward`: the losses, and the dtypes of the operations behind them;
- `clip_grad_norm_` and `clip_grads_with_norm_`: the gradients before the clip, and its norm;
- global hooks of optimizers: weights and gradients before an update, weights after it.
"""

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import records
from .batches import batch_of
from .clips import clip_record, with_group
from .contents import Contents
from .dtypes import CastsPerturbed, operations_of
from .outputs import Outputs
from .parameters import (
    DEEPSPEED,
    Named,
    Refused,
    named_parameters,
    refusal,
)
from .perturb import perturb
from .records import (
    BatchRecord,
    ModuleRecord,
    ParameterRecord,
    StepRecord,
)
from .shards import local_of, place_of, whole_place


class Recorder:
    """Records the first `steps` steps of a program.

    A step of training comes to the hooks in this order, more than once where gradients accumulate:

    1. `_enter` and `_leave`, for each module: the batch of the outermost one, and the outputs of all;
    2. `_backward`: the loss;
    3. `_clip` or `_clip_with_norm`: the gradients before the clip, and the norm;
    4. `_before_update`: the gradients as the optimizer is given them;
    5. `_after_update`: the new weights. The file of the step is written, and again after each further
       optimizer.

    3 and 4 call `_step_of` first. It names parameters that were not seen before, sketches their weights,
    and begins a new step once a parameter has had its update.

    With `contents` it also writes hashes of the initial weights; with `find_in` it places the parameters
    by those of another run.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        perturbed: int = 0,
        *,
        contents: bool = False,
        find_in: Path | None = None,
    ) -> None:
        self.folder, self.steps, self.perturbed = folder, steps, perturbed
        self.contents = Contents() if contents else None
        self.find_in = find_in
        self._undo: list[Callable[[], object]] = []
        self._depth = 0  # of nested module calls
        self._named: list[Named] = []
        self._meshes: dict[str, int] = {}  # sizes of all meshes, by dimension
        # Of names, by the id of the optimizer's tensor: a flat buffer has several.
        self._indices: dict[int, list[int]] = {}
        # Of the step to come: they are seen before its first gradient is.
        self._batches: list[BatchRecord] = []
        self._losses: list[Tensor] = []
        self._operations: dict[str, int] = {}
        self._outputs = Outputs()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._record = StepRecord(rank=-1, step=step, world=1)
        self._sketches: dict[str, dict[int, Tensor]] = {}
        self._modules: list[tuple[ModuleRecord, Tensor]] = []

    # ---- hooks

    def install(self) -> None:
        handles = (
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(
                self._leave, always_call=True
            ),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )
        self._undo += [handle.remove for handle in handles]
        self._wrap(torch.autograd, "backward", self._backward)
        clip = torch.nn.utils.clip_grad
        self._wrap(clip, "clip_grad_norm_", self._clip)
        self._wrap(torch.nn.utils, "clip_grad_norm_", self._clip)
        self._wrap(
            torch.nn.utils, "clip_grads_with_norm_", self._clip_with_norm
        )
        atexit.register(self.finish)

    def _wrap(
        self, owner: Any, name: str, wrapper: Callable[..., Any]
    ) -> None:
        """Puts `wrapper(original, *args, **kwargs)` in the place of a function of torch.

        A program may have imported the wrapped function by name, so the wrapper stays harmless after
        the last step.
        """
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._undo:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(lambda: setattr(owner, name, original))

    def finish(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Runs a part of the recorder. An error in it ends the recording, not the audited program.

        The error is written into the record, so that no comparison passes by it.
        """
        try:
            with torch.no_grad():
                act(*args)
        except Refused as refused:
            self.finish()
            self._record.refused = str(refused)
            self._write()
        except Exception as error:
            self.finish()
            traceback.print_exc()
            self._record.refused = f"the recorder failed: {error!r}"
            self._write()

    # ---- batches and losses

    def _enter(self, module: Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return  # inside a graph, which hooks would break
        self._depth += 1
        # Only the outermost call, in training: evaluation and generation are
        # not recorded.
        if self._depth > 1 or not (
            module.training and torch.is_grad_enabled()
        ):
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation in the backward
        if _learns_shapes():
            return
        # Global hooks are not given keyword arguments; the frame that calls them has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs") or {}
        self._guarded(self._batch, module, args, kwargs)

    def _batch(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        parameters = [x for x in module.parameters() if x.requires_grad]
        if not parameters:
            return  # a loss, not a model
        if (
            self.perturbed
            and not self._record.step
            and not self._record.perturbed
        ):
            perturb(parameters, self.perturbed)
            self._record.perturbed = self.perturbed
            casts = ExitStack()
            casts.enter_context(CastsPerturbed(self.perturbed))
            self._undo.append(casts.close)
        kind = parameters[0].device.type
        if torch.is_autocast_enabled(kind):
            self._record.autocast = _dtype_name(torch.get_autocast_dtype(kind))
        batch = batch_of(args, kwargs)
        if batch is not None:
            self._batches.append(batch.record)
            self._outputs.begin(module, batch)

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._outputs.expects(module):
            self._outputs.add(module, output)
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._outputs.end()

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor in roots:
            if tensor.numel() == 1:
                loss = local_of(tensor.detach())
                self._losses.append(loss.double().reshape(()))
        if not self._operations:
            self._operations = operations_of(roots)
        return original(roots, *args, **kwargs)

    # ---- the clip

    def _clip(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A clip that computes the norm itself."""
        given, parameters = _with_gradients(parameters)
        # The norm's order: an argument by name or position, 2 by default.
        order = float(kwargs.get("norm_type", args[0] if args else 2.0))
        self._guarded(self._before_clip, given)
        norm = original(parameters, max_norm, *args, **kwargs)
        self._guarded(self._after_clip, given, max_norm, norm, order)
        return norm

    def _clip_with_norm(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: Any,
        total_norm: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A clip by a norm that the program has computed, as pipelines do, perhaps group by group."""
        given, parameters = _with_gradients(parameters)
        self._guarded(self._before_clip, given)
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        self._guarded(self._after_clip, given, max_norm, total_norm, None)
        return result

    def _before_clip(self, parameters: list[Tensor]) -> None:
        self._step_of(parameters)
        if self._undo:
            self._gradients(records.GRADIENT, parameters)

    def _after_clip(
        self,
        parameters: list[Tensor],
        max_norm: Any,
        norm: Any,
        order: float | None,
    ) -> None:
        if not self._undo:
            return  # that was the last step
        indices = [index for x in parameters for index in self._of(x)]
        clip = clip_record(indices, float(max_norm), norm, order or 2.0)
        clips = self._record.clips
        if order is None:
            self._record.clips = with_group(clips, clip)
        else:
            clips.append(clip)

    # ---- updates

    def _before_update(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        self._guarded(self._note_update, optimizer)

    def _note_update(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        self._step_of(parameters)
        if not self._undo:
            return  # that was the last step
        for group in groups:
            for parameter in group["params"]:
                for index in self._of(parameter):
                    noted = self._record.parameters[index]
                    noted.stepped = True
                    noted.rate = float(group.get("lr", 0.0))
        clipped = {
            index for clip in self._record.clips for index in clip.parameters
        }
        have = [each for each in parameters if each.grad is not None]
        # Gradients of parameters that no clip has seen, and again those that
        # one has.
        first = [x for x in have if not clipped.issuperset(self._of(x))]
        again = [x for x in have if clipped.issuperset(self._of(x))]
        self._gradients(records.GRADIENT, first)
        self._gradients(records.CLIPPED, again)

    def _after_update(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        if self._undo:
            self._guarded(self._note_updated, optimizer)

    def _note_updated(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        self._weights(records.UPDATED, parameters)
        self._write()

    def _step_of(self, parameters: list[Tensor]) -> None:
        """Goes on to the next step if these parameters have had their update in this one."""
        updated = self._sketches.get(records.UPDATED, {})
        # Several optimizers share a step; a second update of the same
        # parameter begins the next.
        if any(i in updated for each in parameters for i in self._of(each)):
            self._next()
        if not self._undo:
            return
        unnamed = [x for x in parameters if id(x) not in self._indices]
        if unnamed:
            self._name(unnamed)
        self._list_parameters()
        self._record.batches += self._batches
        self._record.losses += [float(loss) for loss in self._losses]
        self._batches, self._losses = [], []
        self._modules += self._outputs.take()

    def _next(self) -> None:
        later = self._record.step + 1
        if later < self.steps:
            self._begin(later)
        else:
            self.finish()

    def _name(self, unnamed: list[Tensor]) -> None:
        """Names all parameters of the modules that hold these.

        The parameters are kept, so their ids stay theirs.
        """
        named, meshes = named_parameters(unnamed)
        self._meshes |= meshes
        fresh = [x for x in named if id(x.tensor) not in self._indices]
        for each in fresh:
            reason = refusal(each.tensor)
            if each.unknown and "deepspeed" in sys.modules:
                reason = DEEPSPEED
            if reason:
                raise Refused(reason)
        if self.contents is not None:
            self.contents.add(fresh)
            self.contents.write(self.folder)
        if self.find_in is not None:
            fresh = Contents.read(self.find_in).placed(fresh)
        for each in fresh:
            indices = self._indices.setdefault(id(each.tensor), [])
            indices.append(len(self._named))
            self._named.append(each)

    def _of(self, tensor: Tensor) -> list[int]:
        """The indices of the parameters in an optimizer's tensor: one, or those of a flat buffer."""
        return self._indices.get(id(tensor), [])

    def _list_parameters(self) -> None:
        """Lists the named parameters in this step's record, and sketches their weights."""
        fresh = self._named[len(self._record.parameters) :]
        for each in fresh:
            self._record.parameters.append(_as_record(each))
        self._record.meshes = dict(self._meshes)
        tensors = {id(each.tensor): each.tensor for each in fresh}
        self._weights(records.WEIGHT, tensors.values())

    # ---- sketches

    def _weights(self, kind: str, parameters: Iterable[Tensor]) -> None:
        rows = self._sketches.setdefault(kind, {})
        for parameter in parameters:
            for index in self._of(parameter):
                named = self._named[index]
                weight = named.part(parameter.detach())
                rows[index] = named.place.sketch(weight)

    def _gradients(self, kind: str, parameters: Iterable[Tensor]) -> None:
        rows = self._sketches.setdefault(kind, {})
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            for index in self._of(parameter):
                named = self._named[index]
                place = named.place
                if isinstance(gradient, DTensor):
                    # A gradient may be replicated where its weight is sharded.
                    place = place_of(gradient)
                    noted = self._record.parameters[index]
                    noted.summand = place.summand
                    noted.gradient_cover = place.cover
                rows[index] = place.sketch(named.part(gradient))

    def _write(self) -> None:
        record = self._record
        record.rank, record.world = _rank_and_world()
        record.versions = _versions()
        record.operations = self._operations
        record.sketches = {
            kind: {index: numbers.tolist() for index, numbers in rows.items()}
            for kind, rows in self._sketches.items()
        }
        # Sums that lack some calls would mislead.
        modules = [] if self._outputs.failed else self._modules
        record.modules = [module for module, _ in modules]
        record.sketches[records.MODULE] = {
            index: numbers.tolist()
            for index, (_, numbers) in enumerate(modules)
        }
        record.write(self.folder)


def _learns_shapes() -> bool:
    """True in a forward by which a pipeline learns the shapes of its messages: it is no part of a step."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        # `_shape_inference` in torch 2.11, `_forward_metadata_inference` in 2.13.
        infers = frame.f_code.co_name.endswith("_inference")
        if infers and module.startswith("torch.distributed.pipelining"):
            return True
    return False


def _with_gradients(parameters: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a clip that have a gradient, and all its parameters, perhaps from a generator."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    listed = list(parameters)
    return [each for each in listed if each.grad is not None], listed


def _as_record(named: Named) -> ParameterRecord:
    place = named.place
    return ParameterRecord(
        names=list(named.names),
        shape=list(place.shape),
        count=place.count,
        cover=place.cover,
        whole=whole_place(place.shape).cover,
        place=place.text(),
        dtype=_dtype_name(named.tensor.dtype),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    environment = os.environ
    return int(environment.get("RANK", "0")), int(
        environment.get("WORLD_SIZE", "1")
    )


def _versions() -> dict[str, str]:
    """Versions of the libraries that the program has loaded."""
    names = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl")
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    return {
        name: str(getattr(x, "__version__", "?")) for name, x in loaded.items()
    }
