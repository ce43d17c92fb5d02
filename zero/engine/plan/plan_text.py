"""The bytes of a plan as text: kind by kind and tier by tier."""

from collections.abc import Mapping

from zero.core.sizes import size_text


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
