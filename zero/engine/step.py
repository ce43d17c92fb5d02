"""One training step: run the microbatches, then skip the update if a gradient is not finite, else clip and defer it.

`make_step` wraps a loss function into a step. `Step` is the same in pieces, for custom training loops. A microbatch is
everything between one call of `Step.microbatch` and the next: any number of forwards and backwards.

Source: Rajbhandari et al. 2020, "ZeRO"; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core import checks
from zero.core.optim import Hyper
from zero.engine.arguments import (
    check_function,
    check_loss,
    check_loss_fn,
    check_microbatches,
    check_type,
    loss_and_aux,
    numbers_by_name,
    type_text,
)
from zero.engine.plan import Plan
from zero.engine.replay import Replay, check_replay
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.totals import GradientStatus, Totals, check_gradients, first_nonfinite_unit, gather_totals, over_groups
from zero.errors import ConfigError, OutsideUnitError, PlanError, StoreError, if_it_fails
from zero.platform.modes import unobserved
from zero.platform.timeline import Timeline
from zero.store import PrefetchStore

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


class Metrics(NamedTuple):
    """The results of one step, the same on every rank."""

    loss: float
    """The mean loss over the global batch."""
    grad_norm: float
    """The L2 norm of the mean gradient before clipping; infinite or NaN if the step was skipped."""
    lr: float
    """The learning rate of the default parameter group."""
    loss_scale: float
    """The loss scale of this step; 1 unless the precision is fp16."""
    skipped: bool
    """Whether the update was skipped because a gradient was infinite or NaN."""
    nonfinite_unit: str | None
    """The name of the first unit with an infinite or NaN gradient; None if there is none."""
    aux: Mapping[str, float]
    """The means over the global batch of the further numbers that `loss_fn` returned with the loss, by name."""
    rank_flags: tuple[float, ...]
    """Each rank's `flag`, see `make_step`, by rank; with norm groups by the rank there and then by the world's rank."""


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
        self.microbatches = 0
        self._in_microbatch = self._dropped = self._went_back = False
        self._losses: list[list[Tensor]] = []
        self._aux: dict[str, list[Tensor]] = {}
        self._runtime.log.clear()
        self._runtime.backward.clear()
        with unobserved():
            self._runtime.reducer.begin_step()
            self._runtime.updater.begin()
        self._runtime.tape.passed("before the step")

    def microbatch(self) -> None:
        """Begin the next microbatch; a step normally has `plan.accumulate` of them."""
        with self._runtime.sites.use:
            self.read_groups()  # first: it may raise, and then no microbatch has begun
            self._end_microbatch()
            self.microbatches += 1
            self._in_microbatch = True
            self._losses.append([])
            self._runtime.sites.begin()
            with unobserved():
                self._runtime.reducer.begin_microbatch(last=self.microbatches == self._plan.accumulate)
            self._at("forward")

    def read_groups(self) -> None:
        """Read from the optimizer which parameter groups train in the next forwards."""
        groups = self._hyper().groups
        self._runtime.updater.numbers.train(groups)
        self._runtime.sites.frozen_groups = frozenset(n for n, group in enumerate(groups) if not group.trains)

    def backward(self, loss: Tensor, aux: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        """Run backward from a loss, with the loss scale in fp16; several losses of a microbatch add up.

        Args:
            loss: a tensor with one element, the mean over the microbatch.
            aux: further numbers by name, which are averaged over microbatches and ranks like the loss.
            keywords: arguments of `Tensor.backward`, such as `retain_graph`.

        Raises:
            ConfigError: `loss` is not a scalar tensor, a value of `aux` is not one number, or no microbatch has begun.
        """
        with self._runtime.sites.use:
            check_loss(loss, "step.backward({})")
            self._check_begun()
            numbers_by_name(aux or {})  # checked before backward, and read after it: backward may write into them
            if self._plan.facts.params_offloaded:  # host memory is scarce: free forward's temporaries
                self._plan.world.compute.give_back_memory()
            self._runtime.tape.passed("forward")
            self._at("backward")
            self._went_back = True
            with _explaining_meta():
                self.scaled(loss).backward(**keywords)
            self._runtime.tape.passed("backward")
            self.count(loss, aux)

    def scaled(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """Return `loss` times the loss scale of fp16, from which the caller runs `backward`.

        Args:
            loss: a scalar, or with `already` any output of the model.
            already: do not multiply, because `loss`, or the gradient that is passed to its `backward`, is scaled.
        """
        scale = self.state.scale.scale
        if scale == 1.0:
            return loss
        scaled = loss.view_as(loss) if already else loss * scale
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
        return any(self._losses)

    def count(self, loss: Tensor, aux: Mapping[str, Any] | None = None) -> None:
        """Add a loss to the step's mean loss, if the caller runs backward itself.

        Args:
            loss: a scalar, without the loss scale.
            aux: as in `backward`.

        Raises:
            ConfigError: a value of `aux` is not one number, or no microbatch has begun.
        """
        self._check_begun()
        numbers = numbers_by_name(aux or {})
        with unobserved():
            self._losses[-1].append(loss.detach().double())
            for name, number in numbers.items():
                self._aux.setdefault(name, []).append(number.double())

    @unobserved()
    def forget(self) -> None:
        """Drop the gradients and losses of this step so far. Collective.

        Forwards that have run may still be followed by their backward.
        """
        with self._runtime.sites.use:
            self._dropped = self._dropped or self._runtime.backward.arrived
            self._runtime.reducer.forget()
            self._losses, self._aux = [[] for _ in self._losses], {}
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
            return self._decided(self._totals(flag))

    @unobserved()
    def _totals(self, flag: float) -> Totals:
        """End the last microbatch, and return the sums over all ranks; gradients are final then. Collective."""
        runtime = self._runtime
        runtime.tree.check()  # only here, because a forward may run inside torch.func.functional_call
        self._end_microbatch()
        self._at("norm")
        flag = float(checks.number("the flag of a step", flag, lambda number: True, "a number"))
        totals = self._reduce(self._hyper(), flag)
        runtime.tape.passed("norm")
        check_gradients(totals.statuses, went_back=self._went_back)
        return totals

    @unobserved()
    def _decided(self, totals: Totals, replay: Replay | None = None) -> tuple[State, Metrics]:
        """Defer each unit's update, or skip it if a gradient is not finite; `replay` updates each unit twice, now."""
        plan, state, runtime, hyper = self._plan, self.state, self._runtime, self._hyper()
        norm = totals.norm(hyper.divisor)
        finite = math.isfinite(norm)
        metrics = Metrics(
            loss=totals.loss,
            grad_norm=norm,
            lr=hyper.lr,
            loss_scale=state.scale.scale,
            skipped=not finite,
            nonfinite_unit=None if finite else first_nonfinite_unit(runtime),
            aux=totals.aux,
            rank_flags=totals.rank_flags,
        )
        following = state.advance(scale=plan.precision.scale.advance(state.scale, finite), finite=finite)
        if finite:
            _defer_updates(runtime, hyper._replace(divisor=hyper.divisor / _clip(plan.optimizer.clip, norm)), replay)
        return following, metrics

    def _reduce(self, hyper: Hyper, flag: float) -> Totals:
        """Sum gradients over ranks and exchange losses and norms; repeat both if any rank has an extra flat."""
        runtime, reducer = self._runtime, self._runtime.reducer
        reducer.finish()
        runtime.log.note(repr((hyper, sorted(self._aux))))
        losses = [torch.stack(losses).sum() for losses in self._losses if losses]
        exchange = partial(gather_totals, runtime, losses, self._aux, flag, self._gradient_status())
        totals = exchange()
        if totals.any_extra:
            reducer.finish_extra()
            totals = exchange()
        if totals.one_order:
            reducer.rounds.adopt_order()
        return over_groups(self._plan.beside.groups, totals)

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

    def _hyper(self) -> Hyper:
        state, plan = self.state, self._plan
        return plan.optimizer.hyper_at(state.step + 1, plan.world.size * plan.accumulate * state.scale.scale)

    def _at(self, phase: str) -> None:
        self._plan.world.at(f"step {self.state.tried + 1}, {phase}")


