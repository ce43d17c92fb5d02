"""Compute the first values of parameters on meta, by blocks or by whole owners.

The values are computed on the CPU in fp32 by the operations that `empty` recorded, in their order. Parameters without
recorded writes, such as those of a model built under `torch.device("meta")`, are initialized by the `reset_parameters`
of their owner (the module that holds them). If the owner or a module that contains it has `_init_weights(module)`, as
models of transformers do, that is called next with the owner and then with each containing module, as `apply` would.
These calls cannot change parameters of other owners.

Most initializers treat all elements alike (`normal_`, `uniform_`, `trunc_normal_`, `kaiming_uniform_`, constants). They
run in blocks of 2^14 elements, each with a generator seeded from (seed, owner, operation, block), so a rank computes
only the blocks of its own range. Other initializers (`orthogonal_`, a computation from another parameter) run on whole
tensors on every rank, one owner at a time, with a generator seeded from (seed, owner).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero.distributed.world import World
from zero.engine.meta import Recipe, RecordedOperation, RecordedRoot, Unmade, dispatch_trunc_normal, is_meta, writes
from zero.engine.model.placeholder import ParameterPlaceholder
from zero.engine.model.unit import Owner, Splitting
from zero.errors import PlanError
from zero.platform.host_memory import aligned_zeros

SEEDED_NUMEL = 1 << 14
"""Elements that are drawn from one seed. Seeding a generator takes a tenth of the time of drawing so many numbers.

