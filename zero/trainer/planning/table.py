"""What mode=plan prints: every stage and preset side by side, what fits; and a plan against what was measured."""

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from zero.core import suggest
from zero.core.placement import TIERS, size_text
from zero.engine.plan import KINDS, Plan
from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import (
    Choice,
    best,
    bytes_by_tier,
    choice,
    choices,
    largest,
    nearest,
    with_activations,
)
from zero.trainer.planning.cost import seconds_text
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.rates import assumed, with_disk_or_without
from zero.trainer.planning.resolve_activations import resolve_activations
from zero.trainer.task import build_task

COLUMNS = 80
"""Width of sentences and tables, for terminals of 80 columns. Text to copy stays on one line."""

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
    auto = config.zero.activations == "auto"
    if auto:
        config = with_activations(config, "remat")
    model = build_task(config).model
    activations = Activations(config, model)
    if machine.paper:
        rates = assumed(config, machine)
    else:
        machine, rates, without = with_disk_or_without(config, machine, largest(config, machine, activations))
        notes += without
    found = choices(config, machine, model, rates, activations=activations)
    winner = best(found)
    if auto:
        notes += ["zero.activations=auto: the table counts remat, the least, by which a run chooses all else"]
    if auto and winner is not None:
        config_of_run, became = resolve_activations(winner.config, machine, model, activations, lambda: rates)
        counted = activations.resolved(config_of_run)
        winner = choice(config_of_run, winner.preset, machine, model, rates, counted)
        notes[-1] += f"; the answer counts what it then becomes: {became}"
    lines = [
        *_answer(winner, found, machine, overrides),
        "",
        *_sentence(
            f"{found[0].plan.numel:,} parameters, {config.precision.compute}, rows of {config.model.seq} tokens, "
            f"activations {'auto' if auto else suggest.shown(config.zero.activations)}"
        ),
        *_sentence(f"machine: {machine}"),
        *(line for one in notes for line in _sentence(one)),
        "",
        *_summary(found, machine),
        *_sentence(f"rates {rates.source}"),
        "",
        "bytes per rank",
        *_details(found),
        "the first line is the answer; what the numbers mean: docs/concepts.md, Plans",
    ]
    return "\n".join(lines), winner is not None


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


