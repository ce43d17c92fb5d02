"""Checks of a plan's settings, and what their patterns select."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

from torch import nn

from zero.core import checks
from zero.core.activations import ACTIVATIONS, KEEP
from zero.core.offload import Offload
from zero.core.optim import Transform
from zero.core.placement import Room
from zero.core.precision import Precision
from zero.core.sizes import MiB
from zero.core.stage import Stage
from zero.core.suggest import some
from zero.distributed.mesh import local_part
from zero.distributed.routes import GATHERS, SUMS
from zero.distributed.world import World
from zero.engine.model import Backend, Site, Splitting, UnitSpec, check_backend, packed_names, refuse_taken, split
from zero.engine.plan.facts import Facts, Scope, sharers
from zero.errors import PlanError

Update = Literal["lazy", "serial"]
Bucket = int | Literal["auto"]

AUTO_BUCKET_BYTES = 4 * MiB
"""The largest unit that `bucket="auto"` merges. With gloo a unit takes 2 to 3 ms of a core in each step, and copies
between ranks move about 4 MiB in that time."""

NUMBERS = {
    "prefetch": ("zero.prefetch", 0, "units"),
    "bucket": ("zero.bucket", 0, "bytes"),
    "accumulate": ("batch.accumulate", 1, "microbatches"),
    "rows": ("zero.rows", 0, "rows"),
    "activation_bytes": ("activation_bytes", 0, "bytes"),
    "host_activation_bytes": ("host_activation_bytes", 0, "bytes"),
}
"""Settings that are whole numbers: their names in messages, their least values and what they count."""


class Comparisons(NamedTuple):
    """Comparisons of values in forward, to find mistakes: the arguments `check_writes` and `check_rows` of a plan."""

    writes: bool
    rows: bool


class Arrangement(NamedTuple):
    """The settings of a plan that can change while a state trains. Only `accumulate` and `rows` change bits of results.

    `zero.move` does not change `rows`.
    """

    stage: Stage
    offload: Offload
    activations: Mapping[str, str]
    """The names of policies by patterns of names."""
    keep: Sequence[str]
    prefetch: int
    gather: str
    accumulate: int
    rows: int


class Origin(NamedTuple):
    """The part of a plan that is shared with the plans that are made from it for other settings.

    Attributes:
        room: bytes that this rank may use on each tier; None: the bytes that are free.
        facts: makes the facts from the settings that can change.
    """

    splitting: Splitting
    room: Room | None
    facts: Callable[..., Facts]


def refuse_strangers(model: object, optimizer: object, world: object) -> None:
    """Raise PlanError unless the arguments are a module that no state has taken over, a Transform and a World."""
    for key, value, kind, instead in (
        ("model", model, nn.Module, "Pass a torch.nn.Module."),
        (
            "optimizer",
            optimizer,
            Transform,
            "Make one with zero.adamw(lr), or pass torch's optimizer to zero.initialize.",
        ),
        ("world", world, World, "Make one with zero.open_world()."),
    ):
        checks.instance(key, value, kind, instead, PlanError)
    assert isinstance(model, nn.Module)
    refuse_taken(model)
    if type(model).__name__ == "OptimizedModule":  # compared by name to avoid importing torch's compiler
        raise PlanError(
            "model was compiled by torch.compile. Pass the model itself and zero.Plan(compile=True), which compiles "
            "each unit."
        )


def check_settings(
    *, update: str, gather: str, reduce: str, shard: str, comparisons: Comparisons, **numbers: int
) -> None:
    """Raise PlanError unless these settings of a plan have values that are known.

    Args:
        numbers: prefetch, bucket, accumulate, rows, activation_bytes, host_activation_bytes.
    """
    for name, number in numbers.items():
        key, least, of = NUMBERS[name]
        checks.whole(key, number, least, of, PlanError)
    for name, value in comparisons._asdict().items():
        checks.boolean(f"zero.check_{name}", value, PlanError)
    for name, word, known in (
        *(("update", update, get_args(Update)), ("gather", gather, ("auto", *GATHERS))),
        *(("reduce", reduce, ("auto", *SUMS)), ("shard", shard, get_args(Scope))),
    ):
        checks.one_of(f"zero.{name}", word, known, PlanError)


def policies_of(activations: str | Mapping[str, str], compile: Backend) -> Mapping[str, str]:
    """Return the names of policies of activations by patterns of names, checked."""
    check_backend(compile)
    policies = dict(activations) if isinstance(activations, Mapping) else {"*": activations}
    checks.patterns("zero.activations", [*policies], PlanError)
    for name in policies.values():
        checks.one_of("zero.activations", name, ACTIVATIONS, PlanError)
    for name in policies.values() if compile else ():
        if reason := ACTIVATIONS[name].not_compiled:
            raise PlanError(f"zero.activations={name} {reason}. Set zero.compile=false.")
    return policies


def activations_of(splitting: Splitting, by_pattern: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each site's activation policy, by the site's name.

    A site that contains others keeps its activations where the policy would recompute them: its recomputation would run
    the sites inside once more, and would hold all of their units at the same time.

    Raises:
        PlanError: a pattern matches no site.
    """
    _check_patterns("zero.activations", by_pattern, [site.name for site in splitting.sites])

    def policy(site: Site) -> str:
        name = next((name for pattern, name in by_pattern.items() if fnmatchcase(site.name, pattern)), KEEP.name)
        return KEEP.name if site.contains_sites and ACTIVATIONS[name].recomputes else name

    return {site.name: policy(site) for site in splitting.sites}


