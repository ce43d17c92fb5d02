"""Shard the model of a user's loop: it begins with rank 0's values, and updates read its optimizer's groups."""

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from zero.core.optim import Transform
from zero.distributed.mesh import local_part
from zero.distributed.world import World
from zero.engine.init import init
from zero.engine.meta import is_meta, lacks_values
from zero.engine.model import buffers_of, same_bits
from zero.engine.open_store import open_store
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.whole import Weights
from zero.user_loop.optimizers import Optimizer, optimizer_names, trained, transform


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    make_plan: Callable[[Transform], Plan],
    *,
    clip: float | None,
    world: World,
    weights: Weights = None,
    seed: int = 0,
) -> State:
    """Take over a model, and return the state with its sharded parameters and an open store. Collective.

    Args:
        model: as for `initialize`; parameters that `optimizer` does not hold are not trained.
        optimizer: the optimizer whose groups are read at every update.
        make_plan: function from the optimizer's transform to a plan.
        clip: the largest gradient norm; None: no clipping.
        world, weights, seed: as for `initialize`.
    """
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as frozen:
        held = trained(optimizer)
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in held:
                frozen.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        _allocate_absent_buffers(model)
        plan = make_plan(transform(optimizer, optimizer_names(model), clip))
        store = open_store(plan)
        undo.callback(store.close)
        first = _values_of_rank_0(model, world) if weights is None else weights
        state = init(plan, store, seed=seed, weights=first)
        _broadcast_buffers(state.model, world)
        undo.pop_all()
    return state


def _values_of_rank_0(model: nn.Module, world: World) -> Weights:
    """Return a function that fills a parameter with rank 0's values; None if any parameter has no values yet."""
    if any(lacks_values(parameter) for parameter in model.parameters()):
        return None
    # read before the model is taken over
    values = {name: local_part(parameter).detach() for name, parameter in model.named_parameters()}

    def fill(name: str, tensor: torch.Tensor) -> None:
        if world.rank == 0:
            tensor.copy_(values[name])
        world.broadcast(tensor, what=f"first values of {name}").wait()

    return fill


def _allocate_absent_buffers(model: nn.Module) -> None:
    """Allocate persistent buffers that are on meta because their values depend on parameters that only rank 0 has."""
    for name, buffer in buffers_of(model).items():
        if is_meta(buffer) and not lacks_values(buffer):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _broadcast_buffers(model: nn.Module, world: World) -> None:
    for name, buffer in buffers_of(model).items():
        full = buffer.resolve_conj().resolve_neg().contiguous()
        before = full.clone()
        world.broadcast(full, what=f"buffer {name}").wait()
        if not same_bits(full, before):
            buffer.copy_(full)