def _answer(
    winner: Choice | None, found: Sequence[Choice], machine: Machine, overrides: Sequence[str]
) -> Iterator[str]:
    """What fits best and what to type for it; or what is nearest to fitting."""
    if winner is None:
        least = nearest(found)
        yield from _sentence(f"nothing fits; nearest is {' '.join(least.keys)}: {least.refusal}")
        return
    stage, preset, *_ = winner.keys
    rows, config = winner.config.batch.numbers()[0], winner.config
    tokens = f"{rows * config.model.seq / winner.seconds:,.0f} tokens/s"
    names = {"device": "GPU memory", "host": "host memory", "nvme": "disk"}
    needs = bytes_by_tier(winner.plan)
    takes = " and ".join(f"{size_text(needs[tier])} of {names[tier]}" for tier in TIERS if needs.get(tier))
    text = f"fits: {stage} {preset}, about {seconds_text(winner.seconds)} a step, {tokens}; a rank takes {takes}"
    yield from _sentence(text)
    repeated = [one for one in overrides if one.split("=")[0].lstrip("+") not in NOT_REPEATED]
    kept, left = "hydra.searchpath", ("plan.", "hydra", "-")
    repeated = [one for one in repeated if one.startswith(kept) or not one.startswith(left)]
    keys = [*repeated, *winner.keys, f"batch.global={rows}"]
    if machine.ranks > machine.ranks_per_node:
        nodes = -(-machine.ranks // machine.ranks_per_node)
        yield f"  torchrun --nnodes {nodes} --nproc-per-node {machine.ranks_per_node} train.py {' '.join(keys)}"
    else:
        yield f"  python train.py launch.ranks={machine.ranks} {' '.join(keys)}"


def _summary(found: Sequence[Choice], machine: Machine) -> Iterator[str]:
    """A line for all settings with the same numbers; a refusal that several share follows once, below."""
    tiers = [tier for tier in TIERS if tier != "device" or machine.device == "cuda"]
    winner = best(found)
    heads = "".join(f"{tier:>11}" for tier in tiers)
    yield f"  {'stage':<6}{'offload':<10}{heads}{'micro':>7}{'step':>11}  fits"
    room = dict(zip(("device", "host", "nvme"), machine.room, strict=True))
    yield f"  {'room of a rank':<16}" + "".join(f"{size_text(room[tier] or 0):>11}" for tier in tiers)
    for same in _alike(found, lambda one: _cells(one, tiers)):
        mark = "*" if any(one is winner for one in same) else " "
        presets = ", ".join(dict.fromkeys(one.preset for one in same))
        yield from _row(f"{mark} {_stages(same):<6}{presets:<10}{_cells(same[0], tiers)}")
    shown_above = None if winner else nearest(found).refusal
    for refusal in dict.fromkeys(one.refusal for one in found if one.refusal and not one.lacks):
        if refusal != shown_above:
            yield from _sentence(f"no: {refusal}")


def _row(line: str) -> Iterator[str]:
    """A line of the table. If the terminal would break it, the part about lacking memory is on the next line."""
    if len(line) > shutil.get_terminal_size((len(line), 24)).columns:
        line, _, lacks = line.partition(" lacks ")
        yield line
        line = f"{'':8}lacks {lacks}"
    yield line


def _cells(one: Choice, tiers: Sequence[str]) -> str:
    needs = bytes_by_tier(one.plan)
    sizes = "".join(f"{size_text(needs[tier]) if needs.get(tier) else '':>11}" for tier in tiers)
    lacks = ", ".join(f"{tier} {size_text(nbytes)}" for tier, nbytes in one.lacks.items())
    verdict = "yes" if one.fits else f"no, lacks {lacks}" if lacks else "no"
    return f"{sizes}{one.config.batch.numbers()[1]:>7}{seconds_text(one.seconds):>11}  {verdict}"


def _alike(found: Sequence[Choice], told: Callable[[Choice], str]) -> list[list[Choice]]:
    """Settings for which the same is told: each group is some stages with the same presets each."""
    by_stage: dict[tuple[int, str], list[Choice]] = {}
    for one in found:
        by_stage.setdefault((one.plan.stage.level, told(one)), []).append(one)
    groups: dict[tuple[str, ...], list[Choice]] = {}
    for (_, text), same in by_stage.items():
        groups.setdefault((text, *(one.preset for one in same)), []).extend(same)
    return list(groups.values())


def _stages(same: Sequence[Choice]) -> str:
    """0-3, or 0, 2."""
    levels = sorted({one.plan.stage.level for one in same})
    together = len(levels) > 1 and levels[-1] - levels[0] == len(levels) - 1
    return f"{levels[0]}-{levels[-1]}" if together else ", ".join(map(str, levels))


def _details(found: Sequence[Choice]) -> Iterator[str]:
    """For each preset a block: tier and kind x stage, stages with the same bytes in one column."""
    for preset in dict.fromkeys(one.preset for one in found):
        block = _alike([one for one in found if one.preset == preset], lambda one: str(one.plan.bytes))
        bytes_of = [same[0].plan.bytes for same in block]
        stages = "".join(f"{f'stage {_stages(same)}':>13}" for same in block)
        yield f"{f'offload={preset}':<28}{stages}"
        for tier in TIERS:
            for kind in KINDS:
                row = [nbytes.get(tier, {}).get(kind, 0) for nbytes in bytes_of]
                if any(row):
                    cells = "".join(f"{size_text(n) if n else '':>13}" for n in row)
                    yield f"  {tier:<8}{kind:<18}{cells}".rstrip()
        yield ""


def _sentence(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
