"""The functions of a model: those that it holds as attributes and hooks, and the code that its forward runs.

`copy.deepcopy` copies modules and shares functions, so a closure over a module would go on computing with the original.
`Closures` makes those functions anew for a copy: a cell that reaches the model is copied with it, every other cell and
function stays the same object, so that a hook that records goes on recording where its owner looks. The new functions
take the old ones' places when the copy is made: from Python 3.14 on deepcopy does not look for functions in its memo.

A function that reaches the model by a global name cannot be made to reach a copy. It is found by reading the names in
its code, and so is a forward that may write to a tensor without torch counting it in its version.
"""

import copy
import dis
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero.errors import PlanError

MOST_OBJECTS = 20_000
"""That are looked at from one function: a container with more holds data."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module keeps its hooks."""

UNCOUNTED = frozenset({"data", "numpy", "untyped_storage", "storage", "from_dlpack", "to_dlpack", "__dlpack__"})
"""Attributes that give a tensor's memory without its version."""

_LIBRARIES = ("torch", "einops", "zero")
NO_COPY = "of which a copy cannot have its own"


class Held(NamedTuple):
    """A function, method or weak reference of a module, by the attribute through which it was found first."""

    path: str
    attribute: str
    value: Any

    def __str__(self) -> str:
        return f"{self.attribute} of {self.path or 'the model'}"


class Closures:
    """The functions of a model that reach a part of it, made anew for one copy of it.

    Args:
        further: more functions, with where they are: those on its parameters.

    Raises:
        PlanError: something reaches the model in a way that cannot be copied: a function of a class, or by a global
            name; an attribute of a class; a weak reference to a module.
    """

    def __init__(self, model: nn.Module, further: Iterable[Held] = ()) -> None:
        self._model, self._parts = model, _parts_of(model)
        self._new: dict[int, tuple[types.FunctionType, types.FunctionType]] = {}
        self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}
        self._seen: set[int] = set()  # where `_replaced` does not look: in what the model holds, and nowhere twice
        self._held = [*_held_by(model, self._seen), *further]
        self._functions = {id(held.value) for held in self._held}
        for held in self._held:
            self._refuse_held(held)
        for kind in {type(module) for module in model.modules()}:
            self._refuse_class(kind)
        for path, module in model.named_modules():
            for function in code_of(module):
                self._refuse_code(function, path or type(module).__name__)

    def begin(self, memo: dict[int, Any]) -> None:
        """Before deepcopy: make the new functions, and put into its `memo` the hooks that stay as they are."""
        for _, _, value in self._held:
            if isinstance(value, types.FunctionType) and self.reach(value):
                closure = tuple(self._renewed(cell) for cell in value.__closure__ or ())
                new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
                self._new[id(value)] = value, new
        for module in self._model.modules():
            for hook in _hooks_of(module):
                if not self.reach(hook):
                    memo.setdefault(id(hook), hook)

    def end(self, copied: nn.Module, memo: dict[int, Any]) -> None:
        """After deepcopy: fill the new functions' cells and defaults, and give them to the modules."""
        if not self._new:
            return
        for old_cell, new_cell in self._cells.values():
            new_cell.cell_contents = self._copied(old_cell.cell_contents, memo)
        for old, new in self._new.values():
            new.__defaults__ = self._copied(old.__defaults__, memo)
            new.__kwdefaults__ = self._copied(old.__kwdefaults__, memo)
            new.__dict__.update(self._copied(old.__dict__, memo))
            new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__
        for module in copied.modules():
            if id(module) not in self._parts:
                self._replaced(vars(module))

    def carried(self, hooks: Mapping[int, Any], memo: dict[int, Any]) -> dict[int, Any]:
        """Hooks for the copy: a hook that does not reach the model stays the same object."""
        return {n: self._copied(hook, memo) if self.reach(hook) else hook for n, hook in hooks.items()}

    def reach(self, value: Any) -> bool:
        """Whether `value` is or holds a part of the model, however deep."""
        return any(id(one) in self._parts for one in _below(value, set(), lambda one: id(one) in self._parts))

    def _copied(self, value: Any, memo: dict[int, Any]) -> Any:
        return self._replaced(copy.deepcopy(value, memo))

    def _replaced(self, value: Any) -> Any:
        """A part of the copy, with the new functions in place of the old; what the model holds too is not changed."""
        match value:
            case types.FunctionType():
                return self._new.get(id(value), (value, value))[1]
            case types.MethodType():
                function, _ = self._replaced(value.__func__), self._replaced(value.__self__)
                return value if function is value.__func__ else types.MethodType(function, value.__self__)
            case tuple() | frozenset():
                members = [self._replaced(one) for one in value]
                same = all(map(operator.is_, value, members))
                return value if same else getattr(value, "_make", type(value))(members)
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._replace_in(value)
        return value

    def _replace_in(self, value: Any) -> None:
        match value:
            case nn.Module() | Tensor() | type() | types.ModuleType():
                return
            case partial():
                value.__setstate__(self._replaced(value.__reduce__()[2]))  # type: ignore[attr-defined]
            case list() | deque() | dict():
                for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    if (new := self._replaced(one)) is not one:
                        value[key] = new
            case set():
                members = [self._replaced(one) for one in value]
                value.clear()
                value.update(members)
            case _:
                if isinstance(own := getattr(value, "__dict__", None), dict):
                    self._replaced(own)

    def _renewed(self, cell: types.CellType) -> types.CellType:
        """The cell for the copy: another one if the model is reached through it."""
        if id(cell) not in self._cells:
            if _is_empty(cell) or not self.reach(cell.cell_contents):
                return cell
            self._cells[id(cell)] = cell, types.CellType()
        return self._cells[id(cell)][1]

    def _refuse_held(self, held: Held) -> None:
        value = held.value
        if isinstance(value, weakref.ref) and isinstance(value(), nn.Module) and self.reach(value()):
            raise PlanError(f"{held} is a weak reference to {self._parts[id(value())]}, {NO_COPY}; hold it in a tuple")
        if isinstance(value, types.MethodType) and self.reach(value.__func__):
            module = self._model.get_submodule(held.path)
            if not any(value is one for one in (*vars(module).values(), *_hooks_of(module))):
                raise PlanError(
                    f"{held} is a method whose function reaches the model inside something else, {NO_COPY}; make it an "
                    "attribute of the module itself"
                )

    def _refuse_class(self, kind: type) -> None:
        for one in kind.__mro__:
            for name, value in vars(one).items():
                if id(value) in self._parts:
                    raise PlanError(
                        f"{one.__qualname__}.{name} is {self._parts[id(value)]}, held by the class, {NO_COPY}; make it "
                        "an attribute of the instance"
                    )

    def _refuse_code(self, function: types.FunctionType, where: str) -> None:
        names = _names(function.__code__)
        reached = [name for name in names if id(function.__globals__.get(name)) in self._parts]
        if reached and (globals_ := [name for name in reached if name in _global_names(function.__code__)]):
            what = f"reads the global {globals_[0]}: {self._parts[id(function.__globals__[globals_[0]])]}"
        elif id(function) not in self._functions and self.reach(function):
            what = "belongs to a class or a module and reaches the model through its closure or its defaults"
        else:
            return
        raise PlanError(
            f"{function.__qualname__}, which runs in {where}, {what}, {NO_COPY}; read it from self, or from the module "
            "that a hook is given"
        )


