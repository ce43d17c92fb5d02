"""One training step under way: passes over microbatches, one small collective, a decision.

`make_step` is this for a loop that we write; here it is in pieces, for a loop of one's own. A microbatch is whatever
lies between `microbatch()` and the next one: any number of forwards and backwards, whoever calls backward.

Losses and norms are added in rank order, so all ranks know the same bits.

Source: Rajbhandari et al. 2020, "ZeRO"; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import ctypes
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.core.optim import Hyper
from zero.engine.state import Runtime, State
from zero.errors import ConfigError, NonFiniteGradientError, PlanError, WorldError

NOTHING, SOMETHING, UNSCALED, ASTRAY = range(4)
"""What a rank has heard of gradients in a step: some of them came from a backward without the loss scale, or arrived at
the model that was given instead of its copy."""


class Metrics(NamedTuple):
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Of the mean gradient, before clipping; infinite or NaN when the step was skipped."""
    lr: float
    loss_scale: float
    """That this step ran with."""
    skipped: bool
    nonfinite_unit: str | None
    """The first unit with a gradient that is not finite."""
    aux: dict[str, float]
    """Means over the global batch of what `loss_fn` returned beside the loss."""
    words: tuple[float, ...]
    """What `word` said on each rank."""


class Step:
    """A step from `state` to the next one.

        step = zero.Step(state)
        for batch in microbatches:
            step.microbatch()
            loss = loss_fn(state.model, batch)
            step.backward(loss)
        state, metrics = step.finish()

    `state` is good until `finish` returns the next one; after an exception call `abandon`, which forgets the gradients,
    and begin another step. Buffers such as running statistics have seen the microbatches then; and with
    `zero.update=eager` the state is spent if backward has updated a unit.

    Raises:
        StaleStateError: `state` is spent.
        PlanError: the model has nothing to train.
    """

    def __init__(self, state: State) -> None:
        self.state, self._parts, self._plan = state, state.runtime, state.plan
        if not self._plan.trains:
            raise PlanError("the model has no trainable parameter, so there is no step; run it with zero.make_forward")
        self.microbatches = 0
        self._in_microbatch = self._dropped = False
        self._losses: list[list[Tensor]] = []
        self._aux: dict[str, list[Tensor]] = {}
        self._originals = [(one, one.grad, _version(one.grad)) for one in self._parts.originals.values()]
        _clear(self._parts)
        if self._parts.reducer.is_busy:  # a backward that belonged to no step
            self._parts.reducer.reset()
        self._parts.reducer.clear()
        self._parts.updater.begin(self._hyper(), at_once=self._plan.update == "eager")

    def microbatch(self) -> None:
        """The next microbatch begins; `plan.accumulate` of them make a step."""
        self.follow()  # first: what it refuses has not begun
        self._end_microbatch()
        self.microbatches += 1
        self._in_microbatch = True
        self._losses.append([])
        self._parts.gatherer.begin()
        self._parts.reducer.begin(last=self.microbatches == self._plan.accumulate)
        self._at("forward")

    def follow(self) -> None:
        """Groups train or rest, in the forwards from here on, as their settings say now."""
        groups = self._hyper().groups
        self._parts.updater.train(groups)
        self._parts.gatherer.resting = frozenset(number for number, one in enumerate(groups) if not one.trains)

    def backward(self, loss: Tensor, aux: Mapping[str, Any] | None = None, **how: Any) -> None:
        """Backward from a scalar, the mean over its rows; several losses of a microbatch add up.

        Args:
            aux: scalars to be averaged over microbatches and ranks beside the loss.
            how: for `Tensor.backward`, such as `retain_graph`.
        """
        if loss.numel() != 1:
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; it must be a scalar: the mean of the microbatch"
            )
        if self._plan.params_offloaded:  # host memory is what is short: forward's temporaries, then backward's
            self._plan.world.compute.give_back_memory()
        self._parts.tape.passed("forward")
        self._at("backward")
        self.scaled(loss).backward(**how)
        self._parts.tape.passed("backward")
        self.count(loss, aux)

    def scaled(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """What to call `backward` on instead of `loss`: fp16's loss scale is in it.

        Args:
            already: it is in `loss`, or in the gradient that its backward will be given.
        """
        scale = self.state.scale.scale
        if scale == 1.0:
            return loss
        scaled = loss.view_as(loss) if already else loss * scale
        if scaled.requires_grad:
            scaled.register_hook(self._parts.gatherer.scaled)
        return scaled

    @property
    def has_gradients(self) -> bool:
        """A gradient has arrived in this step."""
        return self._parts.gatherer.arrived

    @property
    def has_loss(self) -> bool:
        """Somebody has told a loss of this step."""
        return any(self._losses)

    def count(self, loss: Tensor, aux: Mapping[str, Any] | None = None) -> None:
        """Take a loss into the step's mean without a backward: somebody else has called it."""
        self._losses[-1].append(loss.detach().double())
        for name, value in (aux or {}).items():
            self._aux.setdefault(name, []).append(torch.as_tensor(value).detach().double())

    def forget(self) -> None:
        """Drop the gradients that have arrived in this step; forwards under way may still go backward."""
        self._dropped = self._dropped or self._parts.gatherer.arrived
        self._spend_if_updated()
        self._parts.reducer.forget()
        self._parts.updater.sums.clear()
        self._losses, self._aux = [[] for _ in self._losses], {}
        _clear(self._parts)

    def abandon(self) -> None:
        """After an exception: forget everything that this step did."""
        self._plan.world.compute.join()  # what is under way aside must not write into memory that is given out again
        self._parts.gatherer.reset()
        self._parts.reducer.reset()
        self._spend_if_updated()
        self._parts.updater.sums.clear()

    def _spend_if_updated(self) -> None:
        """Eager updates cannot be taken back."""
        if self._parts.updater.at_once is not None and self._parts.updater.sums and not self.state.spent_:
            self.state.spend()

    def finish(self, word: float = 0.0) -> tuple[State, Metrics]:
        """End the step: every unit waits for its update, or the step is skipped. Collective.

        Gradients are divided by `plan.accumulate`, however many microbatches there were, and so are their losses.

        Args:
            word: a number that every rank gets to know.

        Raises:
            ConfigError: no gradient has arrived on any rank, or in fp16 one without the loss scale; or one arrived at
                the model that was given.
            WorldError: the ranks visited different units.
            NonFiniteGradientError: `zero.update=eager` and a gradient that is not finite.
        """
        plan, state, parts = self._plan, self.state, self._parts
        self._end_microbatch()
        hyper = parts.updater.at_once or self._hyper()
        self._at("norm")
        parts.reducer.finish()
        parts.log.note(repr(hyper))
        told = _tell(parts, [torch.stack(one).sum() for one in self._losses if one], self._aux, word, self._heard())
        parts.tape.passed("norm")
        _refuse_what_was_heard(told.heard)
        norm = told.norm(hyper.divisor)
        finite = math.isfinite(norm)
        metrics = Metrics(
            told.loss, norm, hyper.lr, state.scale.scale, not finite, told.nonfinite_unit, told.aux, told.words
        )
        following = state.advance(scale=plan.precision.scale.advance(state.scale, finite), finite=finite)
        if finite:
            _wait_for_update(parts, hyper._replace(divisor=hyper.divisor / _clip(plan.optimizer.clip, norm)))
        elif plan.update == "eager":
            raise NonFiniteGradientError(
                f"step {hyper.step}: the gradient of {told.nonfinite_unit} is not finite, and zero.update=eager has "
                "updated units already; use zero.update=lazy, which skips such a step"
            )
        return following, metrics

    def _end_microbatch(self) -> None:
        if self._in_microbatch:
            self._in_microbatch = False
            self._parts.gatherer.end()
            if self._plan.params_offloaded:
                self._plan.world.compute.give_back_memory()

    def _heard(self) -> int:
        gatherer = self._parts.gatherer
        if any(one.grad is not grad or _version(one.grad) != version for one, grad, version in self._originals):
            return ASTRAY
        if gatherer.unscaled and self.state.scale.scale != 1.0:
            return UNSCALED
        return SOMETHING if gatherer.arrived or self._dropped else NOTHING

    def _hyper(self) -> Hyper:
        state, plan = self.state, self._plan
        return plan.optimizer.hyper_at(state.step + 1, plan.world.size * plan.accumulate * state.scale.scale)

    def _at(self, phase: str) -> None:
        self._plan.world.at(f"step {self.state.tried + 1}, {phase}")


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _clear(parts: Runtime) -> None:
    """Forget the last step's sums and gradients; a waiting update has its own claim on the latter."""
    parts.log.clear()
    parts.gatherer.clear()
    for unit in parts.units:
        unit.filled = False


class _Told(NamedTuple):
    """What the step's one small collective brought, added in rank order."""

    sums: list[float]
    loss: float
    aux: dict[str, float]
    nonfinite_unit: str | None
    words: tuple[float, ...]
    heard: set[int]

    def norm(self, divisor: float) -> float:
        """The global norm of the mean gradient, added in unit order and rounded once to fp32."""
        total = sum(self.sums)
        root = math.sqrt(total) if math.isfinite(total) else math.nan
        return ctypes.c_float(root / divisor).value


def _tell(parts: Runtime, losses: list[Tensor], aux: dict[str, list[Tensor]], word: float, heard: int) -> _Told:
    world, count = parts.plan.world, len(parts.units)
    names = sorted(aux)
    nothing = torch.zeros((), dtype=torch.float64, device=world.device)
    measured = [
        *(parts.updater.sums.get(unit.index, nothing) for unit in parts.units),
        (torch.stack(losses).sum() / parts.plan.accumulate if losses else nothing / 0).to(world.device),
        *(torch.stack(aux[name]).mean().to(world.device) for name in names),
    ]
    # `full` and not `tensor`: see `optim.on_device`
    counted = [nothing.new_full((), value) for value in (heard, word, parts.log.fingerprint)]
    mine = torch.stack([*measured, *counted])
    everyone = torch.zeros(world.size * mine.numel(), dtype=torch.float64, device=world.device)
    what = "norms and losses"
    [told] = parts.tape.under_way("reduce", what, lambda: [world.gather(mine, everyone, what=what)])
    told.wait()
    ranks = world.compute.numbers(everyone.view(world.size, -1))
    _same_visits(parts, [int(rank[-1]) for rank in ranks])
    sums = [sum(rank[number] for rank in ranks) for number in range(count)]
    means = [sum(rank[number] for rank in ranks) / world.size for number in range(count, len(ranks[0]) - 3)]
    nonfinite_unit = next(
        (u.spec.name for u, total in zip(parts.units, sums, strict=True) if not math.isfinite(total)), None
    )
    words, heard_by_all = tuple(float(rank[-2]) for rank in ranks), {int(rank[-3]) for rank in ranks}
    return _Told(sums, means[0], dict(zip(names, means[1:], strict=True)), nonfinite_unit, words, heard_by_all)


def _refuse_what_was_heard(heard: set[int]) -> None:
    """Of the gradients of one step, on all ranks."""
    if ASTRAY in heard:
        raise ConfigError(
            "a gradient arrived at the model that was given, and not at its copy that trains: the loss, a hook or a "
            "closure computes with it; use the model that loss_fn is given, which is state.model, and torch.no_grad() "
            "where the original is meant"
        )
    if UNSCALED in heard:
        raise ConfigError(
            "a backward in fp16 without the loss scale: call engine.backward(loss), or engine.scale(loss).backward(), "
            "or engine.scale(y, already=True).backward(grad) where the scale is in it; of a zero.Step they are "
            "step.backward and step.scaled"
        )
    if heard == {NOTHING}:
        raise ConfigError("no gradient has arrived since the last update, on any rank: call backward before the step")


def _same_visits(parts: Runtime, fingerprints: list[int]) -> None:
    """Refuse the step if the ranks' collectives were not the same ones in the same order: bytes met the wrong bytes."""
    if len(set(fingerprints)) == 1:
        return
    odd = [rank for rank, print_ in enumerate(fingerprints) if print_ != fingerprints[0]]
    raise WorldError(
        f"ranks {odd} gathered or reduced other units than rank 0 in this step, or with another rate or scale; "
        "all ranks must run the same units in the same order (this rank: " + ", ".join(parts.log.recent) + ")"
    )


def _clip(limit: float | None, norm: float) -> float:
    """What the gradient is multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def _wait_for_update(parts: Runtime, hyper: Hyper) -> None:
    """Mark every unit as waiting for this step's update, or do it now."""
    for unit in parts.units:
        if not unit.spec.trainable.slots or (parts.updater.at_once is not None and unit.filled):
            continue
        if not unit.filled:  # not visited in this step: the last update may still wait, and this one has no gradient
            if unit.waiting is not None:
                parts.updater.apply(unit)
            parts.gradients.open(unit, fresh=True).zero_()
            parts.gradients.park(unit)
        parts.updater.schedule_update(unit, hyper)
    if parts.plan.update == "serial":
        for unit in parts.units:
            if unit.waiting is not None:
                parts.updater.apply(unit)
        parts.store.drain()
        parts.come_to_rest()
