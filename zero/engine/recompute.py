"""Run a module now and once more in backward, instead of keeping its activations (remat).

The parameters go into torch's checkpoint as arguments, and a checkpoint keeps its arguments through the saved-tensor
hooks around it. Those are the gatherer's, so a gathered parameter is not kept but found again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero.engine.takeover import call_with

UNCOUNTED_NUMEL = 65_536
"""torch's batch norm changes running statistics without counting it in their version. They have one element per
channel, so a buffer of at most this many elements is taken as changed."""


def recomputed_call(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    args: Any,
    kwargs: Mapping[str, Any],
    call: Callable[..., Any] = call_with,
) -> Any:
    """Run `module` with `parameters` in place of its own, its activations not kept.

    Args:
        call: `call_with`, bound to where the module is.
    """
    names, (tensors, rebuild) = tuple(parameters), _apart(args, kwargs)
    # What forward changes (running statistics) is put back for the recomputation, which must neither see the change
    # nor repeat it: it works on copies of what forward saw.
    before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()}
    replaced: dict[str, Tensor] | None = None

    def compute(*values: Tensor) -> Any:
        return call(dict(zip(names, values, strict=False)), module, *rebuild(values[len(names) :]), buffers=replaced)

    # The parameters go in as arguments: a checkpoint keeps its arguments through our hooks, and so not at all.
    outputs = checkpoint(compute, *parameters.values(), *tensors, use_reentrant=False)
    now = dict(module.named_buffers())
    replaced = {
        name: copy
        for name, (buffer, seen, copy) in before.items()
        if now.get(name) is not buffer or buffer._version != seen or copy.numel() <= UNCOUNTED_NUMEL
    }
    before.clear()
    return outputs


def _apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The distinct tensors among the arguments, and a function from others in their places to (args, kwargs).

    A tensor given twice is one tensor then too: attention asks whether `query is key`.
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