def _held_by(model: nn.Module, seen: set[int]) -> Iterator[Held]:
    """Functions, methods and weak references among the attributes and hooks of its modules, and inside those."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for one in _below(value, seen, lambda one: isinstance(one, nn.Module)):
                    if isinstance(one, types.FunctionType | types.MethodType | weakref.ref):
                        yield Held(path, attribute, one)


def code_of(module: nn.Module) -> list[types.FunctionType]:
    """Python functions that run when `module` is called: its forward, its hooks, and what those call by name.

    Methods of its class, or of an object that a hook belongs to or holds, and functions that are global to the caller;
    not those of torch, and not its children's.
    """
    kinds = {type(module)}
    stack = _methods(kinds, "forward")
    for called in (*_hooks_of(module), vars(module).get("forward")):
        for one in _below(called, set(), lambda one: isinstance(one, nn.Module)):
            if isinstance(one, types.FunctionType):
                stack.append(one)
            elif not isinstance(one, types.MethodType):
                kinds.add(type(one))
    stack += _methods(kinds, "__call__")
    found: dict[types.CodeType, types.FunctionType] = {}
    while stack:
        function = stack.pop()
        if function.__code__ in found or (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        found[function.__code__] = function
        for name in _names(function.__code__):
            called = function.__globals__.get(name)
            stack += [called] if isinstance(called, types.FunctionType) else _methods(kinds, name)
    return list(found.values())


def may_write_uncounted(module: nn.Module) -> bool:
    """Whether the code of `module` names an attribute through which it could write past torch's count of versions."""
    return any(not UNCOUNTED.isdisjoint(_names(function.__code__)) for function in code_of(module))


def _parts_of(model: nn.Module) -> dict[int, str]:
    """What is copied of a model: by id, its description for a message."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        found[id(module)] = f"the module {path}" if path else "the model"
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(id(tensor), f"the {kind} {path}.{name}" if path else f"the {kind} {name}")
    return found


def _below(value: Any, seen: set[int], ends: Callable[[Any], bool] = lambda one: False) -> Iterator[Any]:
    """`value` and all that can be reached from it, through containers, functions, methods and attributes.

    Args:
        seen: ids of what was looked at before; those that are looked at now are added.
        ends: whether to look no further below one thing.
    """
    stack, count = [value], 0
    while stack and count < MOST_OBJECTS:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            count += 1
            yield one
            if not ends(one):
                stack += _directly_below(one)


def _directly_below(value: Any) -> Iterable[Any]:
    match value:
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case partial():
            return [value.func, *value.args, *value.keywords.values()]
        case list() | tuple() | set() | frozenset() | deque():
            return list(value)[:MOST_OBJECTS]
        case dict():
            return list(value.values())[:MOST_OBJECTS]
        case Tensor() | type() | types.ModuleType() | str() | bytes() | int() | float() | weakref.ref():
            return ()
    own = getattr(value, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else ()


def _hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for name in HOOKS for hook in vars(module).get(name, {}).values()]


def _methods(kinds: Iterable[type], name: str) -> list[types.FunctionType]:
    """Every definition of a method along the classes: one that overrides another may call it."""
    found = []
    for one in (above for kind in kinds for above in kind.__mro__):
        method = vars(one).get(name)
        function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if isinstance(function, types.FunctionType):
            found.append(function)
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> set[str]:
    return {name for one in _codes(code) for name in one.co_names}


def _global_names(code: types.CodeType) -> set[str]:
    return {
        instruction.argval
        for one in _codes(code)
        for instruction in dis.get_instructions(one)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where there is nothing
    except ValueError:
        return True
    return False
