"""The passes of a unit's update over its pages, and the kinds of pages that each reads and writes."""

from functools import cached_property

from zero.core.kept import Kept, Pass
from zero.core.master import Master
from zero.core.optim import MOMENTUM
from zero.engine.model import UnitSpec
from zero.engine.plan.facts import Facts
from zero.store import PageKind


class Passes:
    """The passes of the updates of one rank."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def of(self, unit: UnitSpec) -> tuple[Pass, ...]:
        """Return the passes of a unit's update over its pages: two with whole matrices between, or one."""
        return self._matrix_passes if unit.matrices else (self._pass,)

    def state_kinds(self, now: Pass) -> tuple[str, ...]:
        """Return the kinds of pages that a pass reads and writes; it uses one page of each, with the same number."""
        params = (PageKind.PARAM,) if self.facts.params_offloaded and now.reads_params else ()
        return (*params, *now.kept.dtypes)

    def written_kinds(self, now: Pass) -> tuple[str, ...]:
        """Return the kinds of pages that a pass writes without reading."""
        return (PageKind.PARAM,) if self.facts.params_offloaded and now.updates_params and not now.reads_params else ()

    def read_kinds(self, now: Pass) -> tuple[str, ...]:
        """Return the kinds of pages that a pass only reads."""
        return (PageKind.GRAD,) if self.facts.grads_offloaded and now.reads_grad else ()

    def kinds_of(self, now: Pass) -> tuple[str, ...]:
        """Return the kinds of all pages of a pass."""
        return *self.state_kinds(now), *self.read_kinds(now), *self.written_kinds(now)

    @cached_property
    def kept(self) -> Kept:
        """The dtypes and formats of the master's and of all moments' pages."""
        return self._pass.kept

    @cached_property
    def _pass(self) -> Pass:
        optimizer = self.facts.optimizer
        return Pass(optimizer.update, Kept(self.facts.precision.master, optimizer.forms(optimizer.moments)))

    @cached_property
    def _matrix_passes(self) -> tuple[Pass, Pass]:
        optimizer, rule = self.facts.optimizer, self.facts.optimizer.matrix_rule
        assert rule is not None
        momentum, rest = (optimizer.forms(moments) for moments in ((MOMENTUM,), optimizer.copies))
        return (
            Pass(rule.mix, Kept(Master(), momentum), updates_params=False),
            Pass(rule.descend, Kept(self.facts.precision.master, rest), reads_grad=False, factor=rule.factor),
        )
