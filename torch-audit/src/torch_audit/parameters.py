"""Names of an optimizer's parameters, found without the program's help.

An optimizer knows tensors, not names. The modules that hold these tensors are found among all objects
that Python's garbage collector tracks; a module that no other of them holds is a root, and names count
from there.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from .flat_buffers import in_flat_buffer, runs_of
from .megatron import (
    Shard,
    cut_place,
    in_grad_buffer,
    is_cut,
    optimizer_shards,
    tensor_rank,
)
from .shards import Place, local_of, place_of

# Components that wrappers put into names: torch.compile, checkpointing, FSDP.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# The attribute in which DDP, engines and strategies hold the model, at the start of a name.
_OUTER = {"module", "_forward_module"}

DEEPSPEED = (
    "DeepSpeed keeps gradients and updates in flat buffers, and no parameter of a module names its part of"
    " this one. ZeRO 1, 2 and 3 are read with a fused or a client optimizer on the device."
)


class Refused(Exception):
    """Raised for a program whose parameters the recorder cannot place."""


@dataclass
class Named:
    """A parameter, all the names that it has, and its place in the whole tensor."""

    tensor: Tensor
    names: tuple[str, ...]
    place: Place
    # Of a flat buffer, if the tensor is one: see `flat_buffers`.
    run: slice | None = None
    # An axis and the indices along it, if the tensor has several parameters: see `contents`.
    chosen: tuple[int, Tensor] | None = None

    def part(self, of: Tensor) -> Tensor:
        """This parameter's part of the tensor, or of its gradient."""
        local = local_of(of)
        if self.run is not None:
            return local.view(-1)[self.run]
        if self.chosen is not None:
            axis, indices = self.chosen
            return local.index_select(axis, indices.to(local.device))
        return local

    @property
    def unknown(self) -> bool:
        """True for a tensor that no module holds."""
        return self.names[0].startswith("optimizer.")


def mesh_of(tensor: Tensor) -> dict[str, int]:
    """The sizes of the mesh on which a parameter lies, by dimension."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
        return dict(zip(names, mesh.shape, strict=True))
    return {"tp": tensor_rank(tensor)[1]} if is_cut(tensor) else {}


def plain_name(name: str) -> str:
    """A parameter's name without the components that wrappers add."""
    # "_orig_mod.layers.0.weight" -> "layers.0.weight".
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    # Only at the start: a module of a model may be called "module".
    while len(parts) > 1 and parts[0] in _OUTER:
        parts = parts[1:]
    return ".".join(parts)


def refusal(tensor: Tensor) -> str:
    """The reason why a parameter cannot be placed in the whole model; empty if it can."""
    if type(tensor).__name__ == "FlatParameter" or hasattr(
        tensor, "_is_flat_param"
    ):
        return (
            "FSDP1 keeps parameters in flat buffers, which are not read yet. Record the same model with"
            " FSDP2 (fully_shard), or with DDP."
        )
    return ""


def roots_of(wanted: Callable[[Tensor], bool]) -> list[Module]:
    """The outermost modules that hold a wanted parameter."""
    holders = []
    inner: set[int] = set()
    for found in gc.get_objects():
        # type() instead of isinstance(): proxies answer the latter by loading what they stand for.
        if not issubclass(type(found), Module) or "_parameters" not in vars(
            found
        ):
            continue
        inner.update(id(child) for child in found.children())
        if any(map(wanted, found.parameters())):
            holders.append(found)
    # A holder that another module has as a child is no root.
    return [module for module in holders if id(module) not in inner]


def named_parameters(
    tensors: Iterable[Tensor],
) -> tuple[list[Named], dict[str, int]]:
    """The trainable parameters of all modules that hold these tensors, and the sizes of their meshes.

    Tensors that no module holds come last. Frozen parameters count for the meshes, too: an adapter that
    is added to a sharded model is a plain tensor.
    """
    tensors = list(tensors)
    own = {id(tensor) for tensor in tensors}
    shards = optimizer_shards(tensors)

    def elsewhere(parameter: Tensor) -> bool:
        """True if an optimizer trains a parameter in another tensor."""
        if shards and in_grad_buffer(parameter):
            return True
        return in_flat_buffer(parameter)

    roots = roots_of(lambda x: id(x) in own or elsewhere(x))
    names: dict[int, list[str]] = {}
    known: dict[int, Tensor] = {}
    flat = []
    meshes: dict[str, int] = {}
    for name, parameter in _of_roots(roots):
        meshes |= mesh_of(parameter)
        # An optimizer may hold frozen parameters, too.
        if not parameter.requires_grad and id(parameter) not in own:
            continue
        if elsewhere(parameter) and id(parameter) not in own:
            flat.append((name, parameter))
            continue
        known[id(parameter)] = parameter
        listed = names.setdefault(id(parameter), [])
        if name not in listed:
            listed.append(name)
    found = list(_in_buffers(flat, tensors, shards))
    buffers = {id(each.tensor) for each in found}
    for index, tensor in enumerate(tensors):
        if id(tensor) not in known and id(tensor) not in buffers:
            known[id(tensor)] = tensor
            names[id(tensor)] = [f"optimizer.{index}"]
            meshes |= mesh_of(tensor)
    whole = [
        Named(tensor, tuple(names[key]), cut_place(tensor) or place_of(tensor))
        for key, tensor in known.items()
    ]
    return [*whole, *found], meshes


def _in_buffers(
    flat: list[tuple[str, Tensor]],
    buffers: list[Tensor],
    shards: Mapping[int, Shard],
) -> Iterator[Named]:
    """The parts of flat buffers, and the optimizer's shards, that belong to parameters."""
    names: dict[int, list[str]] = {}
    known = {id(parameter): parameter for _, parameter in flat}
    for name, parameter in flat:
        names.setdefault(id(parameter), []).append(name)
    for key, parameter in known.items():
        runs: Iterable[tuple[Tensor, slice, Place]] = ()
        if key in shards:
            runs = [shards[key].run_of(parameter)]
        elif in_flat_buffer(parameter):
            runs = runs_of(parameter, buffers)
        for buffer, run, place in runs:
            yield Named(buffer, tuple(names[key]), place, run)


def _of_roots(roots: list[Module]) -> Iterator[tuple[str, Tensor]]:
    for root in roots:
        for name, parameter in root.named_parameters(remove_duplicate=False):
            yield plain_name(name), parameter
