"""One training step: run the microbatches, then skip the update if a gradient is not finite, else clip and defer it.

A microbatch is everything between one call of `Step.microbatch` and the next: any number of forwards and backwards.

Source: Rajbhandari et al. 2020, "ZeRO"; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero.core import checks
from zero.core.optim import Hyper
from zero.core.updates import GroupSettings
from zero.engine.arguments import check_loss, check_type, numbers_by_name
from zero.engine.decide import UpdateNow, decide
from zero.engine.meta import explaining_meta
from zero.engine.metrics import Metrics
from zero.engine.state import State
from zero.engine.step_losses import FP16_DIVISOR, StepLosses, checked_tokens
from zero.engine.totals import (
    Exchanged,
    GradientStatus,
    check_gradients,
    exchange_totals,
    over_groups,
)
from zero.errors import ConfigError, PlanError, StoreError
from zero.platform.modes import unobserved
from zero.store import PrefetchStore


class Step:
    """A training step in pieces, from `state` to the next state, for custom training loops.

        step = zero.Step(state)
        for batch in microbatches:
            step.microbatch()
            loss = loss_fn(state.model, batch)
            step.backward(loss)
        state, metrics = step.finish()

    `state` stays valid until `finish` returns the next one. After an exception call `abandon`, which drops the
    gradients, and begin another step from `state`. Changes of buffers such as running statistics are not undone.

    Args:
        state: the state that the step begins from.

    Attributes:
        microbatches: the number of microbatches that have begun.
        clip: the largest norm of the mean gradient, by which `finish` clips; None: it does not. At first that of the
            optimizer. The same on all ranks.

    Raises:
        ConfigError: by every method, if another thread uses the state.
        StaleStateError: `state` is spent.
        PlanError: the model has no trainable parameter.
    """

    def __init__(self, state: State) -> None:
        check_type(state, State, "zero.Step", "step = zero.Step(state)")
        self.state, self._runtime, self._plan = state, state.runtime, state.plan
        if not self._plan.facts.trains:
            raise PlanError("the model has no trainable parameter, so there is no step. Run it with zero.make_forward.")
        self.microbatches, self.clip = 0, self._plan.optimizer.clip
        self._in_microbatch = self._dropped = self._went_back = False
        self._losses = self._runtime.losses = StepLosses()
        self._runtime.log.clear()
        self._runtime.backward.clear()
        with unobserved():
            self._runtime.reducer.begin_step()
            self._runtime.updater.begin()
        self._runtime.tape.passed("before the step")

    def microbatch(self) -> None:
        """Begin the next microbatch; a step normally has `plan.accumulate` of them."""
        with self._runtime.sites.use:
            self.read_groups()  # first: if this raises, no microbatch has begun
            self._end_microbatch()
            self.microbatches += 1
            self._in_microbatch = True
            self._losses.begin_microbatch()
            self._runtime.sites.begin()
            with unobserved():
                self._runtime.reducer.begin_microbatch(last=self.microbatches == self._plan.accumulate)
            self._at("forward")

    def read_groups(self) -> None:
        """Read from the optimizer which parameter groups train in the next forwards."""
        groups = self._groups()
        self._runtime.updater.numbers.train(groups)
        self._runtime.sites.frozen_groups = frozenset(n for n, group in enumerate(groups) if not group.trains)

    def backward(
        self,
        loss: Tensor,
        aux: Mapping[str, Any] | None = None,
        count: int | Tensor | None = None,
        **keywords: Any,
    ) -> None:
        """Run backward from a loss, with the loss scale in fp16; several losses of a microbatch add up.

        Args:
            loss: a tensor with one element, the mean over the microbatch; with `count` the sum over its tokens.
            aux: further numbers by name, which are averaged over microbatches and ranks.
            count: the number of tokens in the sum, an int or a 0-dim tensor of integers. The step then divides by the
                tokens of all microbatches and ranks, instead of by the number of microbatches and ranks.
            keywords: arguments of `Tensor.backward`, such as `retain_graph`.

        Raises:
            ConfigError: `loss` is not a scalar tensor, a value of `aux` is not one number, `count` is not a number of
                tokens, or no microbatch has begun.
        """
        with self._runtime.sites.use:
            check_loss(loss, "step.backward({})")
            self._check_begun()
            numbers_by_name(aux or {})  # checked before backward, and read after it: backward may write into them
            tokens = None if count is None else checked_tokens(count)
            if self._plan.facts.params_offloaded:  # host memory is scarce: free forward's temporaries
                self._plan.world.compute.give_back_memory()
            self._runtime.tape.passed("forward")
            self._at("backward")
            self._went_back = True
            with explaining_meta():
                self.scaled(loss, is_sum=tokens is not None).backward(**keywords)
            self._runtime.tape.passed("backward")
            self.count(loss, aux, tokens)

    def scaled(self, loss: Tensor, *, already: bool = False, is_sum: bool = False) -> Tensor:
        """Return `loss` times the loss scale of fp16, from which the caller runs `backward`.

        Args:
            loss: a scalar, or with `already` any output of the model.
            already: do not multiply, because `loss`, or the gradient that is passed to its `backward`, is scaled.
            is_sum: whether it is a sum over tokens, see `zero.engine.step_losses`.
        """
        if self._plan.precision.compute != torch.float16:
            return loss
        loss = loss / FP16_DIVISOR if is_sum else loss
        scaled = loss.view_as(loss) if already else loss * _loss_scale(self.state, loss.dtype)
        if scaled.requires_grad:
            scaled.register_hook(self._runtime.backward.scaled)
        return scaled

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived in this step."""
        return self._runtime.backward.arrived

    @property
    def has_loss(self) -> bool:
        """Whether a loss of this step has been counted."""
        return self._losses.kinds > 0

    def count(self, loss: Tensor, aux: Mapping[str, Any] | None = None, count: int | Tensor | None = None) -> None:
        """Add a loss to the step's mean loss, if the caller runs backward itself.

        Args:
            loss: a scalar, without the loss scale.
            aux, count: as in `backward`.

        Raises:
            ConfigError: a value of `aux` is not one number, `count` is not a number of tokens, or no microbatch has
                begun.
        """
        self._check_begun()
        numbers = numbers_by_name(aux or {})
        with unobserved():
            self._losses.add(loss, numbers, None if count is None else checked_tokens(count))

    @unobserved()
    def forget(self) -> None:
        """Drop the gradients and losses of this step so far. Collective.

        Forwards that have run may still be followed by their backward.
        """
        with self._runtime.sites.use:
            self._dropped = self._dropped or self._runtime.backward.arrived
            self._runtime.reducer.forget()
            self._losses.forget()
            self._runtime.log.clear()
            self._runtime.backward.clear()

    @unobserved()
    def abandon(self) -> None:
        """Drop the gradients of this step and wait for all started work, after an exception. Not collective."""
        runtime = self._runtime
        _drain(runtime.store)
        self._plan.world.compute.join()  # side streams must not write into memory that is allocated again
        runtime.sites.reset()
        runtime.reducer.reset()

    def finish(self, flag: float = 0.0) -> tuple[State, Metrics]:
        """End the step: defer each unit's update to its next gather, or skip the update. Collective.

        Gradients and losses are divided by `plan.accumulate`, even if the number of microbatches was different.

        Args:
            flag: a number of this rank that is sent to every rank, see `Metrics.rank_flags`.

        Returns:
            The next state, and the step's metrics. `self.state` is spent.

        Raises:
            ConfigError: `flag` is not a number; no gradient has arrived on any rank; in fp16 a gradient came from a
                backward without the loss scale; or the model has gained, lost or exchanged a parameter.
            WorldError: the ranks ran different units, or in another order.
        """
        with self._runtime.sites.use:
            exchanged = self.totals(flag, later=self._runtime.decides_on_device)
            state, metrics = self.decided(exchanged)
            pressure = self._runtime.pressure
            return state if pressure is None else pressure.react(state, exchanged.known.shortages), metrics

    @unobserved()
    def totals(self, flag: float, *, later: bool = False) -> Exchanged:
        """End the last microbatch, and exchange the sums over all ranks; gradients are final then. Collective."""
        runtime = self._runtime
        _ = self.state.scale  # the last step's decision, which the device has made long ago
        runtime.tree.check()  # only here, because a forward may run inside torch.func.functional_call
        self._end_microbatch()
        self._at("norm")
        flag = float(checks.number("the flag of a step", flag, lambda number: True, "a number"))
        exchanged = self._reduce(self._hyper(), flag, later)
        runtime.tape.passed("norm")
        check_gradients(exchanged.known.statuses, went_back=self._went_back)
        return exchanged

    def decided(self, exchanged: Exchanged, update: UpdateNow | None = None) -> tuple[State, Metrics]:
        """Return the next state and the metrics, see `decide`."""
        return decide(self.state, self._hyper(), exchanged, self.clip, update)

    def _reduce(self, hyper: Hyper, flag: float, later: bool) -> Exchanged:
        """Sum gradients over ranks and exchange losses and norms; repeat both if any rank has an extra flat."""
        runtime, reducer = self._runtime, self._runtime.reducer
        reducer.finish()
        runtime.log.note(repr((hyper, self.clip, self._losses.names)))
        status, pressure = self._gradient_status(), runtime.pressure
        shortage = 0 if pressure is None else pressure.read(self._plan)
        exchange = partial(exchange_totals, runtime, self._losses, flag, status, shortage, later=later)
        exchanged = exchange()
        if exchanged.known.any_extra:
            reducer.finish_extra()
            exchanged = exchange()
        if exchanged.known.one_order:
            reducer.rounds.adopt_order()
        if groups := self._plan.beside.groups:
            totals = over_groups(groups, exchanged.totals())
            exchanged = exchanged._replace(totals=lambda: totals, known=totals)
        return exchanged

    def _check_begun(self) -> None:
        if not self.microbatches:
            raise ConfigError("no microbatch of this step has begun. Call step.microbatch() before the forward.")

    def _end_microbatch(self) -> None:
        if self._in_microbatch:
            self._in_microbatch = False
            self._runtime.sites.end()
            if self._plan.facts.params_offloaded:
                self._plan.world.compute.give_back_memory()

    def _gradient_status(self) -> GradientStatus:
        backward = self._runtime.backward
        if backward.unscaled and self.state.scale.scale != 1.0:
            return GradientStatus.UNSCALED
        return GradientStatus.ARRIVED if backward.arrived or self._dropped else GradientStatus.NONE

    def _groups(self) -> tuple[GroupSettings, ...]:
        """Return the settings of the next update, of which only `trains` is sure before the last decision is known."""
        first, *others = [self._plan.optimizer.hyper_at(step + 1, 1.0).groups for step, _ in self.state.after.possible]
        trains = [now.trains for now in first]
        return first if all([now.trains for now in groups] == trains for groups in others) else self._hyper().groups

    def _hyper(self) -> Hyper:
        state, plan = self.state, self._plan
        return plan.optimizer.hyper_at(state.step + 1, plan.world.size * plan.accumulate * state.scale.scale)

    def _at(self, phase: str) -> None:
        self._plan.world.at(f"step {self.state.tried + 1}, {phase}")


def _drain(store: PrefetchStore) -> None:
    with suppress(StoreError):  # the caller raises the error of a broken store
        store.drain()


def _loss_scale(state: State, dtype: torch.dtype) -> float | Tensor:
    """Return the loss scale, as a tensor on the device if the host does not know it yet."""
    first, *others = [scale.scale for _, scale in state.after.possible]
    decided = state.runtime.updater.numbers.decided
    if all(other == first for other in others) or decided is None or decided.decision is None:
        return first
    return torch.where(decided.decision.finite, first, others[0]).to(dtype)
