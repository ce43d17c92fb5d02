"""Split a model into units, the groups of parameters that are gathered and released together.

A tied weight belongs to the unit of the innermost site that contains its first occurrence in the module tree, and the
innermost sites around its other occurrences need that unit too. Matrices that are updated as a whole have units of
their own; all norms and biases of the sites with such matrices are one unit, the shared unit.

By default every element of an outermost `ModuleList` or `Sequential` is a site. The other children, with parameters, of
the modules that contain these lists are sites too, so that an embedding or a head is not gathered for the whole step. A
containing module that owns parameters directly is itself a site. Alternatively the user names the classes of sites.

The user's model is not changed: a `Splitting` consists of names and sizes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import nn

from zero.core.formats import PackedFormat
from zero.core.layout import Layout
from zero.core.matrices import Matrices
from zero.core.optim import Transform
from zero.core.suggest import meant
from zero.distributed.mesh import local_part
from zero.engine.model.unit import ROOT, Binding, Flat, Owner, Site, Splitting, UnitSpec, first_to_last
from zero.engine.model.unsupported import check_model
from zero.errors import PlanError
from zero.store import PageKind

DEFAULT_POLICY = "auto"
"""The word that stands for the default policy in a list of class names."""

SHARED, APART = "(vectors)", " matrices"
"""The name of the shared unit, and the end of the name of a unit of matrices whose site also has a unit of other
parameters."""


_Chain = tuple[str, ...]
"""Paths of nested sites, the outermost first. A module at several places of the model is in several chains."""


class _Visited(NamedTuple):
    """A parameter that `_walk` has visited, with its full name and the path of its unit's site.

    `shape` is the shape of its values on this rank: of a DTensor, those of the local part.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    unit: str


def split(
    model: nn.Module,
    *,
    world_size: int,
    class_names: Sequence[str] | None = None,
    optimizer: Transform | None = None,
    bucket_numel: int = 0,
    packed: Collection[str] = (),
    form: PackedFormat | None = None,
) -> Splitting:
    """Return the units and sites of `model`. Its parameters may be on any device, including meta.

    Args:
        world_size: the number of ranks that a flat tensor is sharded over.
        class_names: classes whose instances are sites; None for the default policy of this module's docstring. If
            "auto" is one of the names, the default policy is used, but instances of the other classes are sites as a
            whole.
        optimizer: chooses the group of each parameter, and the matrices that get units of their own; None: all are in
            group 0.
        bucket_numel: units that follow each other are merged while their parameters have at most this many elements.
        packed: names of the frozen parameters that are stored in a packed format.
        form: that format, if there is one.

    Raises:
        PlanError: the model has no parameters, no module of a named class, or a part that `unsupported` rejects.
    """
    check_model(model)
    roots = _roots(model, class_names or (DEFAULT_POLICY,))
    visited, needs, owners, chains = _walk(model, roots)
    if not visited:
        raise PlanError(f"{type(model).__name__} has no parameters: there is nothing to train or to shard")
    lookups = _lookups(model, visited)
    into = _merged(visited.values(), lookups, bucket_numel)
    lookups = {into[name] for name in lookups}
    embedded = embedding_ids(model)

    def group(key: int, parameter: _Visited) -> int:
        if optimizer is None:
            return 0
        return optimizer.group_of(parameter.name, parameter.shape, embedding=key in embedded)

    groups = {key: group(key, parameter) for key, parameter in visited.items()}
    names = _by_optimizer({key: into[parameter.unit] for key, parameter in visited.items()}, visited, optimizer, groups)
    parameters: dict[str, list[_Visited]] = {}  # by the name of their unit
    for key, name in names.items():
        parameters.setdefault(name, []).append(visited[key])
    by_name = {visited[key].name: number for key, number in groups.items()}
    units = tuple(
        _unit(index, name, owned, world_size, optimizer, by_name, form, packed, lookup=name in lookups)
        for index, (name, owned) in enumerate(parameters.items())
    )
    wanted = {path: {local: visited[key].name for local, key in bound.items()} for path, bound in needs.items()}
    sites = _sites(units, wanted, chains)
    places = tuple(Owner(path, tuple((local, visited[key].name) for local, key in slots)) for path, slots in owners)
    shared = {unit.index for unit in units if unit.shared}
    return Splitting(units, sites, places, _depth(sites, chains, shared))


