"""Plans as text: every stage and preset side by side, what fits, what is best; and a plan against what was measured."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from zero.core import suggest
from zero.core.placement import TIERS, size_text
from zero.engine.plan import KINDS, Plan
from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import Choice, best, bytes_by_tier, choices, nearest, with_activations
from zero.trainer.planning.cost import seconds_text
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.papers import OURS, PAPERS
from zero.trainer.planning.rates import assumed, with_disk_or_without
from zero.trainer.task import build_task

UNITS = ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"), (0, "B"))
"""Of model states: powers of ten, as the papers count them."""

COLUMNS = 80
"""Of sentences, and of tables but for what is lacking; what is to be copied stays on a line."""

NOT_REPEATED = (
    *("mode", "zero.stage", "offload", "offload.optimizer", "offload.param", "offload.grad"),
    *("batch.micro", "batch.accumulate", "batch.global", "launch.ranks"),
)
"""Keys of a command line that the proposed one says itself; and all of `plan.*`."""


def plan_text(config: Config, overrides: Sequence[str] = ()) -> tuple[str, bool]:
    """What mode=plan prints, from shapes alone, and whether anything fits.

    Args:
        overrides: the user's command line, to be repeated in the one that is proposed.

    Raises:
        ConfigError: the batch does not divide over the ranks, or a setting that no plan can be made with.
    """
    machine = Machine.described(config)
    config, notes = _with_rows(config, machine.ranks)
    if config.zero.activations == "auto":
        config = with_activations(config, "remat")
        notes += ["zero.activations=auto is counted as remat, the least; a run keeps those of as many units as fit"]
    model = build_task(config).model
    activations = Activations(config, model)
    if machine.paper:
        rates = assumed(config, machine)
    else:
        machine, rates, without = with_disk_or_without(config, machine, model)
        notes += without
    found = choices(config, machine, model, rates, activations=activations)
    numel = found[0].plan.numel
    lines = [
        *_sentence(
            f"plan for {numel:,} parameters, {config.precision.compute}, rows of {config.model.seq} tokens, "
            f"activations {suggest.shown(config.zero.activations)}"
        ),
        *_sentence(f"machine: {machine}"),
        *(line for one in notes for line in _sentence(one)),
        "",
        "bytes per rank",
        *_details(found),
        *_formulas(found, numel, machine.ranks),
        "",
        *_summary(found, machine),
        *_sentence(f"rates {rates.source}"),
        *_sentence("activations are counted from shapes, with the CPU's kernels; a few MiB of kernels are in no row"),
        "",
        *_proposal(found, machine, overrides),
    ]
    return "\n".join(lines), best(found) is not None


def against_measured(plan: Plan, measured: Mapping[str, Mapping[str, int]], peak_bytes: int | None = None) -> str:
    """Plan beside what is really held, per tier. Activations exist within a step only: they are estimated unless a
    peak is given.

    Args:
        measured: of `zero.engine.measured`.
        peak_bytes: the most that tensors took at once in the memory that computes: the GPU's own counter, or by how
            much this process grew on a CPU. Activations are in it.
    """
    planned = {tier: sum(n for kind, n in kinds.items() if kind != "activations") for tier, kinds in plan.bytes.items()}
    found = {tier: sum(kinds.values()) for tier, kinds in measured.items()}
    rows: list[tuple[str, int, int]] = [
        (tier, planned.get(tier, 0), found.get(tier, 0)) for tier in TIERS if planned.get(tier, 0) or found.get(tier, 0)
    ]
    if peak_bytes is not None:
        on_host = plan.world.compute.shares_memory
        rows.append(("peak", bytes_by_tier(plan)["host" if on_host else "device"], peak_bytes))
    lines = [f"{'per rank':<12} {'plan':>12} {'measured':>14} {'ratio':>7}"]
    lines += [f"{name:<12} {size_text(a):>12} {size_text(b):>14} {b / a if a else 1:>7.3f}" for name, a, b in rows]
    if peak_bytes is None and plan.activation_bytes:
        lines.append(f"{'activations':<12} {size_text(plan.activation_bytes):>12} {'not measured':>14}")
    return "\n".join(lines)


def _with_rows(config: Config, ranks: int) -> tuple[Config, list[str]]:
    """The batch, made a multiple of ranks where it is fewer rows than ranks; and a note about that."""
    rows = config.batch.global_
    if rows == "auto" or rows >= ranks:
        return config, []
    note = f"batch.global={rows} is less than a row for each rank: planned with batch.global={ranks}"
    return config.model_copy(update={"batch": config.batch.model_copy(update={"global_": ranks})}), [note]


def _details(found: Sequence[Choice]) -> Iterator[str]:
    """For each preset a block: tier and kind x stage."""
    for preset in dict.fromkeys(one.preset for one in found):
        block = [one for one in found if one.preset == preset]
        bytes_of = [one.plan.bytes for one in block]
        stages = "".join(f"{f'stage {one.plan.stage.level}':>12}" for one in block)
        yield f"{f'offload={preset}':<28}{stages}"
        for tier in TIERS:
            for kind in KINDS:
                row = [nbytes.get(tier, {}).get(kind, 0) for nbytes in bytes_of]
                if any(row):
                    cells = "".join(f"{size_text(n) if n else '':>12}" for n in row)
                    yield f"  {tier:<8}{kind:<18}{cells}".rstrip()
        yield ""


def _summary(found: Sequence[Choice], machine: Machine) -> Iterator[str]:
    """One line for each setting; a refusal that several share follows once, below."""
    tiers = [tier for tier in TIERS if tier != "device" or machine.device == "cuda"]
    winner = best(found)
    heads = "".join(f"{tier:>11}" for tier in tiers)
    yield f"  {'stage':<6}{'offload':<9}{heads}{'micro':>7}{'step':>11}  fits"
    room = dict(zip(("device", "host", "nvme"), machine.room, strict=True))
    yield f"  {'room of a rank':<15}" + "".join(f"{size_text(room[tier] or 0):>11}" for tier in tiers)
    for one in found:
        needs = bytes_by_tier(one.plan)
        sizes = "".join(f"{size_text(needs[tier]) if needs.get(tier) else '':>11}" for tier in tiers)
        micro = one.config.batch.numbers()[1]
        lacks = ", ".join(f"{short.tier} {size_text(short.need_bytes - short.room_bytes)}" for short in one.short)
        verdict = "yes" if one.fits else f"no, lacks {lacks}" if lacks else "no"
        mark = "*" if one is winner else " "
        step = seconds_text(one.seconds)
        yield f"{mark} {one.plan.stage.level:<6}{one.preset:<9}{sizes}{micro:>7}{step:>11}  {verdict}"
    shown_below = None if winner else nearest(found).refusal
    for refusal in dict.fromkeys(one.refusal for one in found if one.refusal and not one.short):
        if refusal != shown_below:
            yield from _sentence(f"no: {refusal}")
    if any(one.short for one in found):
        text = "a rank has its share of a node's host memory and disk; another machine is described by"
        yield from _sentence(f"{text} plan.device_memory, plan.host_memory, plan.disk and plan.ranks_per_node")


def _proposal(found: Sequence[Choice], machine: Machine, overrides: Sequence[str]) -> Iterator[str]:
    winner = best(found)
    if winner is None:
        least = nearest(found)
        yield from _sentence(f"nothing fits; nearest is {' '.join(least.keys)}: {least.refusal}")
        return
    text = "* the fastest that fits; of those alike what moves least, then what takes least"
    yield from _sentence(f"{text}: {seconds_text(winner.seconds)} a step")
    repeated = [one for one in overrides if one.split("=")[0].lstrip("+") not in NOT_REPEATED]
    repeated = [one for one in repeated if not one.startswith(("plan.", "hydra", "-"))]
    rows = winner.config.batch.numbers()[0]
    keys = [*repeated, *winner.keys, f"batch.global={rows}"]
    if machine.ranks > machine.ranks_per_node:
        nodes = -(-machine.ranks // machine.ranks_per_node)
        yield f"  torchrun --nnodes {nodes} --nproc-per-node {machine.ranks_per_node} train.py {' '.join(keys)}"
    else:
        yield f"  python train.py launch.ranks={machine.ranks} {' '.join(keys)}"


def _formulas(found: Sequence[Choice], numel: int, ranks: int) -> Iterator[str]:
    """Model states by the papers' formula, by ours, and as planned."""
    planned = [_states_bytes(one.plan) for one in found if one.preset == "none"]
    power, name = next((power, name) for power, name in UNITS if OURS[0].of(numel, ranks) >= 10**power)
    unit = 10**power
    yield f"model states per rank in {name} (1e{power} bytes), P = {numel:,} parameters, W = {ranks:,}"
    yield f"  {'':<8}{'papers':<25}{'ours (in bf16)':<28}as planned"
    for stage, (paper, ours, plan_bytes) in enumerate(zip(PAPERS, OURS, planned, strict=True)):
        left, right = (f"{f!s:<10} = {f.of(numel, ranks) / unit:>8.3g}" for f in (paper, ours))
        yield f"  stage {stage:<2}{left:<25}{right:<28}{plan_bytes / unit:>8.3g}"


def _sentence(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _states_bytes(plan: Plan) -> int:
    """Parameters, gradients, master and moments, on any tier."""
    states = ("parameters", "gradients", "master", "moments")
    return sum(kinds.get(kind, 0) for kinds in plan.bytes.values() for kind in states)
