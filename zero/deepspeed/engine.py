"""The engine that `zero.initialize` returns: forward, backward and step for the user's loop.

A microbatch begins with the first forward after `step()` and ends with the next `step()`. Between them may be any
number of forwards and backwards, by `engine.backward(loss)` or by `engine.scale(loss).backward()`. Every
`gradient_accumulation_steps()`-th call of `step()` updates the parameters.

The engine takes over the model: calls of the model become calls of the engine.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.core.tree import replaced, tensors_in
from zero.deepspeed.checkpoints import EngineCheckpoints
from zero.deepspeed.grads import Grads
from zero.deepspeed.metrics import RunLog, Throughput
from zero.deepspeed.optimizers import Optimizer, PassedOptimizer
from zero.deepspeed.runtime.lr_schedules import Scheduler
from zero.distributed.world import World
from zero.engine.forward import refuse_compiler
from zero.engine.model import ParameterPlaceholder, call_through
from zero.engine.state import State
from zero.engine.step import Step
from zero.errors import ConfigError, if_it_fails
from zero.settings import Settings


class Engine(EngineCheckpoints):
    """A model in training, made by `zero.initialize`. Attributes that it lacks are looked up in the model.

    Attributes:
        module: the model, which runs on gathered parameters.
        optimizer: the optimizer whose `param_groups` are read at every update.
        client_optimizer: the torch optimizer that was passed, or None.
        lr_scheduler: the scheduler, stepped after each update that was not skipped; None if there is none.
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
        self.lr_scheduler, self._managed = lr_scheduler, managed
        self._casts_inputs = casts_inputs and state.plan.precision.compute != torch.float32
        self._passed, self._opened = passed, opened
        self.client_optimizer = None if passed is None else passed.optimizer
        self._step: Step | None = None
        self._in_microbatch = self._in_no_sync = self._applied = False
        self._backwards = 0  # since the last update
        self.tput_timer = Throughput(self.train_batch_size())
        self._boundary: bool | None = None
        self.micro_steps = 0
        self._groups = list(optimizer.param_groups)  # the dicts that every update reads
        optimizer.engine = self
        self._call = state.model._call_impl
        self._give_back = _take_over(state.model, weakref.ref(self))
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
        if self.trains_now:
            self._begin_microbatch()
        elif self._step is None:
            state.runtime.sites.begin()
        if self._casts_inputs:
            args, kwargs = self._cast((args, kwargs))
        with if_it_fails(self._abort):
            return self._call(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> Tensor:
        """Run backward from the mean loss of a microbatch. Collective.

        Args:
            loss: () the mean over this rank's rows; the loss scale of fp16 is applied to it.
            retain_graph: as torch's.
            scale_wrt_gas: False if `loss` is divided by `gradient_accumulation_steps()` already.
            allreduce_gradients: ignored, because gradients are reduced once per microbatch or step in any case.
            release_loss: ignored, for compatibility with DeepSpeed.

        Returns:
            () the loss divided by `gradient_accumulation_steps()`, without a graph.

        Raises:
            ConfigError: there was no forward in training mode, or nothing trains.
        """
        self._grads.take_back()
        count = self.plan.accumulate
        mean = loss if scale_wrt_gas else loss * count
        with if_it_fails(self._abort):
            self._current_step("backward").backward(mean, retain_graph=retain_graph)
        self._backwards += 1
        return mean.detach() / count

    def scale(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """Return `loss` times the loss scale of fp16, to call `backward` on it by hand.

        Args:
            loss: of any shape; with one element it counts as the loss of the microbatch.
            already: whether `loss`, or the gradient that is passed to its backward, contains the loss scale already.

        Returns:
            (shape of `loss`) the tensor for `backward`.

        Raises:
            ConfigError: there was no forward in training mode, or nothing trains.
        """
        step = self._current_step("scale")
        self._grads.take_back()
        self._backwards += 1
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
        if not self._in_microbatch:
            raise self._no_forward("step", since="one")
        if self._in_no_sync:
            raise ConfigError("engine.step() inside engine.no_sync(): it would synchronise. Leave the block first.")
        ends = self.is_gradient_accumulation_boundary()
        self._in_microbatch = self._applied = False
        self.micro_steps += 1
        if not ends:
            self._grads.take_back()
            return
        self.optimizer.step()
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have arrived since the last update.

        Args:
            set_to_none: ignored, for compatibility with torch.
        """
        self._grads.drop()
        self._backwards = 0
        if self._step is not None:
            self._step.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which `step()` raises. It has no other effect, because gradients accumulate anyway."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        begun = 0 if self._step is None else self._step.microbatches
        return not self._managed or begun + (not self._in_microbatch) >= self.plan.accumulate

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide whether the next `step()` updates the parameters.

        Args:
            is_boundary: whether it does; None: decide by the number of microbatches again.
        """
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the parameters: it ended an accumulation and was not skipped."""
        return self._applied

    @property
    def trains_now(self) -> bool:
        """Whether a forward belongs to a step: the model is in training mode and gradients are enabled."""
        return self.plan.facts.trains and torch.is_grad_enabled() and self.module.training

    @property
    def has_loss(self) -> bool:
        """Whether backward was run from a loss since the last update or `zero_grad`."""
        return self._step is not None and self._step.has_loss

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

    # -- methods that the optimizer calls ------------------------------------------------------------------------------

    def update(self) -> None:
        """Update all parameters; `step` and `optimizer.step` call it."""
        step = self._current_step("step")
        with if_it_fails(self._abort):
            self._check(step)
            self._grads.take_back()
            state, self.metrics = step.finish()
            self._keep(state)
            self._gather_ahead()
            self._grads.drop()
        microbatches = step.microbatches if self._managed else self._backwards
        rows = microbatches * self.train_micro_batch_size_per_gpu() * self.world_size
        self.global_samples += rows
        self._step, self._in_microbatch, self._backwards = None, False, 0
        if self._passed is not None:
            self._passed.step()
        self._applied = not self.metrics.skipped
        self.tput_timer.stop()
        if self._run_log is not None:
            self._run_log.log_step(self.metrics, has_loss=step.has_loss, rows=rows)

    def forget(self) -> None:
        """Drop gradients, unless earlier microbatches of the step have added to them. Called by the optimizer."""
        if self._step is not None and (self._step.microbatches > 1 or not self._in_microbatch):
            self._warn_once(
                "optimizer.zero_grad() does nothing between microbatches of a step. Call engine.zero_grad() to drop "
                "their gradients."
            )
        else:
            self.zero_grad()

    def gradient_of(self, name: str) -> Tensor | None:
        """Return the value of `grad` of the parameter `name`: see `Grads.of`. None if no gradient has arrived."""
        arrived = self._step is not None and self._step.has_gradients
        return self._grads.of(name) if arrived else None

    # -- closing -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Close files, free memory, and make the model an ordinary module with its trained values; see `State.close`.

        Collective. Afterwards the engine cannot be used; a second call has no effect.

        Without `destroy`, the engine is closed when Python collects it, and summary.json keeps the reason "running".
        """
        if self._closing.detach() is None:
            return
        if self._in_microbatch and self._state.runtime.backward.arrived:
            self._warn_once("engine.destroy(): gradients that arrived after the last engine.step() are dropped")
        self._abort()
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

    # -- private methods -----------------------------------------------------------------------------------------------

    def _cast(self, inputs: Any) -> Any:
        dtype = self.plan.precision.compute
        tensors = (tensor for tensor in tensors_in(inputs) if tensor.ndim and tensor.is_floating_point())
        floats = [tensor for tensor in tensors if tensor.dtype != dtype]
        return replaced(inputs, {id(tensor): tensor.to(dtype) for tensor in floats}) if floats else inputs

    def _begin_microbatch(self) -> None:
        if self._step is None:
            self._step = Step(self._state)
            self.tput_timer.start()
        if self._in_microbatch:
            self._step.read_groups()
        else:
            self._step.microbatch()
            self._in_microbatch = True

    def _gather_ahead(self) -> None:
        """Start to gather resident parameters, unless threads are still updating them.

        A single rank may then read, save or run them, as scripts for DeepSpeed's lower stages do.
        """
        runtime = self._state.runtime
        if not any(unit.tickets for unit in runtime.units):
            runtime.gather_changed()

    def _current_step(self, method: str) -> Step:
        if self._step is None:
            raise self._no_forward(method, since="step")
        return self._step

    def _no_forward(self, method: str, *, since: str) -> ConfigError:
        if self.plan.facts.trains:
            return ConfigError(
                f"engine.{method}(): no forward in training mode since the last {since}. Call engine.train(), then "
                "engine.module.blocks.eval() or the like if you train without dropout."
            )
        return ConfigError(
            f"engine.{method}(): no optimizer holds a parameter that requires a gradient. For gradients of inputs "
            "call loss.backward()."
        )

    def _abort(self) -> None:
        step, self._step = self._step, None
        self._in_microbatch, self._backwards = False, 0
        self._grads.drop()
        if step is not None:
            step.abandon()

    def _check(self, step: Step) -> None:
        expected = [id(group) for group in self._groups]
        for optimizer in (self.optimizer, *([self._passed.optimizer] if self._passed is not None else [])):
            if [id(group) for group in optimizer.param_groups] != expected:
                raise ConfigError(
                    "the optimizer has other groups than in zero.initialize (add_param_group, load_state_dict). Pass "
                    "all groups to zero.initialize, edit them in place, and load with load_checkpoint."
                )
        if self._managed and step.microbatches != self.plan.accumulate and self._boundary is None:
            raise ConfigError(
                f"optimizer.step() after {step.microbatches} microbatches, but gradients are divided by "
                f"gradient_accumulation_steps={self.plan.accumulate}. Call engine.step() after each microbatch."
            )


def _take_over(model: nn.Module, engine: "weakref.ref[Engine]") -> Callable[[], None]:
    """Pass calls of `model`, and methods that would fail in torch, to `engine`; return a function that undoes it."""

    def living() -> Engine:
        current = engine()
        if current is None:
            raise ConfigError("the engine of this model was garbage-collected. Keep the result of zero.initialize.")
        return current

    def moved(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        plan = living().plan
        dtype, device = plan.precision.compute, plan.world.device
        there = fn(torch.empty(0, dtype=dtype, device=device))
        if (there.dtype, there.device) != (dtype, device):
            raise ConfigError(
                f"this model trains in {dtype} on {device} and cannot move to {there.dtype} on {there.device}. Leave "
                "out .to(), .cuda(), .half() after zero.initialize."
            )
        return model

    load_in_torch = model.load_state_dict

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        """Load into the full tensors of `GatheredParameters`, on any rank; outside it into the engine, on all ranks."""
        is_open = any(cast(ParameterPlaceholder, parameter).full_value is not None for parameter in model.parameters())
        return (load_in_torch if is_open else living().load_module_state_dict)(*args, **kwargs)

    methods: dict[str, Any] = {
        "zero_grad": lambda set_to_none=True: living().zero_grad(set_to_none),
        "load_state_dict": load_state_dict,
        "_apply": moved,
    }

    def call(args: Any, kwargs: Any) -> Any:
        return living().forward(*args, **kwargs)

    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ParameterPlaceholder)
        parameter.gradient = partial(lambda name: living().gradient_of(name), name)
        parameter.source = living
    undo = call_through(model, call)
    vars(model).update(methods)

    def give_back() -> None:
        for name in methods:
            vars(model).pop(name, None)
        undo()

    return give_back


def _enter(held: "weakref.ref[Engine]") -> None:
    """Begin a microbatch when a method of the model, or the loss, reads parameters in training before any forward."""
    engine = held()
    if engine is not None and not engine._in_microbatch and engine.trains_now:
        engine._begin_microbatch()