def _sites(
    units: Sequence[UnitSpec], wanted: Mapping[str, Mapping[str, str]], chains: Iterable[_Chain]
) -> tuple[Site, ...]:
    """Return the sites, which say where in the units their parameters are.

    Args:
        wanted: a site's path -> local name -> full name of each parameter.
    """
    where = {
        slot.name: (unit.index, number, trainable)
        for unit in units
        for trainable, slots in ((True, unit.trainable.slots), (False, unit.frozen_slots))
        for number, slot in enumerate(slots)
    }
    containing = {path for chain in chains for path in chain[:-1]}

    def bindings(names: Mapping[str, str]) -> tuple[Binding, ...]:
        bound = (Binding(local, *where[name]) for local, name in names.items())
        # the shared unit comes last, because a site is known by its first unit
        return tuple(sorted(bound, key=lambda binding: units[binding.unit].shared))

    return tuple(Site(path, bindings(names), contains_sites=path in containing) for path, names in wanted.items())


def _unit(
    index: int,
    name: str,
    parameters: Sequence[_Visited],
    world_size: int,
    optimizer: Transform | None,
    groups: Mapping[str, int],
    form: PackedFormat | None,
    packed: Collection[str],
    *,
    lookup: bool,
) -> UnitSpec:
    shapes: dict[PageKind, dict[str, tuple[int, ...]]] = {kind: {} for kind in PageKind}
    for full_name, parameter, shape, _ in parameters:
        frozen = PageKind.PACKED if full_name in packed else PageKind.FROZEN
        shapes[PageKind.PARAM if parameter.requires_grad else frozen][full_name] = shape
    trainable, plain = (
        Layout.of(shapes[kind], world_size=world_size, groups=groups) for kind in (PageKind.PARAM, PageKind.FROZEN)
    )
    flats = [Flat(PageKind.PARAM, trainable, trainable, 0), Flat(PageKind.FROZEN, plain, plain, trainable.P)]
    if form is not None:
        values = Layout.of(shapes[PageKind.PACKED], world_size=1)
        stored = Layout.of({slot.name: (form.nbytes(slot.numel),) for slot in values.slots}, world_size=world_size)
        flats.append(Flat(PageKind.PACKED, stored, values, trainable.P + plain.P, form))
    moments: tuple[str, ...] = ()
    matrices: tuple[Matrices, ...] = ()
    if optimizer is not None and trainable.slots:
        group = trainable.slots[0].group
        moments, matrices = optimizer.moments_of(group), optimizer.matrices_of(trainable, group)
    shared = name == SHARED
    members = (SHARED,) if shared else tuple(dict.fromkeys(unit or ROOT for *_, unit in parameters))
    return UnitSpec(index, name or ROOT, members, tuple(flats), lookup, moments, matrices, shared)


def _by_optimizer(
    names: dict[int, str],
    visited: Mapping[int, _Visited],
    optimizer: Transform | None,
    groups: Mapping[int, int],
) -> dict[int, str]:
    """Return the names of units, by parameter id, with units of their own for matrices that are updated as a whole.

    Norms and biases of the same sites all share one unit, so that they take one gather and one reduction.
    """
    if optimizer is None or optimizer.matrix_rule is None:
        return names
    matrices = {
        key
        for key, (_, parameter, *_) in visited.items()
        if parameter.requires_grad and optimizer.takes_matrices(groups[key])
    }
    mixed = {names[key] for key in matrices}
    vectors = {key for key, (_, _, shape, _) in visited.items() if names[key] in mixed and len(shape) < 2}
    also = {name for key, name in names.items() if key not in matrices | vectors}
    apart = {key: f"{names[key] or ROOT}{APART}" for key in matrices if names[key] in also}
    return names | apart | dict.fromkeys(vectors, SHARED)