def _drain(store: PrefetchStore) -> None:
    with suppress(StoreError):  # the caller raises the error of a broken store
        store.drain()


def _clip(limit: float | None, norm: float) -> float:
    """Return the factor that clips the gradient, computed as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def _defer_updates(runtime: Runtime, hyper: Hyper, replay: Replay | None) -> None:
    """Schedule this step's update of every unit for before its next gather; with update="serial" apply it now.

    First wait for the last updates and gathers of units that this step did not use, because nothing else has waited for
    them: these updates read numbers that `Updater.decide` frees, and the gathers read shards that this update writes.
    """
    runtime.await_copies()
    runtime.residency.gathers.land()
    for unit in runtime.units:
        unit.await_grad_readers()
    hyper = runtime.updater.numbers.decide(hyper)
    for unit in runtime.units:
        if not unit.spec.trainable.slots:
            continue
        if not unit.step.filled:  # unused in this step: its last update may still be deferred, and its gradient is zero
            runtime.updater.apply_deferred(unit)
            runtime.gradients.open(unit, fresh=True).zero_()
            runtime.gradients.park(unit)
        if replay is None:
            runtime.updater.schedule_update(unit, hyper)
        else:
            replay.update(unit, hyper)
    if replay is not None:
        replay.end()
    elif runtime.plan.update == "serial":
        runtime.finish_step()


def _made_twice(state: State, run: Callable[[Step], None], flag: Callable[[], float]) -> tuple[State, Metrics]:
    """Make one step twice and compare the two, see `zero.engine.replay`; return the state and metrics of the second.

    Args:
        run: runs the microbatches of a step.
        flag: as in `make_step`, called once.
    """
    replay = Replay(state.runtime, state.tried + 1)
    for again in (False, True):
        step = Step(state)
        with if_it_fails(step.abandon), replay.watched():
            run(step)
            totals = step._totals(flag() if again else 0.0)
    with if_it_fails(state.spend):  # it may have wrong bits, so it must not be saved
        replay.compare()
    with if_it_fails(step.abandon):
        return step._decided(totals, replay)


def make_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    flag: Callable[[], float] = lambda: 0.0,
    replay: int = 0,
) -> Callable[[State, Sequence[Any]], tuple[State, Metrics]]:
    """Return the training step as a function: `state, metrics = step(state, microbatches)`.

    The step takes a list of `plan.accumulate` microbatches of this rank and returns the next state; the old one is
    spent. If the step raises, the old state is still valid, unless a step that was made twice differed; buffers such as
    running statistics may have changed.

    Args:
        plan: the plan that the states are made from.
        loss_fn: a function of (model, microbatch) that returns a scalar loss, the mean over the microbatch, or (loss,
            dict of scalars). The model is the plan's.
        flag: a function that is called once per step and returns a number. Every rank gets all ranks' numbers in
            `Metrics.rank_flags`, so that all ranks can react to a flag after the same step.
        replay: make every step twice whose number is a multiple of this one, and compare the two to the bit; 0: none.
            `loss_fn` must depend on the model, the microbatch and the random generators of torch and Python alone. A
            GPU needs `torch.use_deterministic_algorithms(True)`. These steps take 2.7 to 2.9 times as long.

    Raises:
        ConfigError: `plan` is not a Plan, `loss_fn` not a function of a model and a microbatch, `replay` not a number
            of steps, or a GPU is not deterministic with `replay`. By the step: the state is not of this plan,
            `microbatches` is not a list of `plan.accumulate` microbatches, the loss is not a scalar, or no gradient
            has arrived.
        MachineError: by the step, if a step that was made twice differs; no state can be used then.
        StaleStateError: by the step, if the state is spent.
        WorldError: by the step, if the ranks ran different units, or in another order.
    """
    check_type(plan, Plan, "zero.make_step", "step = zero.make_step(plan, loss_fn)")
    check_function(loss_fn, "loss_fn", "step = zero.make_step(plan, loss_fn)")
    check_loss_fn(loss_fn)
    if not callable(flag):
        raise ConfigError(f"flag is {type_text(flag)}. Pass a function that returns a number.")
    check_replay(replay, plan.world)

    def run(microbatches: Sequence[Any], under_way: Step) -> None:
        for microbatch in microbatches:
            under_way.microbatch()
            under_way.backward(*loss_and_aux(loss_fn(plan.model, microbatch)))

    def step(state: State, microbatches: Sequence[Any] = ()) -> tuple[State, Metrics]:
        check_type(state, State, "a step", "state, metrics = step(state, [batch])")
        _same_plan(plan, state)
        check_microbatches(microbatches, plan.accumulate)
        with state.runtime.sites.use:
            if replay and (state.tried + 1) % replay == 0:
                return _made_twice(state, partial(run, microbatches), flag)
            under_way = Step(state)
            with if_it_fails(under_way.abandon):
                run(microbatches, under_way)
                return under_way.finish(flag())

    return step


def make_forward(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an evaluation function: `forward(state, *args)` calls `fn(model, *args)` in eval mode without gradients.

    Each unit's deferred update is applied before the unit is used, so the parameters are those of the state's step.
    Every rank must call `forward` the same number of times.

    Args:
        plan: the plan that the states are made from.
        fn: a function of (model, further arguments). `forward` returns its result, which is this rank's own: a loss is
            the mean over this rank's rows. `world.all_reduce` adds up results of all ranks.

    Raises:
        ConfigError: `plan` is not a Plan, or `fn` not a function. By `forward`, if the state is of another plan.
        StaleStateError: by `forward`, if the state is spent.
    """
    check_type(plan, Plan, "zero.make_forward", "forward = zero.make_forward(plan, fn)")
    check_function(fn, "fn", "forward = zero.make_forward(plan, fn)")

    def forward(state: State, *args: Any, **kwargs: Any) -> Any:
        check_type(state, State, "a forward", "forward(state, batch)")
        _same_plan(plan, state)
        model = state.model
        runtime = state.runtime
        with runtime.sites.use:
            modes = [(module, module.training) for module in model.modules()]
            try:
                model.eval()
                with torch.no_grad(), if_it_fails(runtime.residency.reset):
                    runtime.sites.begin()
                    return fn(model, *args, **kwargs)
            finally:
                for module, training in modes:
                    module.training = training

    return forward