torch's generator on a CPU uses 32 bits of a seed, so of a million blocks about a hundred draw the numbers of another
block.
"""


class RecordedValues:
    """The first values of parameters, computed from their recorded operations.

    A root that belongs to no parameter, such as an intermediate result, is assigned to the first owner whose values
    depend on it.
    """

    def __init__(
        self, splitting: Splitting, model: nn.Module, built: Mapping[str, Tensor], seed: int, world: World
    ) -> None:
        dispatch_trunc_normal()
        self._model, self._seed, self._world = model, seed, world
        self._owner_of: dict[str, Owner] = {}
        self._recipes: dict[str, Recipe] = {}
        self._path_of: dict[RecordedRoot, str] = {}
        self._roots_of: dict[str, list[RecordedRoot]] = {}
        for owner in splitting.owners:
            for local, name in owner.slots:
                if name in self._owner_of:
                    continue
                self._owner_of[name] = owner
                placeholder = model.get_submodule(owner.path)._parameters[local]
                assert isinstance(placeholder, ParameterPlaceholder)
                recipe = placeholder.recipe or Recipe.of(RecordedRoot(placeholder.shape, begin=built.get(name)))
                self._recipes[name] = recipe
                self._assign(recipe.root, owner.path)
            with self._drawing_alone():
                self._record_reset(owner)
        for root, path in list(self._path_of.items()):
            for further in reached([root]):
                self._assign(further, path)
        self._keys = {  # sorted, so that a root has one key whether or not others were computed from it
            root: f"{path}/{place}"
            for path, roots in self._roots_of.items()
            for place, root in enumerate(sorted(roots, key=lambda root: root.number))
        }
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def _assign(self, root: RecordedRoot, path: str) -> None:
        if root not in self._path_of:
            self._path_of[root] = path
            self._roots_of.setdefault(path, []).append(root)

    def _own(self, owner: Owner) -> dict[str, Recipe]:
        """Return the recipes of the parameters that this owner initializes, by name."""
        return {name: self._recipes[name] for _, name in owner.slots if self._owner_of[name] is owner}

    def _record_reset(self, owner: Owner) -> None:
        """Record what the owner's `reset_parameters` does, if it treats all elements alike.

        Otherwise nothing changes, and the method will run on whole tensors, where it also raises its errors.
        """
        roots = {name: recipe.root for name, recipe in self._own(owner).items()}
        if any(root.is_written or not root.is_elementwise for root in roots.values()):
            return
        before = {root: list(root.operations) for root in roots.values()}
        module = self._model.get_submodule(owner.path)
        unmade = {
            name: Unmade.of(torch.empty(root.shape, dtype=torch.float32, device="meta"), Recipe.of(root))
            for name, root in roots.items()
        }
        torch.default_generator.manual_seed(self._seed_of(owner.path))
        try:
            after = _reset(module, owner, self._model, unmade)
            recipes = {name: cast(Unmade, after[name]).recipe for name in roots}
            complete = all(recipe.root is roots[name] and _is_ranged(recipe) for name, recipe in recipes.items())
        except Exception:  # for example, the method reads values
            complete = False
        held = (*module._buffers.values(), *vars(module).values())
        if not complete or any(isinstance(value, Unmade) for value in held):
            for root, operations in before.items():
                root.operations, root.is_changed = operations, False

    @contextmanager
    def _drawing_alone(self) -> Iterator[None]:
        """Context manager in which this rank alone uses torch's generator; its state is restored."""
        with self._world.exclusive(), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        owner, recipe = self._owner_of[name], self._recipes[name]
        if self._last is not None and self._last[0] != owner.path:
            self._last = None  # free the last owner's values before the next are computed
        if _is_ranged(recipe) and all(other.root.is_written for other in self._own(owner).values()):
            with self._drawing_alone():
                values = self._part(recipe.root, start // SEEDED_NUMEL, -(-stop // SEEDED_NUMEL))[
                    start % SEEDED_NUMEL :
                ][: stop - start]
            _refuse_left_out(self._model.get_submodule(owner.path), owner, {name: values})
            return values
        if self._last is None:
            with self._drawing_alone():
                self._last = owner.path, self._made_by(owner)
        return self._last[1][name].reshape(-1)[start:stop]

    def _part(self, root: RecordedRoot, first: int, last: int) -> Tensor:
        """Compute blocks [first, last) of a root whose operations are all elementwise; return them in one tensor."""
        part = _begun(root, first * SEEDED_NUMEL, min(last * SEEDED_NUMEL, root.shape.numel()))
        for operation in root.operations:
            self._run_by_blocks(operation, root, part, first)
        return part

    def _run_by_blocks(self, operation: RecordedOperation, root: RecordedRoot, part: Tensor, first: int) -> None:
        """Run an elementwise operation on `part`, (n,), which begins at block `first` of the root."""
        if operation.is_alias:
            return
        writes = [other for other in root.operations if not other.is_alias]
        key = f"{self._keys[root]}/{writes.index(operation)}"
        for number, block in enumerate(part.split(SEEDED_NUMEL), first):
            torch.default_generator.manual_seed(self._seed_of(f"{key}/{number}"))
            operation.run(dict.fromkeys(root.whole, block))

    def _made_by(self, owner: Owner) -> dict[str, Tensor]:
        """Run all operations that the owner's values depend on and return the values by name.

        If another owner's values are needed, all of them are computed, because that owner's generator must draw in the
        same order as when its own values are computed.
        """
        paths = {owner.path}
        while further := {self._path_of[root] for path in paths for root in reached(self._roots_of[path])} - paths:
            paths |= further
        roots = [root for path in paths for root in self._roots_of[path]]
        values = {
            root.number: _begun(root, 0, root.shape.numel()).view(root.shape) for root in roots if not root.is_made
        }
        operations = {operation: root for root in roots for operation in root.operations}
        generators = {path: self._generator(path) for path in paths}
        module, recipes = self._model.get_submodule(owner.path), self._own(owner)
        if unwritten := {recipe.root for recipe in recipes.values() if not recipe.root.is_written}:
            views = dict.fromkeys(operation for root in unwritten for operation in root.operations)
            for view in sorted(views, key=lambda each: each.number):
                view.run(values)
                operations.pop(view, None)
            with _drawing(generators, owner.path):
                begun = {name: values[recipe.number] for name, recipe in recipes.items() if recipe.number in values}
                for name, value in _reset(module, owner, self._model, begun).items():
                    begun[name].copy_(value)
        for operation, root in sorted(operations.items(), key=lambda each: each[0].number):
            if root.is_elementwise and not operation.is_alias:
                self._run_by_blocks(operation, root, values[root.number].view(-1), 0)
            else:
                with _drawing(generators, self._path_of[root]):
                    operation.run(values)
        made = {name: values[recipe.number].detach() for name, recipe in recipes.items()}
        _refuse_left_out(module, owner, made)
        return made

    def _generator(self, path: str) -> Tensor:
        """Return the state of torch's generator with which the owner at `path` begins."""
        return torch.Generator().manual_seed(self._seed_of(path)).get_state()

    def _seed_of(self, key: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{key}".encode()).digest()[:7], "big")


def _is_ranged(recipe: Recipe) -> bool:
    """Return whether a part of the tensor can be computed alone."""
    return recipe.root.is_elementwise and recipe.root.is_written and recipe.number in recipe.root.whole


def reached(roots: Iterable[RecordedRoot]) -> dict[RecordedRoot, None]:
    """Return as keys `roots` and all roots that their operations read, directly or indirectly."""
    reached = dict.fromkeys(roots)
    waiting = list(reached)
    while waiting:
        for operation in waiting.pop().operations:
            new = [root for root in operation.reads if root not in reached]
            reached.update(dict.fromkeys(new))
            waiting += new
    return reached


@contextmanager
def _drawing(states: dict[str, Tensor], path: str) -> Iterator[None]:
    """Context manager in which torch draws from the generator of the owner at `path`; its state is kept in `states`."""
    torch.default_generator.set_state(states[path])
    yield
    states[path] = torch.default_generator.get_state()


def _begun(root: RecordedRoot, start: int, stop: int) -> Tensor:
    """Return fp32 memory for elements [start, stop) of `root`, with the value that its parameter was registered with.

    Without such a value the elements are NaN. A NaN that remains shows that nothing has initialized the element.
    """
    if not root.kept:
        raise PlanError(
            "parameters of deepspeed.zero.Init() have their values on rank 0 only. Pass the model to zero.initialize."
        )
    memory = aligned_zeros(stop - start, torch.float32, torch.device("cpu"))
    return memory.fill_(torch.nan) if root.begin is None else memory.copy_(root.begin.reshape(-1)[start:stop])


def _reset(module: nn.Module, owner: Owner, model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fill `values` by the owner's `reset_parameters` and by the `_init_weights` of the modules that contain it.

    Returns:
        The module's parameters afterwards, by the names of `values`, because the methods may replace them.
    """
    reset = _reset_of(module)
    placeholders = dict(module._parameters)
    # by full name, so that a parameter with two local names is one object
    filled = {name: nn.Parameter(value) for name, value in values.items()}
    for local, name in owner.slots:
        held = placeholders[local]
        if held is not None and name not in filled:  # initialized by another owner
            filled[name] = nn.Parameter(torch.zeros(held.shape))
    try:
        module._parameters.update({local: filled[name] for local, name in owner.slots})
        with torch.enable_grad():
            if reset is not None:
                reset()
        with _OthersUntouched():
            _initialise(model, owner.path)
        after = {name: module._parameters[local] for local, name in owner.slots if name in values}
        return {name: parameter for name, parameter in after.items() if parameter is not None}
    finally:
        module._parameters.update(placeholders)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _refuse_left_out(module: nn.Module, owner: Owner, made: Mapping[str, Tensor]) -> None:
    if left_out := [name for name, value in made.items() if value.isnan().any()]:
        reset = "its reset_parameters() does not set it" if _reset_of(module) else "has no reset_parameters()"
        raise PlanError(
            f"{type(module).__name__} at {owner.path or '(root)'} holds {', '.join(left_out)} and {reset}. "
            "Give it a reset_parameters(), or pass weights= to zero.init."
        )


def _initialise(model: nn.Module, path: str) -> None:
    """Call `_init_weights` with each module from `path` up to the root.

    A module without the method uses that of its nearest ancestor with one.
    """
    calls: list[Callable[[], None]] = []
    nearest: Callable[[nn.Module], None] | None = None
    names = path.split(".") if path else []
    for count in range(len(names) + 1):
        module = model.get_submodule(".".join(names[:count]))
        nearest = getattr(module, "_init_weights", None) or nearest
        if nearest is not None:
            calls.append(partial(nearest, module))
    for call in reversed(calls):
        call()


class _OthersUntouched(TorchFunctionMode):
    """A mode in which writes into placeholders and their views have no effect and draw no random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(iter((*args, *(kwargs or {}).values())), None)
        recorded = isinstance(first, Unmade)
        if recorded or not (isinstance(first, ParameterPlaceholder) or (isinstance(first, Tensor) and is_meta(first))):
            return func(*args, **(kwargs or {}))
        if func.__name__ == "__set__" or writes(func.__name__):
            return first
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
