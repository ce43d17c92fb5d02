"""The tier of each page of a plan, and the bytes that the plan holds on each tier, also as text."""

from collections import Counter
from collections.abc import Mapping, Sequence

from zero.core.placement import Placement, Tier
from zero.core.sizes import size_text
from zero.engine.model import UnitSpec
from zero.engine.plan.page_table import PageTable, UnitPage
from zero.engine.plan.placing import Slots
from zero.store import PARAMETER_KINDS, Page, PageKind

KINDS = (
    *("parameters", "gathered units", "secondary shards", "gradients", "gradient flats", "node sums"),
    *("gradient buffers", "matrices", "master", "moments", "buffers", "activations", "staging", "arena"),
)
SOMETIMES = ("secondary shards", "node sums", "gradient buffers", "matrices", "activations", "staging", "arena")
"""Kinds that `Plan.bytes` leaves out if they have no bytes. If nothing is trained it leaves out every empty kind."""


def tier_of(page: Page, table: PageTable, placement: Placement) -> Tier:
    """Return the tier of a page."""
    if page.kind in PARAMETER_KINDS:
        return placement.param
    if page.kind == PageKind.SECONDARY:
        assert table.facts.secondary is not None
        return table.facts.secondary
    return placement.grad if page.kind in table.grad_dtypes else placement.optimizer[page.unit, page.number]


def tier_counts(
    page: UnitPage, units: Sequence[UnitSpec], table: PageTable, placement: Placement
) -> Mapping[Tier, int]:
    """Return the number of these units whose page is on a tier, for each tier with such a page."""
    if table.is_updated(page):
        return Counter(placement.optimizer[unit.index, page.number] for unit in units)
    return {tier_of(Page(units[0].index, page.kind, page.number), table, placement): len(units)}


def held_bytes(
    table: PageTable, placement: Placement, slots: Slots, fixed: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return a dict from tier to kind to bytes, see `Plan.bytes`.

    Args:
        fixed: bytes by tier and kind that do not depend on the table.
    """
    held: dict[str, Counter[str]] = {"device": Counter(), "host": Counter(), "nvme": Counter()}
    held["device"].update(table.sizes.buffer_bytes())
    held["device"]["staging"] = slots.staging_bytes
    held["host"]["arena"] = slots.arena_bytes
    held[placement.param]["parameters"] = table.param_bytes()
    held[placement.grad]["gradients"] = table.grad_bytes()
    for pages, units in table.equal_units:
        for page in pages:
            if table.is_updated(page) or page.kind == PageKind.SECONDARY:
                for tier, count in tier_counts(page, units, table, placement).items():
                    held[tier][kind_of(page, table)] += count * table.bytes_on(page.spec, tier)
    for memory, nbytes_of in fixed.items():
        held[memory].update(nbytes_of)
    always = [kind for kind in KINDS if kind not in SOMETIMES] if table.facts.trains else []
    return {
        tier: {kind: kinds[kind] for kind in KINDS if kinds[kind] or (tier == "device" and kind in always)}
        for tier, kinds in held.items()
        if tier == "device" or any(kinds.values())
    }


def between_steps(held: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the bytes of `Plan.bytes` on each tier between two steps, when there are no activations."""
    return {tier: sum(kinds.values()) - kinds.get("activations", 0) for tier, kinds in held.items()}


def kind_of(page: Page | UnitPage, table: PageTable) -> str:
    """Return the kind under which a page is counted."""
    if table.is_updated(page):
        return "master" if page.kind == table.facts.precision.master.kind else "moments"
    if page.kind == PageKind.SECONDARY:
        return "secondary shards"
    return "gradients" if page.kind in table.grad_dtypes else "parameters"


def table_text(held: Mapping[str, Mapping[str, int]]) -> str:
    """Return a table of the bytes of each kind on each tier that is used, with their totals."""
    tiers = {tier: by_kind for tier, by_kind in held.items() if any(by_kind.values())}
    lines = [f"{'per rank':<16} " + " ".join(f"{tier:>12}" for tier in tiers)]
    kinds = dict.fromkeys(kind for tier in tiers.values() for kind, nbytes in tier.items() if nbytes)
    for kind in kinds:
        cells = (size_text(tier[kind]) if tier.get(kind) else "" for tier in tiers.values())
        lines.append(f"{kind:<16} " + " ".join(f"{cell:>12}" for cell in cells).rstrip())
    totals = " ".join(f"{size_text(sum(tier.values())):>12}" for tier in tiers.values())
    return "\n".join([*lines, f"{'total':<16} {totals}"])
