"""The exponential moving average of the parameters, beside any optimizer."""

from dataclasses import replace
from functools import partial

from zero.core.groups import check_setting
from zero.core.optim import Transform, check_transform
from zero.core.updates import PageBatch, PageUpdate, average
from zero.errors import ConfigError


def with_ema(transform: Transform, decay: float = 0.999) -> Transform:
    """Add an exponential moving average of the parameters: ema = decay x ema + (1 - decay) x parameter per update.

    The average is a moment named "ema", stored on the tier of the other moments; `full_state_dict(state, "ema")` reads
    it.

    Args:
        transform: an optimizer, from `adamw` or a similar function.
        decay: 0 or more and less than 1.

    Raises:
        ConfigError: `decay` is out of range, or the optimizer has an average already.
    """
    check_setting("ema", decay)
    check_transform(transform, "zero.with_ema")
    if "ema" in transform.copies:
        raise ConfigError("optim.ema: this optimizer has an average already. Call zero.with_ema once.")
    return replace(
        transform,
        moments=(*transform.moments, "ema"),
        copies=(*transform.copies, "ema"),
        update=partial(_update, transform.update, decay),
        matrix_rule=transform.matrix_rule and transform.matrix_rule.averaged(decay),
        fused=transform.fused and transform.fused._replace(average=decay),
        constants=(*transform.constants, decay),
    )


def _update(update: PageUpdate, decay: float, batch: PageBatch) -> None:
    *moments, means = batch.moments
    update(batch._replace(moments=tuple(moments)))
    average(decay, means, batch.params)
