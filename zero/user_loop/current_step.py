"""The step that the microbatches of a user's loop add to."""

from collections.abc import Callable

from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.step import Step
from zero.errors import ConfigError


class CurrentStep:
    """The step between its first forward and its update, and how far the loop is in it.

    Args:
        managed: whether every `accumulate` microbatches end a step; False: the loop decides it.
        started: called before a step begins.

    Attributes:
        step: the step; None until its first forward.
        in_microbatch: whether there was a forward since the last `engine.step()`.
        in_no_sync: whether the loop is in a block of `engine.no_sync`.
        backwards: number of calls of backward since the last update.
        boundary: whether the next `engine.step()` updates, if the loop has set it.
        ended: whether the last `engine.step()` ended an accumulation.
    """

    def __init__(self, plan: Plan, *, managed: bool, started: Callable[[], None]) -> None:
        self._plan, self.managed, self._started = plan, managed, started
        self.step: Step | None = None
        self.in_microbatch = self.in_no_sync = self.ended = False
        self.backwards = 0
        self.boundary: bool | None = None

    def begin_microbatch(self, state: State) -> None:
        """Begin a microbatch with its first forward; a later forward only reads the optimizer's groups again."""
        if self.step is None:
            self._started()
            self.step = Step(state)
        if self.in_microbatch:
            self.step.read_groups()
        else:
            self.step.microbatch()
            self.in_microbatch = True

    def end_microbatch(self) -> bool:
        """End a microbatch; return whether it is the last one of the step.

        Raises:
            ConfigError: there was no forward, or the call is inside `no_sync`.
        """
        if not self.in_microbatch:
            raise self._no_forward("step", since="one")
        if self.in_no_sync:
            raise ConfigError("engine.step() inside engine.no_sync(): it would synchronise. Leave the block first.")
        is_last = self.is_last
        self.in_microbatch = self.ended = False
        return is_last

    @property
    def is_last(self) -> bool:
        """Whether the next `engine.step()` updates the parameters."""
        if self.boundary is not None:
            return self.boundary
        begun = 0 if self.step is None else self.step.microbatches
        return not self.managed or begun + (not self.in_microbatch) >= self._plan.accumulate

    @property
    def has_loss(self) -> bool:
        """Whether backward was run from a loss since the last update or `zero_grad`."""
        return self.step is not None and self.step.has_loss

    def begun(self, method: str) -> Step:
        """Return the step; `method` of the engine needs it.

        Raises:
            ConfigError: there was no forward that trains, or nothing trains.
        """
        if self.step is None:
            raise self._no_forward(method, since="step")
        return self.step

    def check_microbatches(self) -> None:
        """Raise ConfigError if the step ends after another number of microbatches than its gradients are divided by."""
        count = 0 if self.step is None else self.step.microbatches
        if self.managed and count != self._plan.accumulate and self.boundary is None:
            raise ConfigError(
                f"optimizer.step() after {count} microbatches, but gradients are divided by "
                f"gradient_accumulation_steps={self._plan.accumulate}. Call engine.step() after each microbatch."
            )

    def clear(self) -> Step | None:
        """End the step, and return it."""
        step, self.step = self.step, None
        self.in_microbatch, self.backwards = False, 0
        return step

    def _no_forward(self, method: str, *, since: str) -> ConfigError:
        if self._plan.facts.trains:
            return ConfigError(
                f"engine.{method}(): no forward in training mode since the last {since}. Call engine.train(). To train "
                "without dropout, then call eval() on the dropout modules."
            )
        return ConfigError(
            f"engine.{method}(): no optimizer holds a parameter that requires a gradient. For gradients of inputs "
            "call loss.backward()."
        )
