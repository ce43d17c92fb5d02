"""Activation checkpointing of a unit (remat): recompute its forward in backward instead of keeping its activations.

The parameters are passed to torch's `checkpoint` as arguments, because it saves its arguments through the surrounding
saved-tensor hooks. These are the hooks of `packing`, which save a position instead of a gathered parameter.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from zero.core.activations import REMAT, ActivationPolicy
from zero.engine.forward.rows import Chunks
from zero.engine.model import call_with
from zero.platform.modes import unobserved

UNCOUNTED_NUMEL = 65_536
"""Buffers of at most this many elements are assumed to change in every forward.

torch's batch norm changes its running statistics, one element per channel, without incrementing their version.
"""

KEPT_ONCE = (
    f"results that are kept serve one backward, and may not be changed in place. Use {REMAT.name} for units with "
    "in-place activations, and for graphs with retain_graph or several backwards."
)

# torch 2.14 warns unless told whether kept results pass through the hooks; in earlier versions they never do
_PLAIN: dict[str, Any] = {"respect_saved_tensors_hooks": False}
_TO_CHECKPOINT = _PLAIN if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}


def recomputed_call(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    args: Any,
    kwargs: Mapping[str, Any],
    call: Callable[..., Any] = call_with,
    *,
    policy: ActivationPolicy,
    chunks: Chunks | None = None,
    copies: bool = True,
) -> Any:
    """Run `module` with `parameters` in place of its own, and recompute its activations in backward.

    Args:
        call: `call_with`, bound to the module's path for messages.
        policy: says which results the recomputation uses.
        chunks: the chunks of rows that it runs on, whose forward may not change buffers; None: all rows at once.
        copies: copy the buffers that forward may change.
    """
    if chunks is not None and (rows := chunks.split_in((args, kwargs))):
        recomputed = partial(recomputed_call, module, call=call, policy=policy, copies=False)
        return chunks.run(recomputed, partial(_alone, module, call), module, parameters, (args, kwargs), rows)
    names, (tensors, rebuild) = tuple(parameters), _apart(args, kwargs)
    # Forward may change buffers (running statistics). The recomputation must neither read nor repeat these changes, so
    # it gets copies of the buffers as they were before forward.
    with unobserved():
        buffers = module.named_buffers() if copies else ()
        before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in buffers}
    replaced: dict[str, Tensor] | None = None
    context = copy_context()  # the recomputation reads its variables as forward did, even if they changed

    def compute(*values: Tensor) -> Any:
        run = call if replaced is None else partial(context.run, call)
        given = dict(zip(names, values, strict=False))
        try:
            return run(given, module, *rebuild(values[len(names) :]), buffers=replaced)
        except RuntimeError as error:
            if policy.keeps is not None and replaced is not None:
                error.add_note(f"zero.activations={policy.name}: {KEPT_ONCE}")
            raise

    # Parameters are arguments, because `checkpoint` saves arguments through our hooks, which keep only positions.
    outputs = checkpoint(
        compute, *parameters.values(), *tensors, use_reentrant=False, context_fn=_contexts(policy), **_TO_CHECKPOINT
    )
    now = dict(module.named_buffers())
    replaced = {
        name: copy
        for name, (buffer, seen, copy) in before.items()
        if now.get(name) is not buffer or buffer._version != seen or copy.numel() <= UNCOUNTED_NUMEL
    }
    before.clear()
    return outputs


def _alone(
    module: nn.Module, call: Callable[..., Any], parameters: Mapping[str, Tensor], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run `module` with `parameters` and with copies of its buffers, once."""
    copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return call(parameters, module, args, kwargs, buffers=copies)


def _contexts(policy: ActivationPolicy) -> Callable[[], Any]:
    """Return the function that makes the contexts of a forward and of its recomputation."""
    keeps = policy.keeps
    if keeps is None:
        return noop_context_fn

    def decide(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, decide)


def _apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the distinct tensors among the arguments, and a function that rebuilds (args, kwargs) from replacements.

    A tensor that is passed twice becomes one object again, because attention tests `query is key`.
    """
    values = [*args, *kwargs.values()]
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    numbers = {key: number for number, key in enumerate(tensors)}
    places = [(numbers.get(id(value)), None if isinstance(value, Tensor) else value) for value in values]
    count, names = len(args), tuple(kwargs)

    def rebuild(others: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rebuilt = [value if number is None else others[number] for number, value in places]
        return tuple(rebuilt[:count]), dict(zip(names, rebuilt[count:], strict=True))

    return list(tensors.values()), rebuild