def split_for(
    model: nn.Module,
    optimizer: Transform,
    world: World,
    *,
    precision: Precision,
    units: Sequence[str | type[nn.Module]] | None,
    bucket: Bucket,
    shard: Scope,
) -> Splitting:
    """Return the units and sites of a plan with these settings; arguments as in `Plan`."""
    names, itemsize = class_names(units), precision.compute.itemsize
    if bucket == "auto":
        bucket = 0 if names else _auto_bucket(model, world, itemsize)
    return split(
        model,
        world_size=sharers(world, shard),
        class_names=names,
        optimizer=optimizer,
        bucket_numel=bucket // itemsize,
        packed=packed_names(model, precision),
        form=precision.frozen,
    )


def _auto_bucket(model: nn.Module, world: World, itemsize: int) -> int:
    """Return the bytes up to which `bucket="auto"` merges units of the default policy.

    One rank exchanges nothing and merges nothing. A merged unit has a quarter of the model at most, so that the next
    one is gathered while it computes. Stage and tiers do not count, because `zero.move` changes them.
    """
    if world.size == 1:
        return 0
    numel = sum(local_part(parameter).numel() for parameter in model.parameters())
    return min(AUTO_BUCKET_BYTES, numel * itemsize // 4)


def kept_units(splitting: Splitting, patterns: Sequence[str]) -> frozenset[int]:
    """Return the indices of the units that stay gathered: those with a name that matches a pattern, and the shared one.

    Raises:
        PlanError: a pattern matches no unit.
    """
    _check_patterns("zero.keep", patterns, [*dict.fromkeys(name for unit in splitting.units for name in unit.members)])

    def is_kept(unit: UnitSpec) -> bool:
        return any(fnmatchcase(name, pattern) for name in unit.members for pattern in patterns)

    return frozenset(unit.index for unit in splitting.units if unit.shared or is_kept(unit))


def class_names(units: Sequence[str | type[nn.Module]] | None) -> list[str] | None:
    """Return the names of the classes of sites; None for the default."""
    if units is None:
        return None
    if isinstance(units, type):
        raise PlanError(f"zero.units={units.__name__} is one class. Pass a list: [{units.__name__}].")
    names = (
        units
        if isinstance(units, str) or not isinstance(units, Iterable)
        else [unit.__name__ if isinstance(unit, type) else unit for unit in units]
    )
    return [*checks.patterns("zero.units", names, PlanError)]


def _check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(f"{key}: no unit is named {pattern}. There are {some(names)}.")
