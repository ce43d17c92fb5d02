"""Trace a few of a model's equal blocks, and count for the others what those take.

A call of a block repeats the one before it if their modules have the same classes and sizes, if they read no attribute
in which they differ, if their arguments are the same objects but for the one tensor that each gets from the other, and
if no operator runs between them. After `TRACED` such calls, of which the last two took the same, further ones return
their input and add what the last one took, in forward and in backward.

A module could still hand tensors on without returning them. So what a call leaves in memory must be gone when its
backward ends, and the loss must reach it through what it returned. Otherwise, and if blocks turn out to differ in
backward, `Unequal` is raised, and every block has to be traced.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core.activations import KEEP, ActivationPolicy
from zero.core.tree import leaves_in, replaced
from zero.engine.forward import KNOWN
from zero.engine.model import Body, Site
from zero.platform.modes import unobserved
from zero.trainer.planning.traces.operators import Lap, OperatorCounts

TRACED = 4
"""Calls of a run of equal calls that are traced. In forward the first is after something else, in backward the last;
two between them are compared."""

BY_VALUE = (bool, int, float, complex, str, bytes, frozenset, set, Enum, torch.dtype, torch.device, torch.Size)
"""Classes of attributes that are compared by their values."""

Attribute = tuple[int, str]
"""The id of a module and the name of an attribute."""


class Unequal(Exception):
    """Blocks that were taken for equal may differ."""


class _Run:
    """Calls that follow each other and are equal."""

    def __init__(self) -> None:
        self.watched: _Watched | None = None
        self.forward: list[Lap] = []
        self.backward: list[Lap] = []
        self.traced = self.repeated = 0
        self.differences: set[Attribute] = set()
        self.nodes: list[range] = []
        self.returned: set[int] = set()
        self.held: list[weakref.ref[Tensor] | None] = []

    def may_repeat(self, body: Body) -> bool:
        """Return whether a further call takes what the last one took."""
        if self.traced < TRACED or self.forward[-1] != self.forward[-2] or self.watched is None:
            return False
        differences = self.watched.differences(body.module)
        if differences is None or not self.watched.reads.isdisjoint(differences) or self.watched.writes:
            return False
        self.differences |= differences
        return True


class EqualBlocks:
    """The calls of one trace.

    Args:
        live: counts operators.
        others: returns further counts that calls raise.

    Attributes:
        added: what repeated calls add to `others`.
    """

    def __init__(self, live: OperatorCounts, others: Callable[[], tuple[int, ...]]) -> None:
        self._live, self._others = live, others
        self._runs, self._before = [_Run()], _NONE
        self._stand_in, self._inside, self._untraced = torch.empty(0), False, set[int]()
        self.added = [0 for _ in others()]

    def call(
        self,
        site: Site,
        policy: ActivationPolicy,
        body: Body,
        args: Any,
        kwargs: Mapping[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Return the result of `call()`, a call of `site`, or of a call before it if both are equal."""
        if torch._C._current_graph_task_id() >= 0 and id(body) in self._untraced:
            raise Unequal("a model recomputes its blocks")
        if self._inside or (policy is KEEP and not site.is_block):
            return call()
        self._inside = True
        try:
            bound = [(bound.local, bound.trainable) for bound in site.bindings]
            given = _Given.of((policy.name, bound), args, kwargs)
            return self._block(body, given, call) if site.is_block else call()
        finally:
            self._inside = False

    def _block(self, body: Body, given: "_Given", call: Callable[[], Any]) -> Any:
        lap, run = self._live.lap(self._others()), self._runs[-1]
        if not self._before.is_followed_by(given, self._live.operators):
            run = self._started()
        elif not run.repeated:
            run.forward.append(lap)
        flow = self._before.flow_in(given)
        if flow is not None and run.may_repeat(body):
            run.repeated += 1
            self._untraced.add(id(body))
            self._repeat(run.forward[-1])
            outputs = replaced(self._before.outputs, {id(self._stand_in): _Same.apply(flow)})
            self._hold_on(run, flow)
        else:
            run = self._started() if run.repeated else run
            if run.traced == 1:
                run.watched = _Watched(body.module)
            outputs = self._traced(run, call)
        self._before = _Call.of(given, outputs, self._live.operators, self._stand_in, flow)
        return outputs

    def _started(self) -> _Run:
        self._runs.append(_Run())
        return self._runs[-1]

    def _traced(self, run: _Run, call: Callable[[], Any]) -> Any:
        first = torch._C._autograd._get_sequence_nr()
        outputs = call()
        run.traced += 1
        run.nodes.append(range(first, torch._C._autograd._get_sequence_nr()))
        for tensor in leaves_in(outputs):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                run.returned.add(tensor.grad_fn._sequence_nr())
                tensor.register_hook(lambda _: self._begins(run))
        return outputs

    def _hold_on(self, run: _Run, flow: Tensor) -> None:
        """Expect that `flow`, the argument of a repeated call, is gone before another operator runs."""
        expected, number = self._live.operators, len(run.held)

        def gone(_: Any) -> None:
            if self._live.operators == expected:
                run.held[number] = None

        run.held.append(weakref.ref(flow, gone))

    def _repeat(self, lap: Lap) -> None:
        self._live.repeat(lap)
        self.added = [a + b for a, b in zip(self.added, lap.others, strict=True)]

    def _begins(self, run: _Run) -> None:
        """Count that the backward of a traced call begins."""
        run.backward.append(self._live.lap(self._others()))
        if len(run.backward) == TRACED - 1:
            for _ in range(run.repeated):
                self._repeat(run.backward[-1])
            self._live.lap(self._others())
        if len(run.backward) == TRACED and run.repeated:
            forward, (before, backward) = run.forward[-1], run.backward[-2:]
            if backward != before or backward.net_bytes != -forward.net_bytes:
                raise Unequal("blocks differ in backward")

    def check_forward(self, loss: Tensor) -> None:
        """Raise Unequal if `loss` reaches what a repeated call made, but not through what it returned."""
        runs = [run for run in self._runs if run.repeated]
        inside, returned = [nodes for run in runs for nodes in run.nodes], {nr for run in runs for nr in run.returned}
        if any(run.held.count(None) < run.repeated for run in runs):
            raise Unequal("something else than the next block holds what a block returned")
        nodes, seen = [loss.grad_fn], set[Any]()
        while nodes:
            for node, _ in getattr(nodes.pop(), "next_functions", ()):
                if node is None or node in seen:
                    continue
                seen.add(node)
                number = node._sequence_nr()
                if not any(number in numbers for numbers in inside):
                    nodes.append(node)
                elif number not in returned:
                    raise Unequal("the loss uses what a block did not return")
        if not loss.requires_grad and any(run.forward[-1].net_bytes for run in runs):
            raise Unequal("blocks leave something in memory")

    def check_backward(self) -> None:
        """Raise Unequal if a repeated call read an attribute in which its module differs."""
        for run in self._runs:
            if run.watched and (run.watched.writes or not run.watched.reads.isdisjoint(run.differences)):
                raise Unequal("blocks read what they differ in")
            if run.repeated and 0 < len(run.backward) < TRACED:
                raise Unequal("blocks have no backward")


