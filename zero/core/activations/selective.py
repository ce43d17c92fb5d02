"""selective: keep the results of matrix products and of attention, and compute all others again.

Operators have their printed names here, because settings are read before torch is imported.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from zero.core.activations.policy import ActivationPolicy

NO_SCHEMA = "flex_attention"
"""Attention as an operator of higher order, which has no schema and no dropout."""

PRODUCTS = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten._grouped_mm.default",
        "aten._scaled_mm.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        NO_SCHEMA,
    }
)
"""Operators whose results are kept: matrix products, and attention where it draws no random numbers for dropout.

All others are computed again, among them convolutions and operators of other libraries.
"""


def keeps(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result of a call of `operator` is kept.

    With a kept result of dropout the recomputation would not advance the generator, so later dropout would draw another
    mask.
    """
    if not _is_product(operator):
        return False
    values = {**dict(zip(_arguments(operator), args, strict=False)), **kwargs}
    return not values.get("dropout_p")


@cache  # printing a name takes longer than looking up the operator
def _is_product(operator: Any) -> bool:
    return str(operator) in PRODUCTS


@cache
def _arguments(operator: Any) -> list[str]:
    """Return the names of an operator's arguments; none for `NO_SCHEMA`."""
    return [] if str(operator) == NO_SCHEMA else [argument.name for argument in operator._schema.arguments]


SELECTIVE = ActivationPolicy(
    "selective",
    "computed again, except results of matrix products and of attention without dropout",
    recomputes=True,
    keeps=keeps,
    not_compiled="does not see products in compiled code",
)
