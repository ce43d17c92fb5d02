"""The text of mode=plan: the answer, below a table of all stages and offload presets with `plan.all`; and a table of
planned and measured bytes."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf

from zero.core import suggest
from zero.core.activations import REMAT
from zero.core.placement import TIERS
from zero.core.sizes import size_text
from zero.engine.plan import KINDS, Plan, between_steps
from zero.engine.pressure import watches
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.planning.choices import (
    Choice,
    best,
    bytes_by_tier,
    choices,
    largest,
    nearest_choice,
    plan_choice,
    planned,
    with_activations,
    with_compute,
)
from zero.trainer.planning.cost import (
    ALIKE,
    DISK_RATES,
    Rates,
    break_even,
    limits,
    scaled_work,
    seconds_text,
    step_seconds,
)
from zero.trainer.planning.longest_row import ROUND_TOKENS, longest_row
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.predictor import seconds_of_moves
from zero.trainer.planning.probes import with_disk_or_without
from zero.trainer.planning.rates import assumed, with_drives
from zero.trainer.planning.resolve_activations import resolve_activations
from zero.trainer.planning.shortage import moves_of_pressure, moves_of_retry
from zero.trainer.planning.traces.activations import ActivationTraces
from zero.trainer.run.task import build_task

COLUMNS = 80
"""Width of wrapped sentences, in characters. Commands to copy stay on one line."""

NOT_REPEATED = (
    *("mode", "zero.stage", "offload", "offload.optimizer", "offload.param", "offload.grad"),
    *("batch.micro", "batch.accumulate", "batch.global", "launch.ranks", "zero.rows"),
)
"""Keys that the proposed command line sets itself, so that those of the user's command line are left out. Keys of
`plan.*` are left out as well."""


def plan_text(config: Config, overrides: Sequence[str] = ()) -> tuple[str, bool]:
    """Return the text of mode=plan, which ends in the answer, and whether any choice fits.

    Args:
        overrides: the user's command line, to be repeated in the proposed one.

    Raises:
        ConfigError: the batch does not divide over the ranks, or no plan can be made with a setting.
    """
    machine = Machine.described(config)
    config, notes = _with_rows(config, config.groups(machine.ranks))
    auto = config.zero.activations == "auto"
    if auto:
        config = with_activations(config, REMAT.name)
    activations = ActivationTraces(config, build_task(config, machine.world).model)
    if machine.paper:
        rates = assumed(config, machine)
    else:
        machine, rates, without = with_disk_or_without(config, machine, largest(config, machine, activations))
        notes += without
    rates = with_drives(rates, config, 1 if machine.paper else len(config.offload.paths))
    candidates = choices(config, machine, activations, rates)
    winner = best(candidates)
    if auto:
        notes += ["zero.activations=auto: the table assumes remat for every unit, as a run does to choose all else"]
    if auto and winner is not None:
        config_of_run, sentence = resolve_activations(winner.config, machine, activations, lambda: rates)
        winner = plan_choice(config_of_run, winner.preset, machine, activations.resolved(config_of_run), rates)
        notes[-1] += f". The answer assumes {sentence}"
    policy = "auto" if auto else suggest.shown(config.zero.activations)
    size = candidates[0].plan.facts.splitting.count_text()
    model = f"{size}, {config.precision.compute}, rows of {config.model.seq} tokens"
    every = [*_details(candidates), *_summary(candidates, machine), ""] if config.plan.all else []
    others = "" if every else "plan.all=true prints every stage and offload. "
    lines = [
        *every,
        *_sentence(f"{model}, activations {policy}"),
        *_sentence(f"machine: {machine}"),
        *(line for note in notes for line in _sentence(note)),
        *_sentence(f"rates {rates.source}"),
        *_sentence(f"{others}docs/plans.md explains the numbers"),
        "",
        *(_limits(winner, machine, activations, rates) if winner else ()),
        *(_pressed(winner, config, machine, activations) if winner else ()),
        *(
            _longest(winner, config, machine, activations)
            if winner
            else _longest_alone(config, machine, activations, rates)
        ),
        *_answer(winner, candidates, machine, overrides),
    ]
    return "\n".join(lines), winner is not None


def against_measured(plan: Plan, measured: Mapping[str, Mapping[str, int]]) -> str:
    """Return a table of planned and measured bytes of each tier.

    The line of activations says that they were not measured, because activations exist only within a step.

    Args:
        measured: the result of `zero.engine.whole.measured`.
    """
    planned = between_steps(plan.bytes)
    held = {tier: sum(kinds.values()) for tier, kinds in measured.items()}
    rows: list[tuple[str, int, int]] = [(tier, planned.get(tier, 0), held.get(tier, 0)) for tier in TIERS]
    rows = [row for row in rows if row[1] or row[2]]
    lines = [f"{'per rank':<12} {'plan':>12} {'measured':>14} {'ratio':>7}"]
    lines += [f"{name:<12} {size_text(a):>12} {size_text(b):>14} {b / a if a else 1:>7.3f}" for name, a, b in rows]
    if plan.activation_bytes:
        lines.append(f"{'activations':<12} {size_text(plan.activation_bytes):>12} {'not measured':>14}")
    return "\n".join(lines)


def _with_rows(config: Config, ranks: int) -> tuple[Config, list[str]]:
    """Return the settings with a batch of at least one row for each rank, and a note if the batch was smaller.

    Args:
        ranks: number of ranks, or of groups that share rows.
    """
    rows = config.batch.global_
    if rows == "auto" or rows >= ranks:
        return config, []
    note = f"batch.global={rows} is less than a row for each rank: planned with batch.global={ranks}"
    return config.changed("batch", global_=ranks), [note]


def _answer(
    winner: Choice | None, candidates: Sequence[Choice], machine: Machine, overrides: Sequence[str]
) -> Iterator[str]:
    """Yield the best choice that fits and the command for it, or the choice that is nearest to fitting."""
    if winner is None:
        least = nearest_choice(candidates)
        yield from _sentence(f"nothing fits. Nearest: {' '.join(least.keys)}: {least.refusal}")
        return
    stage, preset, *_ = winner.keys
    rows, config = winner.config.batch.numbers()[0], winner.config
    tokens = f"{rows * config.model.seq / winner.seconds:,.0f} tokens/s"
    names = {"device": "GPU memory", "host": "host memory", "nvme": "disk"}
    needs = bytes_by_tier(winner.plan)
    memories = " and ".join(f"{size_text(needs[tier])} of {names[tier]}" for tier in TIERS if needs.get(tier))
    text = f"fits: {stage} {preset}, about {seconds_text(winner.seconds)} a step, {tokens}. A rank takes {memories}"
    yield from _sentence(text)
    repeated = [override for override in overrides if override.split("=")[0].lstrip("+") not in NOT_REPEATED]
    kept, left = "hydra.searchpath", ("plan.", "hydra", "-")
    repeated = [override for override in repeated if override.startswith(kept) or not override.startswith(left)]
    keys = [*repeated, *winner.keys, f"batch.global={rows}"]
    if machine.ranks > machine.ranks_per_node:
        nodes = -(-machine.ranks // machine.ranks_per_node)
        yield f"  torchrun --nnodes {nodes} --nproc-per-node {machine.ranks_per_node} train.py {' '.join(keys)}"
    else:
        yield f"  python train.py launch.ranks={machine.ranks} {' '.join(keys)}"


def _pressed(winner: Choice, config: Config, machine: Machine, activations: ActivationTraces) -> Iterator[str]:
    """Yield what moves first under pressure, if `config` lets anything move."""
    settings = winner.config.model_copy(update={"offload": config.offload})
    try:
        plan = planned(settings, machine.world, machine.room, activations) if watches(config.offload) else None
    except ConfigError:
        return
    for text in () if plan is None else moves_of_pressure(plan, machine.room):
        yield from _sentence(text)


def _limits(choice: Choice, machine: Machine, activations: ActivationTraces, rates: Rates) -> Iterator[str]:
    """Yield the parts of the machine that limit the step, the tokens from which only compute limits it, and settings
    that would raise the tokens per second.
    """
    config = choice.config
    drives = config.plan.disks or (1 if machine.paper else len(config.offload.paths))
    rows, micro, _ = config.batch.numbers()
    traced = activations.resolved(config).of(micro, machine.device)

    def seconds(plan: Plan, rates: Rates, tokens: float = 1.0) -> float:
        return step_seconds(plan, rates, traced.forward, traced.backward, tokens=tokens)

    shares = limits(partial(seconds, choice.plan), rates)
    text = "limits of the step: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    factor = break_even(lambda rates, tokens: seconds(choice.plan, rates, tokens), rates)
    if factor > 1:
        tokens = (
            f"{_digits(factor * rows * config.model.seq):,} tokens a step, in as many microbatches"
            if factor < inf
            else "no number of tokens"
        )
        text += f". Compute hides all transfers from {tokens}"
    yield from _sentence(text)
    for text in moves_of_retry(choice.plan, seconds_of_moves(choice.plan, traced, rates)):
        yield from _sentence(text)

    def gain(config: Config) -> float:
        try:
            plan = planned(config, machine.world, machine.room, activations)
        except ConfigError:
            return 0.0
        return choice.seconds / seconds(plan, rates)

    small = config.changed("optim", moments="bf16") if config.optim.moments == "fp32" else config
    faster = scaled_work(rates, dict.fromkeys(DISK_RATES, 1 + 1 / drives))
    gains = {
        "twice the tokens in a microbatch": 2 * choice.seconds / seconds(choice.plan, rates, 2.0),
        "optim.moments=bf16": gain(small),
        "offload.compute=host": gain(with_compute(config, "host")),
        "another drive": choice.seconds / seconds(choice.plan, faster),
    }
    if worth := [f"{name} {times:.2f}" for name, times in gains.items() if times > 1 + ALIKE]:
        yield from _sentence(f"times the tokens/s: {', '.join(worth)}")


def _longest(winner: Choice, config: Config, machine: Machine, activations: ActivationTraces) -> Iterator[str]:
    """Yield the longest row that fits alone in a microbatch."""
    tokens, is_limit = longest_row(winner, config, machine, activations)
    shared = f", shared by {config.zero.sequence} ranks" * (config.zero.sequence > 1)
    yield from _sentence(f"longest row that fits: {tokens:,} tokens{shared}{', as many as the model has' * is_limit}")


def _longest_alone(config: Config, machine: Machine, activations: ActivationTraces, rates: Rates) -> Iterator[str]:
    """Yield the longest row that fits, if rows of the settings do not, but short rows do."""
    config = config.changed("model", seq=ROUND_TOKENS * config.zero.sequence)
    activations = activations.at(config.model.seq, machine.world)
    if winner := best(choices(config, machine, activations, rates)):
        yield from _longest(winner, config, machine, activations)


def _digits(value: float) -> int:
    """Return `value` rounded to three significant digits."""
    return int(float(f"{value:.3g}"))


def _summary(candidates: Sequence[Choice], machine: Machine) -> Iterator[str]:
    """Yield the table of choices, and below it, once each, the errors that are not about memory."""
    tiers = [tier for tier in TIERS if tier != "device" or machine.device == "cuda"]
    winner = best(candidates)
    heads = "".join(f"{tier:>11}" for tier in tiers)
    yield f"  {'stage':<6}{'offload':<10}{heads}{'micro':>7}{'step':>11}  fits"
    room = dict(zip(("device", "host", "nvme"), machine.room, strict=True))
    yield f"  {'room of a rank':<16}" + "".join(f"{size_text(room[tier] or 0):>11}" for tier in tiers)
    for choice in candidates:
        mark = "*" if choice is winner else " "
        yield f"{mark} {choice.plan.facts.stage.level:<6}{choice.preset:<10}{_cells(choice, tiers)}"
    shown_above = None if winner else nearest_choice(candidates).refusal
    for refusal in dict.fromkeys(choice.refusal for choice in candidates if choice.refusal and not choice.lacks):
        if refusal != shown_above:
            yield from _sentence(f"no: {refusal}")


def _cells(choice: Choice, tiers: Sequence[str]) -> str:
    needs = bytes_by_tier(choice.plan)
    sizes = "".join(f"{size_text(needs[tier]) if needs.get(tier) else '':>11}" for tier in tiers)
    lacks = ", ".join(f"{tier} {size_text(nbytes)}" for tier, nbytes in choice.lacks.items())
    verdict = "yes" if choice.fits else f"no, lacks {lacks}" if lacks else "no"
    return f"{sizes}{choice.config.batch.numbers()[1]:>7}{seconds_text(choice.seconds):>11}  {verdict}"


def _details(candidates: Sequence[Choice]) -> Iterator[str]:
    """Yield a table of bytes for each preset: a row for each tier and kind, a column for each stage."""
    yield "bytes per rank"
    for preset in dict.fromkeys(choice.preset for choice in candidates):
        plans = [choice.plan for choice in candidates if choice.preset == preset]
        bytes_of = [plan.bytes for plan in plans]
        stages = "".join(f"{f'stage {plan.facts.stage.level}':>13}" for plan in plans)
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