def embedding_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of `nn.Embedding` modules."""
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return {id(parameter) for module in modules for parameter in module._parameters.values()}


def _lookups(model: nn.Module, visited: Mapping[int, _Visited]) -> set[str]:
    """Return the names of units whose parameters all belong to `nn.Embedding` modules only."""
    read = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module._parameters.values()
    }
    units = {parameter.unit for parameter in visited.values()}
    return units - {parameter.unit for key, parameter in visited.items() if key in read}


def _merged(visited: Iterable[_Visited], lookups: set[str], bucket_numel: int) -> dict[str, str]:
    """Return the name of the unit that each unit is merged into, by the unit's name; alone it keeps its name.

    The root is not merged, because it is gathered as long as the model runs. Units with and without `lookup` are not
    merged, because backward does not gather units with `lookup`.
    """
    numels: dict[str, int] = {}
    for _, _, shape, unit in visited:
        numels[unit] = numels.get(unit, 0) + prod(shape)
    runs: list[list[str]] = []
    last, total = "", 0
    for name, numel in numels.items():
        if name and last and total + numel <= bucket_numel and (name in lookups) == (last in lookups):
            runs[-1].append(name)
            total += numel
        else:
            runs.append([name])
            total = numel
        last = name
    return {name: first_to_last(run) for run in runs for name in run}


def _walk(
    model: nn.Module, roots: set[int]
) -> tuple[dict[int, _Visited], dict[str, dict[str, int]], list[tuple[str, list[tuple[str, int]]]], set[_Chain]]:
    """Visit every module; tied parameters are recognized by identity.

    Returns:
        (parameter's id -> its record, site's path -> local name -> parameter's id, path and parameters of each owner,
        chains of sites).
    """
    visited: dict[int, _Visited] = {}
    needs: dict[str, dict[str, int]] = {}
    owners: list[tuple[str, list[tuple[str, int]]]] = []
    sites: dict[int, str] = {}  # by module id: a module at two places is one site
    bound: set[tuple[str, int]] = set()  # (site, module id): a module with two names in a site gets one binding
    chains: set[_Chain] = {("",)}

    def visit(module: nn.Module, path: str, chain: _Chain, local: str) -> None:
        if id(module) in roots and path != chain[-1]:
            chain, local = (*chain, sites.setdefault(id(module), path)), ""
            chains.add(chain)
        site = chain[-1]
        parameters = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
        for name, parameter in parameters:
            shape = tuple(local_part(parameter).shape)
            visited.setdefault(id(parameter), _Visited(f"{path}.{name}".lstrip("."), parameter, shape, site))
            if (site, id(module)) not in bound:
                needs.setdefault(site, {})[local + name] = id(parameter)
        bound.add((site, id(module)))
        if parameters:
            owners.append((path, [(name, id(parameter)) for name, parameter in parameters]))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}".lstrip("."), chain, f"{local}{name}.")

    visit(model, "", ("",), "")
    with_parameters = {tuple(path for path in chain if path in needs) for chain in chains}
    return visited, needs, owners, with_parameters


def _depth(sites: Sequence[Site], chains: Iterable[_Chain], shared: set[int]) -> int:
    """Return `Splitting.depth`.

    Args:
        shared: the index of the shared unit, if there is one.
    """
    units_of = {site.path: {*site.units} - shared for site in sites}
    return max(len({unit for path in chain for unit in units_of[path]}) for chain in chains) - 1


def _roots(model: nn.Module, class_names: Sequence[str]) -> set[int]:
    named = _by_class(model, [name for name in class_names if name != DEFAULT_POLICY])
    return _by_default(model, named) if DEFAULT_POLICY in class_names else named


def _by_class(model: nn.Module, class_names: Sequence[str]) -> set[int]:
    present = {type(module).__name__ for module in model.modules()}
    for name in class_names:
        if name not in present:
            raise PlanError(f"zero.units: no module of class {name} in the model{meant(name, present)}")
    return {id(module) for module in model.modules() if type(module).__name__ in set(class_names)}


def _by_default(model: nn.Module, named: set[int]) -> set[int]:
    if id(model) in named:
        return {id(model)}
    roots: set[int] = set()

    def place(module: nn.Module) -> None:
        if not _owns_parameters(module):
            return
        if type(module).forward is not nn.Module.forward or id(module) in named:
            roots.add(id(module))
        elif isinstance(module, nn.ModuleList):
            for element in module:
                place(element)
        else:
            descend(module)

    def descend(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in named:
                place(child)
            elif isinstance(child, nn.ModuleList | nn.Sequential):
                for element in child:
                    place(element)
            elif _holds_blocks(child):
                descend(child)
            else:
                place(child)

    if isinstance(model, nn.Sequential):
        for element in model:
            place(element)
    else:
        descend(model)
    return roots


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _holds_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(inner, nn.ModuleList | nn.Sequential) and _owns_parameters(inner) for inner in module.modules()
    )
