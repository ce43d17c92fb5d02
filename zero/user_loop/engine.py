"""The engine that `zero.initialize` returns: forward, backward and step for the user's loop.

A microbatch begins with the first forward after `step()` and ends with the next `step()`. Between them may be any
number of forwards and backwards, by `engine.backward(loss)` or by `engine.scale(loss).backward()`. Every
`gradient_accumulation_steps()`-th call of `step()` updates the parameters.

The engine takes over the model: calls of the model become calls of the engine.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero.distributed.world import World
from zero.engine.forward import refuse_compiler
from zero.engine.state import State
from zero.errors import ConfigError, if_it_fails
from zero.platform.modes import unobserved
from zero.settings import Settings
from zero.user_loop.checkpoints import EngineCheckpoints
from zero.user_loop.current_step import CurrentStep
from zero.user_loop.grads import Grads
from zero.user_loop.model_calls import cast_inputs, take_over
from zero.user_loop.optimizers import Optimizer, PassedOptimizer, Scheduler, check_groups
from zero.user_loop.run_log import RunLog, Throughput
from zero.user_loop.state import gather_ahead


class Engine(EngineCheckpoints):
    """A model in training, made by `zero.initialize`. Attributes that it lacks are looked up in the model.

    Attributes:
        module: the model, which runs on gathered parameters.
        optimizer: the optimizer whose `param_groups` are read at every update.
        client_optimizer: the torch optimizer that was passed, or None.
        lr_scheduler: the scheduler, stepped after each update that was not skipped; None if there is none.
        current: the step that microbatches add to.
        metrics: results of the last step; None before the first.
        micro_steps: number of calls of `step()`.
        training_dataloader: the data loader that `initialize` made, or None.
        tput_timer: timer of samples per second, from each step's first forward to its end.
    """

    training_dataloader: Iterable[Any] | None = None

    def __init__(
        self,
        config: Settings,
        state: State,
        optimizer: Optimizer,
        *,
        passed: PassedOptimizer | None,
        lr_scheduler: Scheduler | None,
        managed: bool,
        casts_inputs: bool = True,
        run_log: RunLog | None,
        opened: World | None = None,
    ) -> None:
        super().__init__(config, state, optimizer, run_log)
        self.lr_scheduler = lr_scheduler
        self._casts_inputs = casts_inputs and state.plan.precision.compute != torch.float32
        self._passed, self._opened = passed, opened
        self.client_optimizer = None if passed is None else passed.optimizer
        self.tput_timer = Throughput(self.train_batch_size())
        self.current = CurrentStep(state.plan, managed=managed, started=self.tput_timer.start)
        self.micro_steps = 0
        self._groups = list(optimizer.param_groups)  # the dicts that every update reads
        optimizer.engine = self
        self._trains_in_eval = not state.model.training  # a model of from_pretrained, until its first train()
        self._call = state.model._call_impl
        self._give_back = take_over(state.model, weakref.ref(self))
        state.runtime.sites.entering = partial(_enter, weakref.ref(self))
        self._grads = Grads(self)
        state.runtime.backward.arriving = self._grads.arriving

    # -- the loop ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on full parameters, gathered as they are needed. Collective.

        Args:
            *args: arguments of the model. In bf16 and fp16, floating-point tensors with at least one dimension are cast
                to that dtype, unless `fp16.auto_cast` is false in the config. A tensor without dimensions is not cast,
                because it may be a count of tokens and would lose digits.
            **kwargs: keyword arguments of the model, cast likewise.

        Returns:
            The result of the model.

        Raises:
            ConfigError: the engine was destroyed, or it or its model was given to `torch.compile`.
        """
        state = self.state
        refuse_compiler()
        self._trains_in_eval &= not self.module.training
        if self.trains_now:
            self.current.begin_microbatch(self._state)
        elif self.current.step is None:
            state.runtime.sites.begin()
        if self._casts_inputs:
            args, kwargs = cast_inputs((args, kwargs), self.plan.precision.compute)
        with if_it_fails(self.abandon):
            return self._call(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        count: int | Tensor | None = None,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> Tensor:
        """Run backward from the mean loss of a microbatch. Collective.

        Args:
            loss: () the mean over this rank's rows, or with `count` the sum over its tokens; the loss scale of fp16 is
                applied to it.
            retain_graph: as torch's.
            scale_wrt_gas: False if `loss` is divided by `gradient_accumulation_steps()` already.
            count: the number of tokens in the sum, see `zero.Step.backward`.
            allreduce_gradients: ignored, because gradients are reduced once per microbatch or step in any case.
            release_loss: ignored, for compatibility with DeepSpeed.

        Returns:
            () the loss divided by `gradient_accumulation_steps()`, or by `count`, without a graph.

        Raises:
            ConfigError: there was no forward that trains, or nothing trains.
        """
        self._grads.take_back()
        parts = self.plan.accumulate if count is None else count
        with unobserved():
            whole = loss if scale_wrt_gas or count is not None else loss * parts
        with if_it_fails(self.abandon):
            self.current.begun("backward").backward(whole, count=count, retain_graph=retain_graph)
        self.current.backwards += 1
        with unobserved():
            return whole.detach() / parts

    def scale(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """Return `loss` times the loss scale of fp16, to call `backward` on it by hand.

        Args:
            loss: of any shape; with one element it counts as the loss of the microbatch.
            already: whether `loss`, or the gradient that is passed to its backward, contains the loss scale already.

        Returns:
            (shape of `loss`) the tensor for `backward`.

        Raises:
            ConfigError: there was no forward that trains, or nothing trains.
        """
        step = self.current.begun("scale")
        self._grads.take_back()
        self.current.backwards += 1
        if loss.numel() == 1 and not already:
            step.count(loss)
        return step.scaled(loss, already=already)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch; at the end of an accumulation update the parameters, then the learning rate. Collective.

        Args:
            lr_kwargs: arguments for the scheduler's `step`, such as the metrics of ReduceLROnPlateau.

        Raises:
            ConfigError: there was no forward, or no rank ran backward; the call is inside `no_sync`; or the script's
                own `loss.backward()` in fp16 did not use `scale`.
        """
        is_last = self.current.end_microbatch()
        self.micro_steps += 1
        if not is_last:
            self._grads.take_back()
            return
        self.optimizer.step()
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))

    @unobserved()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have arrived since the last update.

        Args:
            set_to_none: ignored, for compatibility with torch.
        """
        self._grads.drop()
        self.current.backwards = 0
        if self.current.step is not None:
            self.current.step.forget()

    def clip(self, max_norm: float) -> None:
        """Clip the norm of this step's mean gradient at `max_norm`, instead of at the number in the config.

        Raises:
            ConfigError: there was no forward that trains, or nothing trains.
        """
        self.current.begun("clip").clip = max_norm if max_norm < math.inf else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which `step()` raises. It has no other effect, because gradients accumulate anyway."""
        before, self.current.in_no_sync = self.current.in_no_sync, True
        try:
            yield
        finally:
            self.current.in_no_sync = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        return self.current.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide whether the next `step()` updates the parameters.

        Args:
            is_boundary: whether it does; None: decide by the number of microbatches again.
        """
        self.current.boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the parameters: it ended an accumulation and was not skipped."""
        return self.current.ended and not self.overflow

    @property
    def trains_now(self) -> bool:
        """Whether a forward belongs to a step: gradients are on, and the model trains or never was in training mode."""
        is_training = self.module.training or self._trains_in_eval
        return self.plan.facts.trains and torch.is_grad_enabled() and is_training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter | nn.Module) and name != "module":
            raise ConfigError(
                f"engine.{name}: a {type(value).__name__} on the engine is not trained and not saved. Put it on "
                "engine.module before zero.initialize."
            )
        super().__setattr__(name, value)

    @unobserved()
    def abandon(self) -> None:
        """Drop the step that is under way, so that the next forward begins another one. The state stays valid."""
        self._grads.drop()
        if (step := self.current.clear()) is not None:
            step.abandon()

    # -- methods that the optimizer calls ------------------------------------------------------------------------------

    @unobserved()
    def update(self) -> None:
        """Update all parameters; `step` and `optimizer.step` call it."""
        current, step = self.current, self.current.begun("step")
        with if_it_fails(self.abandon):
            passed = [] if self._passed is None else [self._passed.optimizer]
            check_groups(self._groups, [self.optimizer, *passed])
            current.check_microbatches()
            self._grads.take_back()
            state, self.metrics = step.finish()
            self.follow(state)
            gather_ahead(state)
            self._grads.drop()
        microbatches = step.microbatches if current.managed else current.backwards
        rows = microbatches * self.train_micro_batch_size_per_gpu() * self.world_size
        self.global_samples += rows
        current.clear()
        if self._passed is not None:
            self._passed.step()
        current.ended = True
        self.tput_timer.stop()
        if self._run_log is not None:
            self._run_log.log_step(self.metrics, has_loss=step.has_loss, rows=rows)

    def forget(self) -> None:
        """Drop gradients, unless earlier microbatches of the step have added to them. Called by the optimizer."""
        step = self.current.step
        if step is not None and (step.microbatches > 1 or not self.current.in_microbatch):
            self._warn_once(
                "optimizer.zero_grad() does nothing between microbatches of a step. Call engine.zero_grad() to drop "
                "their gradients."
            )
        else:
            self.zero_grad()

    @unobserved()
    def gradient_of(self, name: str) -> Tensor | None:
        """Return the value of `grad` of the parameter `name`: see `Grads.of`. None if no gradient has arrived."""
        step = self.current.step
        return self._grads.of(name) if step is not None and step.has_gradients else None

    # -- closing -------------------------------------------------------------------------------------------------------

    @unobserved()
    def destroy(self) -> None:
        """Close files, free memory, and make the model an ordinary module with its trained values; see `State.close`.

        Collective. Afterwards the engine cannot be used; a second call has no effect.

        Without `destroy`, the engine is closed when Python collects it, and summary.json keeps the reason "running".
        """
        if self._closing.detach() is None:
            return
        if self.current.in_microbatch and self._state.runtime.backward.arrived:
            self._warn_once("engine.destroy(): gradients that arrived after the last engine.step() are dropped")
        self.abandon()
        if self._passed is not None:
            self._passed.release()
        failure: Exception | None = None
        try:
            if self._run_log is not None:
                self._run_log.close("finished")
        except Exception as error:  # possibly on rank 0 only
            failure = error
        self._give_back()
        self._state.close()  # not in the handler, where `close` would keep no values; collective
        if self._opened is not None:
            self._opened.close()
        if failure is not None:
            raise failure


def _enter(held: "weakref.ref[Engine]") -> None:
    """Begin a microbatch when a method of the model, or the loss, reads parameters in training before any forward."""
    engine = held()
    if engine is not None and not engine.current.in_microbatch and engine.trains_now:
        engine.current.begin_microbatch(engine._state)