class _Same(torch.autograd.Function):
    """The identity. Its result is no view, so that it does not keep the tensor object that it is made of."""

    @staticmethod
    @unobserved()
    def forward(ctx: Any, x: Tensor) -> Tensor:
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _Given(NamedTuple):
    """The arguments of a call: its containers, its tensors and all else, in order."""

    classes: list[Any]
    tensors: list[Tensor]
    plain: list[Any] | None
    """None if there are objects of other classes than `KNOWN`."""

    @classmethod
    def of(cls, way: Any, args: Any, kwargs: Mapping[str, Any]) -> "_Given":
        leaves = leaves_in((args, kwargs))
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        classes = [way, *map(type, args), *((name, type(value)) for name, value in kwargs.items())]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(classes, tensors, others if all(isinstance(leaf, KNOWN) for leaf in leaves) else None)


class _Call(NamedTuple):
    """A call, without references to its tensors, which would keep them.

    Attributes:
        flow: the one tensor that it returned; None if it returned others, or something else.
        tensors: the tensors that it got; None for the one that the call before it returned.
        outputs: what it returned, with another tensor in place of `flow`.
        operators: the number of operators that ran before its end.
    """

    flow: "weakref.ref[Tensor] | None"
    classes: list[Any]
    tensors: "list[weakref.ref[Tensor] | None]"
    plain: list[Any] | None
    outputs: Any
    operators: int

    @classmethod
    def of(cls, given: _Given, outputs: Any, operators: int, stand_in: Tensor, last: Tensor | None) -> "_Call":
        leaves = leaves_in(outputs)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in given.tensors}
        is_new = len(made) == 1 and (last is not None or made[0].untyped_storage()._cdata not in storages)
        flows = is_new and all(isinstance(leaf, KNOWN) for leaf in leaves)
        return cls(
            weakref.ref(made[0]) if flows else None,
            given.classes,
            [None if tensor is last else weakref.ref(tensor) for tensor in given.tensors],
            given.plain,
            replaced(outputs, {id(made[0]): stand_in}) if flows else None,
            operators,
        )

    def flow_in(self, given: _Given) -> Tensor | None:
        """Return the tensor that this call returned, if it is among the arguments of the next one."""
        flow = None if self.flow is None else self.flow()
        return next((tensor for tensor in given.tensors if tensor is flow), None)

    def is_followed_by(self, given: _Given, operators: int) -> bool:
        """Return whether the next call gets the same arguments, but for what each got from the call before it."""
        flow = self.flow_in(given)
        if flow is None or operators != self.operators or given.plain is None or self.plain is None:
            return False
        same = given.classes == self.classes and len(given.tensors) == len(self.tensors)
        same = same and all(map(_same, given.plain, self.plain))
        pairs = list(zip(given.tensors, self.tensors, strict=False))
        return same and all(
            tensor is flow if before is None else tensor is before() and not tensor.requires_grad
            for tensor, before in pairs
        )


