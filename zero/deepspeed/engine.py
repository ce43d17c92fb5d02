"""The face of a run for a loop of the user's own: forward, backward, step, in DeepSpeed's words.

A microbatch begins with the first forward after `step()`, and ends with the next `step()`: between them may be any
number of forwards and backwards, by `engine.backward(loss)` or by `engine.scale(loss).backward()`. Every
`gradient_accumulation_steps()`-th call of `step()` updates.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.tree import replaced, tensors_in
from zero.deepspeed import missing_names
from zero.deepspeed.grads import Grads
from zero.deepspeed.loader import Loader
from zero.deepspeed.optimizers import Optimizer, Taken
from zero.deepspeed.original import hand_over
from zero.deepspeed.saved import EngineCheckpoints
from zero.deepspeed.schedulers import Scheduler
from zero.deepspeed.throughput import Throughput
from zero.deepspeed.watched import Watched
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.step import Metrics, Step
from zero.errors import ConfigError
from zero.platform.threads import Beside
from zero.store import PrefetchStore
from zero.trainer.config import Config

log = logging.getLogger("zero")

MANY_FORWARDS = 64
"""Of one microbatch. So many are rarely meant, and often a forgotten `step()`."""

_NO_FORWARD = "no forward in training mode, engine.train(),"
_WITHOUT_DROPOUT = (
    "to train without dropout keep engine.train() and put the parts into eval mode: engine.module.blocks.eval()"
)


class Engine(EngineCheckpoints):
    """A model in training. Made by `initialize`; what it does not have is looked for in the model.

    Attributes:
        module: the model, which runs on gathered parameters.
        optimizer: whose `param_groups` every update reads.
        lr_scheduler: stepped with each update that was really made; None if there is none.
        metrics: what the last step did; None before the first.
        micro_steps: calls of `step()`.
        training_dataloader: the loader that `initialize` made; None if it was given no data.
        tput_timer: rows a second, from each step's first forward to its end.
    """

    training_dataloader: Loader | None = None

    def __init__(
        self,
        config: Config,
        plan: Plan,
        store: PrefetchStore,
        state: State,
        optimizer: Optimizer,
        *,
        taken: Taken | None,
        lr_scheduler: Scheduler | None,
        managed: bool,
        watched: Watched | None,
    ) -> None:
        self.config, self.plan, self.optimizer, self.lr_scheduler = config, plan, optimizer, lr_scheduler
        self._state, self._managed = state, managed
        self._taken, self._watched = taken, watched
        self._step: Step | None = None
        self._in_microbatch = self._in_no_sync = self._applied = False
        self._forwards = 0  # in this microbatch
        self.tput_timer = Throughput(self.train_batch_size())
        self._steps_before = 0
        self._boundary: bool | None = None
        self.metrics: Metrics | None = None
        self.micro_steps = 0
        self._said: set[str] = set()
        self._groups = list(optimizer.param_groups)  # the dicts themselves: every update reads these
        optimizer.engine = self
        self._call = hand_over(state.model, self)
        state.runtime.gatherer.entering = _entering(weakref.ref(self))
        self._grads = Grads(self)
        state.runtime.gatherer.arriving = self._grads.arriving
        self._closing = weakref.finalize(self, _close_aside, store, watched)
        self._closing.atexit = False

    # -- the loop ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point tensors are cast to the dtype that it computes in."""
        state = self._living()
        if self.plan.trains and torch.is_grad_enabled() and self.module.training:
            self._begin_microbatch()
        elif self._step is None:
            state.runtime.gatherer.begin()
        args, kwargs = self._cast((args, kwargs))
        with self._abandoning():
            return self._call(args, kwargs)

    __call__ = forward

    def backward(
        self,
        loss: Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Backward from the mean loss of the microbatch; returns its share of the step's loss.

        Args:
            allreduce_gradients, release_loss: for old calls; gradients are reduced once per microbatch or step.
            scale_wrt_gas: False if `loss` is that share already.
        """
        self._grads.take_back()
        count = self.plan.accumulate
        whole = loss if scale_wrt_gas else loss * count
        with self._abandoning():
            self._under_way("backward").backward(whole, retain_graph=retain_graph)
        return whole.detach() / count

    def scale(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """What to call `backward` on by hand: it has fp16's loss scale in it.

        Args:
            already: the scale is in `loss`, or in the gradient that its backward will be given.
        """
        under_way = self._under_way("scale")
        self._grads.take_back()
        if loss.numel() == 1 and not already:
            under_way.count(loss)
        return under_way.scaled(loss, already=already)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch; at the end of an accumulation update the parameters, and the learning rate after them.

        Args:
            lr_kwargs: for the scheduler's `step`, such as the metrics of ReduceLROnPlateau.

        Raises:
            ConfigError: there was no forward, or on no rank a backward; inside `no_sync`; or a backward by hand without
                `scale` in fp16.
        """
        if not self._in_microbatch:
            self._refuse_without_training("step")
            raise ConfigError(f"engine.step(): {_NO_FORWARD} since the last one; {_WITHOUT_DROPOUT}")
        if self._in_no_sync:
            raise ConfigError("engine.step() inside engine.no_sync(): it would synchronise; leave the block first")
        ends = self.is_gradient_accumulation_boundary()
        self._in_microbatch = self._applied = False
        self.micro_steps += 1
        if not ends:
            self._grads.take_back()
            return
        self.optimizer.step()
        if self._taken is not None:
            self._taken.step()
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have arrived since the last update."""
        self._grads.drop()
        if self._step is not None:
            self._step.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches that do not end a step. Gradients are added up in any case, so nothing else changes here."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates."""
        if self._boundary is not None:
            return self._boundary
        begun = 0 if self._step is None else self._step.microbatches
        return not self._managed or begun + (not self._in_microbatch) >= self.plan.accumulate

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates; None: count again."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """The last call of `step()` changed the parameters: it was the end of an accumulation, and not skipped."""
        return self._applied

    @property
    def state(self) -> State:
        return self._living()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = name in missing_names.OF_THE_ENGINE
        if known and name in vars(nn.Module):  # every module has it, and this one must not use it
            raise missing_names.missing("engine", name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            if known:
                raise missing_names.missing("engine", name) from None
            raise

    # -- what the optimizer is asked for -------------------------------------------------------------------------------

    def update(self) -> None:
        """The update of all parameters; `step` and `optimizer.step` call it."""
        step = self._under_way("step")
        with self._abandoning():
            self._check(step)
            self._grads.take_back()
            self._state, self.metrics = step.finish()
            self._gather_ahead()
            self._grads.drop()
        self._step, self._in_microbatch = None, False
        self._applied = not self.metrics.skipped
        self.tput_timer.stop(global_step=True)
        if self._watched is not None:
            self._watched.stepped(self.metrics, has_loss=step.has_loss)

    def forget(self) -> None:
        """A habit before every backward: what earlier microbatches have added up stays."""
        if self._step is not None and (self._step.microbatches > 1 or not self._in_microbatch):
            self._say_once("optimizer.zero_grad() does nothing while microbatches add up; engine.zero_grad() drops all")
        else:
            self.zero_grad()

    def gradient_of(self, name: str) -> Tensor | None:
        """What `grad` of a parameter reads as: see `Grads`."""
        arrived = self._step is not None and self._step.has_gradients
        return self._grads.of(name) if arrived else None

    # -- the end -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Give back files and memory; the engine cannot be used after it. Once more does nothing.

        An engine that is only dropped gives them back when Python comes to it, and its rows then end without a word.
        """
        closing = self._closing.detach()
        if closing is None:
            return
        if self._in_microbatch and self._state.runtime.gatherer.arrived:
            self._say_once("engine.destroy(): gradients have arrived that no engine.step() has taken")
        self._abandon()
        if self._taken is not None:
            self._taken.release()
        _, _, (store, watched), _ = closing
        _close("finished", store, watched)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _cast(self, given: Any) -> Any:
        dtype = self.plan.precision.compute
        floats = [one for one in tensors_in(given) if one.is_floating_point() and one.dtype != dtype]
        return replaced(given, {id(one): one.to(dtype) for one in floats}) if floats else given

    def _begin_microbatch(self) -> None:
        if self._step is None:
            self._step = Step(self._state)
            self.tput_timer.start()
        if self._in_microbatch:
            self._step.follow()
        else:
            self._step.microbatch()
            self._in_microbatch, self._forwards = True, 0
        self._forwards += 1
        says_when = self._boundary is not None or self._in_no_sync  # and so means it
        if self._forwards == MANY_FORWARDS and self._managed and not says_when:
            self._say_once(
                f"{MANY_FORWARDS} forwards since the last engine.step(): nothing is updated before it is called, after "
                "each microbatch"
            )

    def _gather_ahead(self) -> None:
        """Start to gather what is resident, unless threads are at its update: so one rank alone may read it, save it or
        compute with it, as scripts for DeepSpeed's first stages do."""
        runtime = self._state.runtime
        if not any(unit.due for unit in runtime.units):
            runtime.align()

    def _living(self) -> State:
        if not self._closing.alive:
            raise ConfigError("this engine was destroyed; make another one with zero.initialize")
        return self._state

    def _under_way(self, asked: str) -> Step:
        if self._step is None:
            self._refuse_without_training(asked)
            raise ConfigError(f"engine.{asked}(): {_NO_FORWARD} since the last step; {_WITHOUT_DROPOUT}")
        return self._step

    def _refuse_without_training(self, asked: str) -> None:
        if not self.plan.trains:
            raise ConfigError(
                f"engine.{asked}(): nothing trains here: no optimizer holds a parameter that requires a gradient; "
                "gradients of inputs come with loss.backward()"
            )

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """What raises inside ends the step under way."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        step, self._step = self._step, None
        self._in_microbatch = False
        self._grads.drop()
        if step is not None:
            step.abandon()

    def _say_once(self, line: str) -> None:
        if line not in self._said and self.global_rank == 0:
            log.warning("%s", line)
        self._said.add(line)

    def _check(self, step: Step) -> None:
        """Refuse an update that would not be what the script means."""
        wanted = [id(group) for group in self._groups]
        for one in (self.optimizer, *([self._taken.given] if self._taken is not None else [])):
            if [id(group) for group in one.param_groups] != wanted:
                raise ConfigError(
                    "the optimizer got other groups than zero.initialize was given (add_param_group, load_state_dict): "
                    "edit those that are there, give all of them to zero.initialize, and load with load_checkpoint"
                )
        if self._managed and step.microbatches != self.plan.accumulate and self._boundary is None:
            raise ConfigError(
                f"optimizer.step() after {step.microbatches} microbatches; gradients are divided for "
                f"gradient_accumulation_steps={self.plan.accumulate}: call engine.step() after each of them"
            )


def _entering(held: "weakref.ref[Engine]") -> Callable[[], None]:
    """A microbatch begins with whatever reads parameters in training first: a method of the model, or the loss."""

    def entering() -> None:
        engine = held()
        if engine is None or engine._in_microbatch or not engine.plan.trains:
            return
        if torch.is_grad_enabled() and engine.module.training:
            engine._begin_microbatch()

    return entering


def _close(how: str | None, store: PrefetchStore, watched: Watched | None) -> None:
    """End the rows, and give back files and memory even if that fails."""
    try:
        if watched is not None:
            watched.close(how)
    finally:
        store.close()


def _close_aside(store: PrefetchStore, watched: Watched | None) -> None:
    """What becomes of an engine that nobody has destroyed.

    In a thread of its own: Python may come to it anywhere, in the store's threads and under its lock too.
    """
    Beside(partial(_close, None, store, watched), name="closing").start()
