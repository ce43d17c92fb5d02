"""Activation checkpointing of a unit (remat): recompute its forward in backward instead of keeping its activations.

The parameters are passed to torch's `checkpoint` as arguments, because it saves its arguments through the surrounding
saved-tensor hooks. These are the hooks of `packing`, which save a position instead of a gathered parameter.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", for selective recomputation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from zero.engine.model import call_with
from zero.platform.modes import unobserved

UNCOUNTED_NUMEL = 65_536
"""Buffers of at most this many elements are assumed to change in every forward.

torch's batch norm changes its running statistics, one element per channel, without incrementing their version.
"""

NOT_SELECTIVE = (
    "zero.activations=selective: results that are kept serve one backward, and may not be changed in place. Use remat "
    "for units with in-place activations, and for graphs with retain_graph or several backwards."
)

aten = torch.ops.aten

# torch 2.14 warns unless told whether results that are kept pass through the hooks, as earlier versions never do
_PLAIN: dict[str, Any] = {"respect_saved_tensors_hooks": False}
_TO_CHECKPOINT = _PLAIN if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}

PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
]
"""Operators whose results selective checkpointing keeps, unless they draw random numbers: matrix products, attention.

All others are computed again, among them convolutions and operators of other libraries.
"""


def policy_of(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether selective checkpointing keeps the result of a call of `operator`."""
    kept = operator in PRODUCTS and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of `operator` draws random numbers.

    With a kept result the recomputation would not advance the generator, so later dropout would draw another mask.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return False  # flex attention has no dropout
    arguments = operator._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values.update(zip(values, args, strict=False))
    values.update(kwargs)
    probabilities = [values[name] for name in ("dropout_p", "p") if name in values]
    return any(probabilities) if probabilities else torch.Tag.nondeterministic_seeded in operator.tags


def recomputed_call(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    args: Any,
    kwargs: Mapping[str, Any],
    call: Callable[..., Any] = call_with,
    *,
    selective: bool = False,
) -> Any:
    """Run `module` with `parameters` in place of its own, and recompute its activations in backward.

    Args:
        call: `call_with`, bound to the module's path for messages.
        selective: keep results as `policy_of` decides.
    """
    names, (tensors, rebuild) = tuple(parameters), _apart(args, kwargs)
    # Forward may change buffers (running statistics). The recomputation must neither read nor repeat these changes, so
    # it gets copies of the buffers as they were before forward.
    with unobserved():
        before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()}
    replaced: dict[str, Tensor] | None = None
    context = copy_context()  # what forward reads of it, the recomputation reads, although others have changed it

    def compute(*values: Tensor) -> Any:
        run = call if replaced is None else partial(context.run, call)
        given = dict(zip(names, values, strict=False))
        try:
            return run(given, module, *rebuild(values[len(names) :]), buffers=replaced)
        except RuntimeError as error:
            if selective and replaced is not None:
                error.add_note(NOT_SELECTIVE)
            raise

    # Parameters are arguments, because `checkpoint` saves arguments through our hooks, which keep only positions.
    contexts = partial(create_selective_checkpoint_contexts, policy_of) if selective else noop_context_fn
    outputs = checkpoint(
        compute, *parameters.values(), *tensors, use_reentrant=False, context_fn=contexts, **_TO_CHECKPOINT
    )
    now = dict(module.named_buffers())
    replaced = {
        name: copy
        for name, (buffer, seen, copy) in before.items()
        if now.get(name) is not buffer or buffer._version != seen or copy.numel() <= UNCOUNTED_NUMEL
    }
    before.clear()
    return outputs


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