_NONE = _Call(None, [], [], None, None, -1)


class _Watched:
    """A module whose reads and writes of attributes are recorded, with those of the modules in it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.reads, self.writes = set[Attribute](), set[Attribute]()
        self._classes: dict[int, type] = {}
        for part in module.modules():
            self._classes[id(part)] = type(part)
            object.__setattr__(part, "__class__", self._watched(type(part)))

    def _watched(self, base: Any) -> type:
        def read(module: nn.Module, name: str) -> Any:
            self.reads.add((id(module), name))
            return base.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            self.writes.add((id(module), name))
            base.__setattr__(module, name, value)

        return type(base.__name__, (base,), {"__getattribute__": read, "__setattr__": write})

    def differences(self, other: nn.Module) -> set[Attribute] | None:
        """Return the attributes in which this module and `other` differ; None if they have other parts or sizes."""
        differing: set[Attribute] = set()
        return differing if self._compare(self._module, other, differing) else None

    def _compare(self, module: nn.Module, other: nn.Module, differing: set[Attribute]) -> bool:
        if module is other:
            return True
        mine, theirs = vars(module), vars(other)
        parts, others = mine["_modules"], theirs["_modules"]
        if self._classes[id(module)] is not type(other) or [*parts] != [*others]:
            return False
        if not all(_same(mine[name], theirs[name]) for name in ("_parameters", "_buffers")):
            return False
        differing.update((id(module), name) for name in _unequal(mine, theirs))
        return all(
            part is others[name]
            or (part is not None and others[name] is not None and self._compare(part, others[name], differing))
            for name, part in parts.items()
        )


def _unequal(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of attributes that differ, and of hooks, which may do anything."""
    yield from mine.keys() ^ theirs.keys()
    for name in mine.keys() & theirs.keys() - {"_modules", "_parameters", "_buffers"}:
        if not _same(mine[name], theirs[name]) or (name.endswith("_hooks") and mine[name]):
            yield name


def _same(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, Tensor):
        sizes = [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_meta) for t in (mine, theirs)]
        return mine.is_meta and sizes[0] == sizes[1]
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, dict):
        return [*mine] == [*theirs] and all(map(_same, mine.values(), theirs.values()))
    return isinstance(mine, BY_VALUE) and bool(mine == theirs)
