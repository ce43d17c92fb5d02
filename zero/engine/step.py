"""One training step: run the microbatches; skip the update if a gradient is not finite, else clip and defer it.

`make_step` is a loop over `Step` that calls a loss function; `Step` is the same in pieces, for a loop of one's own. A
microbatch is whatever lies between `microbatch()` and the next one: any number of forwards and backwards, whoever
calls backward.

Source: Rajbhandari et al. 2020, "ZeRO"; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from zero.core.optim import Hyper
from zero.engine.arguments import (
    check_function,
    check_loss,
    check_loss_fn,
    check_microbatches,
    check_plan,
    check_state,
    loss_and_aux,
    numbers_by_name,
)
from zero.engine.plan import Plan
from zero.engine.state import Runtime, State
from zero.engine.totals import GradientStatus, check_gradients, gather_totals
from zero.errors import ConfigError, PlanError, if_it_fails
from zero.platform.timeline import Timeline

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


class Metrics(NamedTuple):
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Of the mean gradient, before clipping; infinite or NaN when the step was skipped."""
    lr: float
    """Learning rate of the default group."""
    loss_scale: float
    """That this step ran with; 1 unless in fp16."""
    skipped: bool
    """Nothing was updated, because a gradient was not finite."""
    nonfinite_unit: str | None
    """The first unit with a gradient that is not finite."""
    aux: Mapping[str, float]
    """Means over the global batch of what `loss_fn` returned beside the loss."""
    rank_flags: tuple[float, ...]
    """By rank: what its `flag` was."""

    @property
    def words(self) -> tuple[float, ...]:
        """The name of `rank_flags` in 0.1."""
        _warn_renamed("Metrics.words", "Metrics.rank_flags")
        return self.rank_flags

    @property
    def blame(self) -> str | None:
        """The name of `nonfinite_unit` in 0.1."""
        _warn_renamed("Metrics.blame", "Metrics.nonfinite_unit")
        return self.nonfinite_unit