@contextmanager
def _explaining_meta() -> Iterator[None]:
    """Raise OutsideUnitError if a user's autograd function has got a parameter on meta, whose gradients torch rejects.

    `Function.apply` does not call `__torch_function__`, so only torch sees the parameter there.
    """
    try:
        yield
    except RuntimeError as error:
        match = re.match(r"Function (\w+?)Backward returned an invalid gradient .*expected device meta", str(error))
        if match is None:
            raise
        raise OutsideUnitError(
            f"{match[1]}.apply(weight): the weight is of another unit and was made by zero.empty(), so it takes no "
            "gradient here. Pass weight[:]."
        ) from error


@contextmanager
def record(state: State, *, profile: bool = False) -> Iterator[Timeline]:
    """Context manager that records a timeline of this rank's work: compute, collectives, copies and updates.

        with zero.record(state) as timeline:
            state, metrics = step(state, microbatches)
        print(timeline.hidden()["page in"])
        timeline.write(folder / "trace.json")

    The timeline is empty until the block ends. Not collective: one rank may record alone. Recording changes no bit of
    the results. Work that began before the block is not recorded, and work that ends after the block is cut off at its
    end. With `zero.update=lazy` most recorded updates belong to the step before. On a GPU the block waits for the
    device at its start and end.

    Args:
        state: a state of the run to record.
        profile: also mark the work as ranges of torch.profiler, such as "gather blocks.3", in a profile that the caller
            records. Ranges of the store's threads appear only if the profiler records all threads.

    Raises:
        StaleStateError: the state is spent, or its run is already being recorded.
    """
    check_type(state, State, "zero.record", "with zero.record(state) as timeline:")
    with state.runtime.tape.record(profile=profile) as timeline:
        yield timeline


def _same_plan(plan: Plan, state: State) -> None:
    if state.plan is not plan:
        raise ConfigError("this State was made by zero.init from another Plan. Make the step from state.plan.")
