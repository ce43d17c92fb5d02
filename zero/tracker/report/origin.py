"""The sections of a run's page about its start: commands that repeat and resume it, versions, data and settings."""

from collections.abc import Callable, Mapping
from typing import Any

from zero.core import suggest
from zero.core.schema import flat_fields
from zero.platform.installed import as_called
from zero.tracker.report.folder import OWN_LOOP, RecordedRun, mapping
from zero.tracker.report.page import Html, code, note, section, table, verbatim
from zero.tracker.report.scale import finite_values

Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A function from the plain settings of a run to the nested, plain default settings of the same options."""


def origin_section(run: RecordedRun) -> Html:
    """Return a section with the commands that repeat and resume the run, its versions, seed and data."""
    versions, saved = mapping(run.summary.get("versions")), str(run.summary.get("checkpoint") or "")
    data, digest = mapping(run.config.get("data")).get("name"), str(run.summary.get("data_digest") or "")
    facts: dict[str, str] = {}
    if run.overrides is not None:
        ranks = finite_values(run.summary.get("ranks")) or 1
        words = dict.fromkeys(run.overrides)
        if ranks > 1 and not any(word.startswith("launch.ranks=") for word in words):
            words[f"launch.ranks={ranks:.0f}"] = None  # torchrun or the default may have chosen them
        steps = finite_values(run.config.get("steps"))
        epochs = finite_values(run.config.get("epochs"))
        longer = {"epochs": round(2 * epochs)} if epochs else {"steps": round(2 * steps)} if steps else {}
        longer = longer if run.status == "finished" else {}
        facts["command"] = code(as_called(suggest.command(words)))
        facts["checkpoint"] = code(saved) if saved else "none was saved. checkpoint.every=100 saves every 100 steps"
        if saved:
            facts["to go on"] = code(as_called(suggest.command(words, **longer, resume=saved)))
    elif saved:
        facts["checkpoint"] = code(saved)
    facts |= {"versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number)}
    facts |= {"seed": _value(run.config["seed"]) if "seed" in run.config else ""}
    facts |= {"data": f"{data}, digest {digest[:12]}" if data and digest else ""}
    return section("This run", table([], [(name, text) for name, text in facts.items() if text]))


def differing_settings(config: Mapping[str, Any], default: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of each setting that differs from its default; defaults of auto come last.

    A key that is missing in one of the two mappings counts as None in it.
    """
    values, defaults = flat_fields(config), flat_fields(default)
    keys = dict.fromkeys([*values, *defaults])
    rows = [(key, values.get(key), defaults.get(key)) for key in keys if values.get(key) != defaults.get(key)]
    return sorted(rows, key=lambda row: row[2] == "auto")


def settings_section(run: RecordedRun, defaults: Mapping[str, Any]) -> Html:
    """Return a section with the settings that differ from `defaults`, or with all if there are no defaults."""
    if not run.config:
        return Html()
    known = {key: value for key, value in defaults.items() if key in run.config}  # other defaults do not apply
    if not known or OWN_LOOP in run.config:
        return section(
            "Settings",
            table(["key", "this run"], [(code(a), code(_value(b))) for a, b in flat_fields(run.config).items()]),
        )
    own = flat_fields(run.config)
    differing = [row for row in differing_settings(run.config, known) if row[0] in own]
    composed = flat_fields(run.composed)
    chosen = [(key, value) for key, value, _ in differing if composed.get(key) == "auto"]
    rows = [
        (code(key), code(_value(value)), code(_value(default)))
        for key, value, default in differing
        if (key, value) not in chosen
    ]
    about = f"The run chose {' '.join(f'{key}={_value(value)}' for key, value in chosen)}." if chosen else ""
    if not rows:
        return section("Settings", verbatim("all settings are the defaults"), note=about)
    return section("Settings that differ from the defaults", table(["key", "this run", "default"], rows), note(about))


def _value(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