def _by_one_thread(
    method: Callable[Concatenate["Step", Arguments], Result],
) -> Callable[Concatenate["Step", Arguments], Result]:
    """Raise ConfigError if another thread uses the state now."""

    @functools.wraps(method)
    def guarded(step: "Step", *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with step._runtime.gatherer.use:
            return method(step, *args, **kwargs)

    return guarded


class Step:
    """A step from `state` to the next one.

        step = zero.Step(state)
        for batch in microbatches:
            step.microbatch()
            loss = loss_fn(state.model, batch)
            step.backward(loss)
        state, metrics = step.finish()

    `state` is good until `finish` returns the next one; after an exception call `abandon`, which forgets the gradients,
    and begin another step. Buffers such as running statistics have seen the microbatches then.

    Args:
        state: that the step begins from.

    Attributes:
        microbatches: that have begun.

    Raises:
        StaleStateError: `state` is spent.
        PlanError: the model has nothing to train.
    """

    def __init__(self, state: State) -> None:
        check_state(state, "zero.Step", "step = zero.Step(state)")
        self.state, self._runtime, self._plan = state, state.runtime, state.plan
        if not self._plan.trains:
            raise PlanError("the model has no trainable parameter, so there is no step; run it with zero.make_forward")
        self.microbatches = 0
        self._in_microbatch = self._dropped = self._went_back = False
        self._losses: list[list[Tensor]] = []
        self._aux: dict[str, list[Tensor]] = {}
        self._originals = [(one, one.grad, _version(one.grad)) for one in self._runtime.originals.values()]
        _clear(self._runtime)
        if self._runtime.reducer.is_busy:  # a backward that belonged to no step
            self._runtime.reducer.reset()
        self._runtime.reducer.clear()
        self._runtime.updater.begin()
        self._runtime.tape.passed("before the step")

    @_by_one_thread
    def microbatch(self) -> None:
        """Begin the next microbatch; `plan.accumulate` of them make a step."""
        self.read_groups()  # first: what it refuses has not begun
        self._end_microbatch()
        self.microbatches += 1
        self._in_microbatch = True
        self._losses.append([])
        self._runtime.gatherer.begin()
        self._runtime.reducer.begin(last=self.microbatches == self._plan.accumulate)
        self._at("forward")

    def read_groups(self) -> None:
        """In the forwards from here on each group of the optimizer trains or not as its settings say now."""
        groups = self._hyper().groups
        self._runtime.updater.train(groups)
        self._runtime.gatherer.frozen_groups = frozenset(number for number, one in enumerate(groups) if not one.trains)

    @_by_one_thread
    def backward(self, loss: Tensor, aux: Mapping[str, Any] | None = None, **how: Any) -> None:
        """Backward from a scalar, the mean over its rows; several losses of a microbatch add up.

        Args:
            loss: 0-dim, or one element.
            aux: scalars to be averaged over microbatches and ranks beside the loss, by name.
            how: for `Tensor.backward`, such as `retain_graph`.

        Raises:
            ConfigError: `loss` is not a scalar tensor, a value of `aux` is not one number, or no microbatch has begun.
        """
        check_loss(loss, "step.backward({})")
        self._check_begun()
        numbers_by_name(aux or {})  # refused before backward; what backward writes into them is read after it
        if self._plan.params_offloaded:  # host memory is what is short: forward's temporaries, then backward's
            self._plan.world.compute.give_back_memory()
        self._runtime.tape.passed("forward")
        self._at("backward")
        self._went_back = True
        self.scaled(loss).backward(**how)
        self._runtime.tape.passed("backward")
        self.count(loss, aux)

    def scaled(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """What to call `backward` on instead of `loss`: fp16's loss scale is in it.

        Args:
            loss: a scalar, or with `already` any output.
            already: the scale is in `loss`, or in the gradient that its backward will be given.
        """
        scale = self.state.scale.scale
        if scale == 1.0:
            return loss
        scaled = loss.view_as(loss) if already else loss * scale
        if scaled.requires_grad:
            scaled.register_hook(self._runtime.gatherer.scaled)
        return scaled

    @property
    def has_gradients(self) -> bool:
        """A gradient has arrived in this step."""
        return self._runtime.gatherer.arrived

    @property
    def has_loss(self) -> bool:
        """A loss of this step has been counted."""
        return any(self._losses)

    def count(self, loss: Tensor, aux: Mapping[str, Any] | None = None) -> None:
        """Add a loss to the step's mean without a backward: somebody else calls it.

        Args:
            loss: a scalar, without the loss scale.
            aux: as of `backward`.

        Raises:
            ConfigError: a value of `aux` is not one number, or no microbatch has begun.
        """
        self._check_begun()
        numbers = numbers_by_name(aux or {})
        self._losses[-1].append(loss.detach().double())
        for name, number in numbers.items():
            self._aux.setdefault(name, []).append(number.double())

    @_by_one_thread
    def forget(self) -> None:
        """Drop the gradients that have arrived in this step; forwards under way may still go backward."""
        self._dropped = self._dropped or self._runtime.gatherer.arrived
        self._runtime.reducer.forget()
        self._runtime.updater.sums.clear()
        self._losses, self._aux = [[] for _ in self._losses], {}
        _clear(self._runtime)

    def abandon(self) -> None:
        """After an exception: forget everything that this step did. Not collective."""
        self._runtime.drain_store()
        self._plan.world.compute.join()  # what is under way aside must not write into memory that is given out again
        self._runtime.gatherer.reset()
        self._runtime.reducer.reset()
        self._runtime.updater.sums.clear()

    @_by_one_thread
    def finish(self, flag: float = 0.0, *, word: float | None = None) -> tuple[State, Metrics]:
        """End the step: every unit's update is deferred to its next gather, or the step is skipped. Collective.

        Gradients are divided by `plan.accumulate`, however many microbatches there were, and so are their losses.

        Args:
            flag: a number that every rank gets to know.
            word: the name of `flag` in 0.1.

        Returns:
            The next state, and what the step did. `self.state` is spent.

        Raises:
            ConfigError: no gradient has arrived on any rank, or in fp16 one without the loss scale; or one arrived at
                the model that was given; or the model gained, lost or exchanged a parameter.
            WorldError: the ranks visited different units.
        """
        if word is not None:
            _warn_renamed("Step.finish(word)", "Step.finish(flag)")
            flag = word
        plan, state, runtime = self._plan, self.state, self._runtime
        runtime.tree.check()  # not before: a forward may be inside torch.func.functional_call
        self._end_microbatch()
        hyper = self._hyper()
        self._at("norm")
        runtime.reducer.finish()
        runtime.log.note(repr(hyper))
        losses = [torch.stack(one).sum() for one in self._losses if one]
        totals = gather_totals(runtime, losses, self._aux, flag, self._gradient_status())
        runtime.tape.passed("norm")
        check_gradients(totals.statuses, went_back=self._went_back)
        norm = totals.norm(hyper.divisor)
        finite = math.isfinite(norm)
        metrics = Metrics(
            totals.loss,
            norm,
            hyper.lr,
            state.scale.scale,
            not finite,
            totals.nonfinite_unit,
            totals.aux,
            totals.rank_flags,
        )
        following = state.advance(scale=plan.precision.scale.advance(state.scale, finite), finite=finite)
        if finite:
            _defer_updates(runtime, hyper._replace(divisor=hyper.divisor / _clip(plan.optimizer.clip, norm)))
        return following, metrics

    def _check_begun(self) -> None:
        if not self.microbatches:
            raise ConfigError("no microbatch of this step has begun. Call step.microbatch() before the forward.")

    def _end_microbatch(self) -> None:
        if self._in_microbatch:
            self._in_microbatch = False
            self._runtime.gatherer.end()
            if self._plan.params_offloaded:
                self._plan.world.compute.give_back_memory()

    def _gradient_status(self) -> GradientStatus:
        gatherer = self._runtime.gatherer
        if any(one.grad is not grad or _version(one.grad) != version for one, grad, version in self._originals):
            return GradientStatus.AT_ORIGINAL
        if gatherer.unscaled and self.state.scale.scale != 1.0:
            return GradientStatus.UNSCALED
        return GradientStatus.ARRIVED if gatherer.arrived or self._dropped else GradientStatus.NONE

    def _hyper(self) -> Hyper:
        state, plan = self.state, self._plan
        return plan.optimizer.hyper_at(state.step + 1, plan.world.size * plan.accumulate * state.scale.scale)

    def _at(self, phase: str) -> None:
        self._plan.world.at(f"step {self.state.tried + 1}, {phase}")


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _clear(runtime: Runtime) -> None:
    """Forget the last step's sums and gradients; a deferred update has its own claim on the latter."""
    runtime.log.clear()
    runtime.gatherer.clear()
    for unit in runtime.units:
        unit.filled = False


def _clip(limit: float | None, norm: float) -> float:
    """What the gradient is multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def _defer_updates(runtime: Runtime, hyper: Hyper) -> None:
    """Give every unit this step's update to make before its next gather, or make it now.

    Nothing has waited yet for the last update of a unit that this step skipped. That update reads numbers which go with
    it, and the gather after it reads the shard.
    """
    runtime.gatherer.residency.land()
    for unit in runtime.units:
        unit.await_grad_readers()
    hyper = runtime.updater.decide(hyper)
    for unit in runtime.units:
        if not unit.spec.trainable.slots:
            continue
        if not unit.filled:  # not visited: the last update may still be deferred, and this one has no gradient
            runtime.updater.apply(unit)
            runtime.gradients.open(unit, fresh=True).zero_()
            runtime.gradients.park(unit)
        runtime.updater.schedule_update(unit, hyper)
    if runtime.plan.update == "serial":
        for unit in runtime.units:
            runtime.updater.apply(unit)
        runtime.store.drain()
        runtime.rest()


def make_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    flag: Callable[[], float] = lambda: 0.0,
    word: Callable[[], float] | None = None,
) -> Callable[[State, Sequence[Any]], tuple[State, Metrics]]:
    """Make the training step: `state, metrics = step(state, microbatches)`.

    The step takes `plan.accumulate` microbatches of this rank and returns the next state; the old one is spent. If it
    raises, the old state is still good, except that buffers such as running statistics have seen the microbatches.

    Args:
        plan: that the states are made from.
        loss_fn: (model, microbatch) to a scalar loss, the mean over the microbatch, or to (loss, dict of scalars). The
            model is the plan's copy; call it as the original.
        flag: called once a step for a number that every rank gets to know, so that all act on it after the same step;
            they are `Metrics.rank_flags`.
        word: the name of `flag` in 0.1.

    Raises:
        ConfigError: what was given is no plan, or no function of a model and a microbatch. By the step, as all that
            follow: a state of another plan, another number of microbatches than `plan.accumulate`, a loss that is no
            scalar, or no gradient. Or what was given is no state, or no list of microbatches.
        StaleStateError: the state is spent.
        WorldError: the ranks visited different units.
    """
    if word is not None:
        _warn_renamed("make_step(word=...)", "make_step(flag=...)")
        flag = word

    check_plan(plan, "zero.make_step", "step = zero.make_step(plan, loss_fn)")
    check_function(loss_fn, "loss_fn", "step = zero.make_step(plan, loss_fn)")
    check_loss_fn(loss_fn)

    def step(state: State, microbatches: Sequence[Any] = ()) -> tuple[State, Metrics]:
        check_state(state, "a step", "state, metrics = step(state, [batch])")
        _same_plan(plan, state)
        check_microbatches(microbatches, plan.accumulate)
        with state.runtime.gatherer.use:
            under_way = Step(state)
            with if_it_fails(under_way.abandon):
                for microbatch in microbatches:
                    under_way.microbatch()
                    under_way.backward(*loss_and_aux(loss_fn(state.model, microbatch)))
                return under_way.finish(flag())

    return step


def make_forward(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make an evaluation: `forward(state, *args)` is `fn(model, *args)` in eval mode without gradients.

    Deferred updates are made first, so what is seen is the state's own step. Every rank must call it the same number
    of times.

    Args:
        plan: that the states are made from.
        fn: (model, further arguments) to anything.

    Raises:
        ConfigError: what was given is no plan, or no function; and by `forward`, a state of another plan.
        StaleStateError: by `forward`: the state is spent.
    """

    check_plan(plan, "zero.make_forward", "forward = zero.make_forward(plan, fn)")
    check_function(fn, "fn", "forward = zero.make_forward(plan, fn)")

    def forward(state: State, *args: Any, **kwargs: Any) -> Any:
        check_state(state, "a forward", "forward(state, batch)")
        _same_plan(plan, state)
        model = state.model
        with state.runtime.gatherer.use:
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
            try:
                with torch.no_grad():
                    state.runtime.gatherer.begin()
                    return fn(model, *args, **kwargs)
            finally:
                for module, training in modes:
                    module.training = training

    return forward


@contextmanager
def record(state: State, *, profile: bool = False) -> Iterator[Timeline]:
    """Record when this rank does what, from here to the end of the block.

        with zero.record(state) as timeline:
            state, metrics = step(state, microbatches)
        print(timeline.hidden()["page in"])
        timeline.write(folder / "trace.json")

    The timeline is empty until the block ends. Not collective: one rank may record alone, and gets the same bits. What
    was under way already when the block began is not seen, and what still is when it ends is cut off there; with
    `zero.update=lazy` the updates seen are mostly those that the step before has decided. On a GPU starting and ending
    wait for the device, and steps do not.

    Args:
        state: whose run is recorded.
        profile: also mark everything as ranges of torch.profiler ("gather blocks.3"), for a profile made meanwhile.
            Those of the store's threads are in it if the profiler looks at all threads.

    Raises:
        StaleStateError: the state is spent, or its run is being recorded already.
    """
    check_state(state, "zero.record", "with zero.record(state) as timeline:")
    with state.runtime.tape.record(profile=profile) as timeline:
        yield timeline


def _same_plan(plan: Plan, state: State) -> None:
    if state.plan is not plan:
        raise ConfigError("this State was made by zero.init from another Plan; make the step from state.plan")


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)
