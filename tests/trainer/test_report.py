"""A report shows what the files of a run say, whatever state they are in, and nothing in them can break the page."""

import json
import math
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

import train
from tests.common.browser import DARK, LIGHT, needs_chromium, shown
from tests.conftest import LONG_S
from zero.errors import MachineError
from zero.platform.files import Files
from zero.platform.timeline import Span, Timeline
from zero.tracker.report import bars, chart, origin, page, run, scale, spans as timelines, svg
from zero.tracker.report.bars import Bar, BarPart
from zero.tracker.report.chart import Panel, Series
from zero.tracker.report.folder import read_run
from zero.tracker.report.plan import KIND_COLOURS, TIME, compared, per_step
from zero.tracker.report.spans import ChartSpan, TimelineRow
from zero.trainer import checks, cli, job
from zero.trainer.config import Config, defaults_for
from zero.trainer.data.lengths import counted_lengths

ROOT = Path(__file__).resolve().parents[2]
LAW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-(10**400), 10**400))
names = st.text(max_size=30)


def tags(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if element.tag.rpartition("}")[2] == name]


def coordinates(element: ElementTree.Element, dx: float = 0.0, dy: float = 0.0) -> list[tuple[float, float]]:
    """Every point that something below `element` is drawn at, where it is in the end."""
    points, at = [], element.attrib
    if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", at.get("transform", "")):
        dx, dy = dx + float(moved[1]), dy + float(moved[2])
    for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
        if x in at:
            points.append((float(at[x]), float(at[y])))
    if element.tag.endswith("rect"):
        points.append((float(at["x"]) + float(at["width"]), float(at["y"]) + float(at["height"])))
    numbers = list(map(float, re.findall(r"[-\d.e]+", at.get("d", ""))))
    points += zip(numbers[::2], numbers[1::2], strict=True)
    return [(x + dx, y + dy) for x, y in points] + [place for child in element for place in coordinates(child, dx, dy)]


def drawn(svg: str) -> ElementTree.Element:
    """The chart; fails unless it is well-formed and all of it lies in its box."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for x, y in coordinates(root):
        assert math.isfinite(x), svg
        assert math.isfinite(y), svg
        assert -0.01 <= x <= width + 0.01, (x, width, svg)
        assert -0.01 <= y <= height + 0.01, (y, height, svg)
    return root


# Scales


@LAW
@given(st.lists(numbers, max_size=20), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_linear_scale_holds_every_number_and_its_ticks_are_told_apart(values, from_zero, snug, whole, binary):
    axis = scale.linear(values, 10, 90, from_zero=from_zero, snug=snug, whole=whole, binary=binary)
    assert axis.low < axis.high
    assert all(10 <= axis.at(value) <= 90 for value in map(scale.finite_values, values) if value is not None)
    ticks = [value for value, _ in axis.ticks]
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 12
    if not binary:
        assert len({name for _, name in axis.ticks}) == len(ticks)
    known = [value for value in map(scale.finite_values, values) if value is not None]
    edge = 1e-9 * max(map(abs, known), default=0) + 1e-9 * (axis.high - axis.low)
    assert all(axis.low - edge <= value <= axis.high + edge for value in known)


@LAW
@given(st.lists(numbers, max_size=20))
def test_a_logarithmic_scale_holds_every_positive_number(values):
    axis = scale.logarithmic(values, 0, 100)
    assert 0 < axis.low < axis.high
    shown = [value for value in map(scale.finite_values, values) if value is not None and axis.shows(value)]
    assert shown == [value for value in map(scale.finite_values, values) if value is not None and value > 0]
    assert all(axis.low * (1 - 1e-6) <= value <= axis.high * (1 + 1e-6) for value in shown)
    assert 2 <= len(axis.ticks) <= 12


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 7], "0 2 4 6 8"),
        ([2.1, 4.4], "2.0 2.5 3.0 3.5 4.0 4.5"),
        ([0, 12345], "0 5k 10k 15k"),
        ([0, 3e-5], "0 1e-5 2e-5 3e-5"),
        ([5, 5], "4.7 4.8 4.9 5.0 5.1 5.2 5.3"),
        ([-1e300, 1e308], "-1e300 -5e299 0 5e299 1e300"),
    ],
)
def test_ticks_are_round(values, ticks):
    assert [name for _, name in scale.linear(values, 0, 1).ticks] == ticks.split()


@pytest.mark.parametrize(
    ("write", "value", "words"),
    [
        (scale.number_text, 12345.6, "12,346"),
        (scale.number_text, 0.00123456, "0.001235"),
        (scale.number_text, 1.5e-7, "1.5e-7"),
        (scale.number_text, 0, "0"),
        (scale.number_text, math.nan, "–"),
        (scale.number_text, None, "–"),
        (scale.size, 353726464, "337.3 MiB"),
        (scale.size, 512, "512 B"),
        (scale.seconds, 0.0245, "24.5 ms"),
        (scale.seconds, 12.3, "12.3 s"),
        (scale.seconds, 754.4, "12:34"),
        (scale.seconds, 3723, "1:02:03"),
    ],
)
def test_numbers_are_written_for_people(write, value, words):
    assert write(value) == words


@LAW
@given(numbers)
def test_no_number_is_too_strange_to_be_written(value):
    assert all(write(value) for write in (scale.number_text, scale.size, scale.seconds))


# Charts


@LAW
@given(
    st.lists(st.tuples(names, st.lists(st.tuples(numbers, numbers), max_size=30)), max_size=4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_lines_stay_inside_their_box(series, log, log_x, binary):
    drawn(chart.lines([Series(*fields) for fields in series], title="t", log=log, log_x=log_x, binary=binary))


@LAW
@given(st.lists(st.tuples(names, st.lists(st.tuples(names, numbers), max_size=5)), max_size=5))
def test_bars_stay_inside_their_box(rows):
    drawn(bars.bars([Bar(name, [BarPart(*part, "blue") for part in parts]) for name, parts in rows], title="t"))


@LAW
@given(st.lists(st.tuples(st.text(max_size=12), st.lists(st.tuples(numbers, numbers, names), max_size=20)), max_size=5))
def test_a_timeline_stays_inside_its_box(rows):
    drawn(
        timelines.timeline(
            [TimelineRow(name, [ChartSpan(*span) for span in spans], "blue") for name, spans in rows], title="t"
        )
    )


@LAW
@given(st.lists(st.tuples(names, st.lists(st.tuples(numbers, numbers), max_size=10)), max_size=9), st.booleans())
def test_small_multiples_stay_inside_their_box(panels, log):
    drawn(chart.multiples([Panel(*panel) for panel in panels], title="t", log=log))


@pytest.mark.parametrize(
    ("values", "circles", "paths", "moves"),
    [
        ([], 0, 0, 0),
        ([math.nan, None], 0, 0, 0),
        ([3], 1, 0, 0),
        ([3, 4], 2, 1, 1),
        ([3, 4, None, 5, 6], 4, 1, 2),
        ([3, math.inf, 5], 2, 0, 0),
        ([1] * 100, 100, 1, 1),
    ],
    ids=str,
)
def test_points_are_joined_except_over_gaps(values, circles, paths, moves):
    root = drawn(chart.lines([Series("loss", list(enumerate(values)))], title="loss"))
    lines = [path for path in tags(root, "path") if path.attrib["class"] == "line"]
    assert (len(tags(root, "circle")), len(lines)) == (circles, paths)
    assert sum(path.attrib["d"].count("M") for path in lines) == moves
    assert ("nothing was measured" in "".join(root.itertext())) == (circles == 0)


def test_a_chart_can_be_read_out():
    root = drawn(chart.lines([Series("train", [(1, 5.5), (2, None), (9, 2.25)]), Series("val", [])], title="loss"))
    assert root.attrib["aria-label"] == "loss: train from 5.5 at step 1 to 2.25 at 9; val was not measured"
    assert root.attrib["role"] == "img"


@settings(LAW, max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 6 * chart.MANY))
def test_a_long_line_keeps_its_ends_and_extremes(seed, length):
    draw = random.Random(seed)
    values = [draw.gauss(0, 1) for _ in range(length + 1)]
    root = drawn(chart.lines([Series("loss", list(enumerate(values)))], title="loss"))
    (path,) = tags(root, "path")
    heights = [y for _, y in coordinates(path)]
    assert len(heights) <= 1.1 * chart.MANY
    axis = scale.linear(values, 236 - 44, 10, count=5)
    expected = [round(axis.at(value), 2) for value in (values[0], values[-1], max(values), min(values))]
    assert [heights[0], heights[-1], min(heights), max(heights)] == expected


def test_a_chart_that_was_made_for_a_whole_page_is_not_shrunk_to_a_phones_width():
    widths = [
        int(re.search(r"min-width:(\d+)px", drawn)[1])
        for drawn in (chart.lines([], title="t"), chart.multiples([], title="t"))
    ]
    assert widths[0] <= 360 < widths[1]


def test_a_smoothed_line_is_the_mean_of_its_neighbours_and_keeps_its_gaps():
    values = [3.0, 1.0, None, 8.0, math.nan, 6.0]
    smooth = chart.smoothed(list(enumerate(values)), 2)
    assert smooth == [(0, 2.0), (1, 4.0), (2, None), (3, 5.0), (4, None), (5, 7.0)]
    assert chart.smoothed(list(enumerate(values)), 0) == [
        (at, value if value is not None and math.isfinite(value) else None) for at, value in enumerate(values)
    ]


def test_a_pale_line_is_behind_the_others_and_has_no_dots():
    pale, over = Series("each row", [(1, 5), (2, 3)], style="pale"), Series("mean", [(1, 4), (2, 4)])
    root = drawn(chart.lines([over, pale], title="loss"))
    assert [path.attrib["class"] for path in tags(root, "path")] == ["line pale", "line"]
    assert len(tags(root, "circle")) == 2


@LAW
@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=9), st.booleans())
def test_the_last_tick_ends_within_the_chart_also_in_the_font_of_a_phone(steps, zoomed):
    wide = chart.lines([Series("loss", [(step, 1.0) for step in steps])], title="t", width=368 if zoomed else 560)
    for text in tags(drawn(wide), "text"):
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[text.attrib["text-anchor"]]
        end = float(text.attrib["x"]) + share * svg.text_width(text.text or "", svg.LARGEST)
        assert end <= (368 if zoomed else 560) + 0.01


def test_a_hatched_bar_is_hatched_in_the_legend_too():
    parts = [BarPart("moments", 100, "purple"), BarPart("activations", 300, "green", hatched=True)]
    root = drawn(bars.bars([Bar("plan", parts)], title="bytes"))
    assert [pattern.attrib["id"] for pattern in tags(root, "pattern")] == ["hatch-green"]
    hatched = [rect for rect in tags(root, "rect") if rect.attrib["style"] == "fill:url(#hatch-green)"]
    assert len(hatched) == 2
    plain = drawn(bars.bars([Bar("plan", [part._replace(hatched=False) for part in parts])], title="bytes"))
    assert not tags(plain, "pattern")


@LAW
@given(st.lists(st.integers(1, 10**7), max_size=50), st.one_of(st.none(), st.integers(1, 10**7)))
def test_a_histogram_has_every_length_in_one_interval_and_stays_in_its_box(lengths, limit):
    counts = counted_lengths(lengths)
    assert sum(count for *_, count in counts) == len(lengths)
    assert [last for _, last, _ in counts][:-1] == [first for first, *_ in counts][1:]
    for first, last, count in counts:
        assert count == sum(first <= length < last for length in lengths)
    root = drawn(bars.histogram(counts, title="lengths", x_name="tokens", limit=limit))
    assert len(tags(root, "rect")) == sum(count > 0 for *_, count in counts)


def test_a_bar_is_as_long_as_its_number():
    parts = [BarPart("a", 100 * 1024, "blue"), BarPart("b", 300 * 1024, "teal"), BarPart("none", 0, "rose")]
    root = drawn(bars.bars([Bar("plan", parts), Bar("measured", [BarPart("a", 800 * 1024, "blue")])], title="bytes"))
    widths = [float(rect.attrib["width"]) + 1 for rect in tags(root, "rect") if rect.find("*") is not None]
    assert widths[2] / widths[0] == pytest.approx(8, rel=0.01)
    assert widths[1] / widths[0] == pytest.approx(3, rel=0.01)
    assert "none" not in "".join(root.itertext())


@LAW
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(5, 60)), min_size=1, max_size=4))
def test_spans_that_overlap_in_time_do_not_on_paper(spans):
    row = TimelineRow("page in", [ChartSpan(begin, begin + long, "page") for begin, long in spans], "teal")
    root = drawn(timelines.timeline([row], title="step"))
    boxes = [[float(rect.attrib[key]) for key in ("x", "y", "width", "height")] for rect in tags(root, "rect")]
    assert len(boxes) == len(spans)
    for place, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[:place]:
            apart = x >= other_x + other_width or other_x >= x + width
            assert apart or y >= other_y + other_height or other_y >= y + height


# Folders


def write_folder(folder: Path, *, rows=(), summary=None, config=None, overrides=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if overrides is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    return folder


def row(step: int, loss: float = 5.0, **more) -> dict:
    return {"step": step, "train/loss": loss, "speed/tokens_per_s": 100.0 * step, **more}


def text_of(folder: Path) -> str:
    """The words of a report; fails unless the page is whole and asks for nothing outside."""
    html = run.write_run(folder, defaults_for).read_text()
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    assert not tags(root, "script")
    for element in root.iter():
        assert not [name for name in element.attrib if name.startswith("on") or name == "src"], element.attrib
        link = next((value for name, value in element.attrib.items() if name.endswith("href")), "#")
        assert link.startswith("#") or (folder / link).exists(), link
    assert not re.search(r"url\((?!#)", html)
    return " ".join(" ".join(root.itertext()).split())


def test_half_a_line_is_left_out_and_said(tmp_path):
    write_folder(tmp_path, rows=[row(1), row(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    recorded = read_run(tmp_path)
    assert [entry["step"] for entry in recorded.rows] == [1, 2]
    assert "1 line of metrics.jsonl cannot be read" in recorded.unread
    assert "1 line of metrics.jsonl cannot be read" in text_of(tmp_path)


def test_steps_that_were_made_again_after_a_restart_are_shown_once(tmp_path):
    again = [row(1, 9), row(2, 8), row(3, 7), row(2, 6), row(4, 5)]
    recorded = read_run(write_folder(tmp_path, rows=again))
    assert [(entry["step"], entry["train/loss"]) for entry in recorded.rows] == [(1, 9), (2, 6), (4, 5)]


def test_speed_is_the_median_after_the_first_row(tmp_path):
    recorded = read_run(write_folder(tmp_path, rows=[row(1), row(2), row(3), row(9)]))
    assert recorded.typical("speed/tokens_per_s") == 300
    assert recorded._replace(rows=recorded.rows[:1]).typical("speed/tokens_per_s") == 100
    assert recorded._replace(rows=[]).typical("speed/tokens_per_s") is None


def waits(step: int, slowest: object, worked_s: object, longest_s: object, step_s: object = 1.0) -> dict:
    keys = ("comm/slowest_rank", "comm/slowest_s", "comm/wait_s", "speed/step_s")
    return row(step, **dict(zip(keys, (slowest, worked_s, longest_s, step_s), strict=True)))


def test_the_rank_that_others_waited_for_is_named_with_what_it_cost_them(tmp_path):
    """A wait that all ranks share is not its doing; a row that was not timed names nobody."""
    rows = [waits(1, 1, 0.9, 0.3), waits(2, 0, 0.5, 0.9), waits(3, 1, 0.9, 0.22), waits(4, 1, 1.0, 0.1)]
    folder = write_folder(tmp_path, rows=[*rows, waits(5, None, None, None, None)], summary={"ranks": 3})
    said = "Slowest rank 1 in 3 of 4 rows. Other ranks waited up to 120 ms longer in a step (median)."
    assert said in text_of(folder)
    assert said in text_of(write_folder(tmp_path / "running", rows=rows))
    alone = write_folder(tmp_path / "alone", rows=[waits(1, None, None, 0.0)], summary={"ranks": 1})
    assert "Slowest" not in text_of(alone)
    odd = [waits(1, "?", [], {}), waits(2, math.nan, 1.0, 0.0)]
    assert "Slowest" not in text_of(write_folder(tmp_path / "odd", rows=odd, summary={"ranks": 2}))


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"exit_reason": "finished"}, "finished"),
        ({"exit_reason": "debug.stop_at reached"}, "finished"),
        ({"exit_reason": "stopped by a signal"}, "stopped"),
        ({"exit_reason": "stopped by SIGINT"}, "stopped"),
        ({"exit_reason": "rank 1 was killed by the system (signal 9)"}, "failed"),
        ({"exit_reason": "running, or ended without a word"}, "running"),
        (None, "running"),
    ],
    ids=str,
)
def test_how_a_run_ended_is_the_first_word(tmp_path, summary, status):
    text = text_of(write_folder(tmp_path, rows=[row(1), row(2)], summary=summary))
    assert read_run(tmp_path).status == status
    assert f" {status} " in text
    assert summary is None or status == "finished" or summary["exit_reason"] in text


def test_an_empty_folder_has_a_report_that_says_what_is_missing(tmp_path):
    text = text_of(tmp_path)
    for name in ("metrics.jsonl", "summary.json", "config.yaml"):
        assert f"there is no {name}" in text


def test_nothing_in_a_run_can_become_markup(tmp_path):
    evil = "<script>alert('1')</script>&\"\x00\ud800"
    config = {**Config().plain(), "data": {"name": evil, evil: evil}}
    summary = {"exit_reason": evil, "plan_bytes": {evil: {evil: 5}}, "endurance": evil}
    write_folder(tmp_path, rows=[row(1), row(2)], config=config, summary=summary, overrides=[f"data.name={evil}"])
    spans = [Span("compute", evil, 0.0, 1.0, evil), Span("gather", evil, 0.2, 0.6, evil)]
    Timeline(spans).write(tmp_path / "trace.json")
    text = text_of(tmp_path)
    assert text.count("<script>alert('1')</script>&\"") >= 5
    assert "<script" not in (tmp_path / "report.html").read_text()


KEYS = ["step", "train/loss", "val/loss", "speed/tokens_per_s", "memory/host_peak_bytes", "offload/read_bytes", "ts"]
KEYS += ["exit_reason", "plan_bytes", "plan_step_bytes", "measured_bytes", "versions", "checkpoint", "disk", "host"]
KEYS += ["device", "val_loss", "ranks", "traceEvents", "ph", "args"]
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)),
    max_leaves=12,
)


@LAW
@given(st.lists(values, max_size=4), values, values, values)
def test_files_that_hold_anything_still_make_a_page(tmp_path, lines, summary, config, trace):
    write_folder(tmp_path, rows=lines, summary=summary, config=config)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert text_of(tmp_path)


@LAW
@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_files_that_are_no_text_still_make_a_page(tmp_path, metrics, summary, config):
    for name, content in (("metrics.jsonl", metrics), ("summary.json", summary), ("config.yaml", config)):
        (tmp_path / name).write_bytes(content)
    assert text_of(tmp_path)


def test_settings_are_compared_with_the_defaults():
    default = {"a": 1, "b": {"c": 2, "d": "auto", "e": None}, "gone": 5}
    config = {"a": 1, "b": {"c": 3, "d": 16, "e": None}, "new": True}
    assert origin.differing_settings(config, default) == [
        ("b.c", 3, 2), ("new", True, None), ("gone", None, 5), ("b.d", 16, "auto"),
    ]  # fmt: skip
    assert origin.differing_settings(Config().plain(), Config().plain()) == []


def test_settings_that_nobody_set_are_not_listed(tmp_path):
    """A value that the run gave to auto is in a sentence; one that somebody typed is in the table."""
    config = Config().plain()
    config["batch"] |= {"micro": 4, "accumulate": 3}
    folder = write_folder(tmp_path, config=config, overrides=["batch.micro=4"], summary={"exit_reason": "finished"})
    composed = Config().plain()
    composed["batch"] |= {"micro": 4, "accumulate": "auto"}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(composed))
    text = text_of(folder)
    assert "key this run default batch.micro 4 auto The run chose batch.accumulate=3." in text
    (folder / ".hydra" / "config.yaml").unlink()
    assert "batch.accumulate 3 auto batch.micro 4 auto" in text_of(folder)


def test_settings_of_another_option_are_compared_with_its_own_defaults(tmp_path):
    """The settings of the default run's option, which this run does not have, are not listed as null."""
    config = Config().plain()
    config["data"] = defaults_for({"data": {"name": "tokens"}})["data"] | {"name": "tokens", "path": "a.bin"}
    text = text_of(write_folder(tmp_path, config=config, overrides=[], summary={"exit_reason": "finished"}))
    assert "key this run default data.name tokens text data.path a.bin null config.yaml" in text
    assert "null null" not in text


def test_the_loss_is_first_and_smoothed_if_there_are_many_rows(tmp_path):
    rows = [row(step, 5 - step / 100) for step in range(1, run.SMOOTHED + 1)]
    text = text_of(write_folder(tmp_path, rows=rows, summary={"plan_bytes": {"host": {"master": 5}}}))
    assert text.index("So far") < text.index("Learning") < text.index("Plan and measurement") < text.index("Speed and")
    assert "training, mean of 5 rows each row validation" in text
    assert "each row" not in text_of(write_folder(tmp_path, rows=rows[1:]))


def test_plan_and_measurement_stand_side_by_side(tmp_path):
    """Activations are planned, and gone when anything is measured."""
    plan = {"host": {"master": 3 << 20, "activations": 4 << 20, "moments": 1 << 20}, "nvme": {"moments": 8 << 20}}
    measured = {"host": {"all": 4404019}, "nvme": {"moments": 8 << 20}}
    summary = {"exit_reason": "finished", "plan_bytes": plan, "measured_bytes": measured}
    text = text_of(write_folder(tmp_path, summary=summary))
    assert "plan measured ratio host master 3 MiB – – moments 1 MiB – – activations 4 MiB – –" in text
    assert "between steps 4 MiB 4.2 MiB 1.050 nvme moments 8 MiB 8 MiB 1.000" in text
    without = text_of(write_folder(tmp_path, summary={**summary, "measured_bytes": None}))
    assert "between steps 4 MiB – – nvme moments 8 MiB – –" in without
    by_kind = {**summary, "measured_bytes": {"host": {"master": 3 << 20, "moments": 2 << 20}}}
    text = text_of(write_folder(tmp_path, summary=by_kind))
    assert "host master 3 MiB 3 MiB 1.000 moments 1 MiB 2 MiB 2.000 activations 4 MiB – –" in text
    assert "between steps 4 MiB 5 MiB 1.250" in text
    assert "Activations are hatched" in text


def test_the_peak_of_a_device_is_beside_all_that_a_step_was_planned_with(tmp_path):
    plan = {"device": {"parameters": 10, "activations": 30}}
    summary = {"plan_bytes": plan, "measured_bytes": {"device": {"parameters": 10}}, "device_peak_bytes": 50}
    rows = compared(read_run(write_folder(tmp_path, summary=summary)))
    assert rows == [
        ("device", "parameters", 10, 10),
        ("device", "activations", 30, None),
        ("device", "between steps", 10, 10),
        ("device", "peak in a step", 40, 50),
    ]


def test_what_a_step_moves_is_the_median_of_the_rows_for_one_rank(tmp_path):
    """Rows have the bytes of all ranks and of all steps since the row before; the first row pays for the start."""
    names = (
        *("offload/read_bytes", "offload/write_bytes", "offload/copy_bytes"),
        *("comm/gather_bytes", "comm/reduce_bytes", "comm/wire_bytes"),
    )
    two_steps, one_step = (40, 80, 200, 8, 16, 4), (20, 40, 100, 4, 8, 2)
    moved = ((1, (9e9,) * 6), (3, two_steps), (4, one_step), (5, one_step))
    rows = [row(step, **dict(zip(names, figures, strict=True))) for step, figures in moved]
    summary = {"ranks": 2, "plan_step_bytes": {"disk": 60, "copy": 25, "link": 3, "wire": 2}}
    recorded = read_run(write_folder(tmp_path, rows=rows, summary=summary))
    assert compared(recorded) == [
        ("a step", "to and from the disk", 60, 30),
        ("a step", "between host and GPU", 25, 50),
        ("a step", "from other ranks", 3, 6),
        ("a step", "from other nodes", 2, 1),
    ]
    assert compared(recorded._replace(rows=[])) == []


@pytest.mark.parametrize("before", [[], [(10, 10), (20, 10)]], ids=["another folder", "the same folder"])
def test_what_a_step_moves_is_known_of_the_first_row_after_a_resume(before, tmp_path):
    """A run that goes on from step 25: its row at 30 is of five steps, in a folder of its own or in that of before."""
    moved = [(*place, 100 * place[1]) for place in [*before, (30, 5), (40, 10)]]
    rows = [row(step, **{"speed/steps": count, "offload/read_bytes": nbytes}) for step, count, nbytes in moved]
    recorded = read_run(write_folder(tmp_path, rows=rows))
    assert per_step(recorded, "offload/read_bytes") == [(step, 100) for step, *_ in moved]


def test_a_predicted_step_stands_beside_the_measured_one(tmp_path):
    rows = [row(step, **{"speed/step_s": step_s}) for step, step_s in enumerate((9.0, 0.4, 0.5, 0.6), 1)]
    summary = {"plan_bytes": {"device": {"parameters": 10}}, "plan_step_s": 0.25}
    text = text_of(write_folder(tmp_path, rows=rows, summary=summary))
    assert "a step time 250 ms 500 ms 2.000" in text
    assert "for a machine that does nothing else" in text
    assert "nothing else" not in text_of(write_folder(tmp_path, rows=rows, summary=summary | {"plan_step_s": None}))


def test_the_text_that_a_run_printed_is_in_its_report(tmp_path):
    write_folder(tmp_path, summary={"exit_reason": "finished", "sample": "def main(x):\n    return <x>   \n  "})
    assert "Sample Text from the model, as the run printed it at its end. def main(x): return <x>" in text_of(tmp_path)
    assert "def main(x):\n    return &lt;x&gt;<" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("overrides", "title"),
    [
        ([], "the default run"),
        (["zero.stage=3", "steps=9"], "steps=9 zero.stage=3"),
        ([f"data.path={'x' * 90}"], f"data.path={'x' * 47}..."),
        (
            [f"model.path={'long/' * 7}", "model=hf", *(f"val.rows={n}" for n in range(20))],
            f"model=hf model.path={'long/' * 7} val.rows=0 and 19 more",
        ),
    ],
)
def test_a_title_is_one_line_of_the_overrides(overrides, title, tmp_path):
    write_folder(tmp_path, overrides=overrides)
    assert f"<h1>{title}</h1>" in run.report(read_run(tmp_path))


def test_a_report_says_how_to_make_the_run_again_and_how_to_go_on(tmp_path):
    summary = {"exit_reason": "finished", "ranks": 2, "versions": {"zero": None, "torch": "2.13.0", "python": "3.12"}}
    summary |= {"data_digest": "0123456789abcdef", "checkpoint": "/a b/step-9"}
    config = {"steps": 9, "seed": 3, "data": {"name": "text"}}
    overrides = ["steps=9", "resume=latest", "data.skip=[a,b]"]
    text = text_of(write_folder(tmp_path, summary=summary, config=config, overrides=overrides))
    assert "command python train.py steps=9 resume=latest 'data.skip=[a,b]' launch.ranks=2 " in text
    longer = """to go on python train.py 'data.skip=[a,b]' launch.ranks=2 steps=18 'resume="/a b/step-9"' """
    assert longer in text
    assert "versions torch 2.13.0, python 3.12 seed 3 data text, digest 0123456789ab" in text
    stopped = {**summary, "exit_reason": "stopped by a signal"}
    text = text_of(write_folder(tmp_path, summary=stopped, config=config, overrides=[*overrides, "launch.ranks=4"]))
    assert """to go on python train.py steps=9 'data.skip=[a,b]' launch.ranks=4 'resume="/a b/step-9"' """ in text
    unsaved = {**summary, "checkpoint": None}
    text = text_of(write_folder(tmp_path, summary=unsaved, config=config, overrides=overrides))
    assert "checkpoint none was saved. checkpoint.every=100 saves every 100 steps versions" in text
    assert "to go on" not in text


def test_a_step_says_what_was_exposed(tmp_path):
    write_folder(tmp_path, summary={"exit_reason": "finished"})
    spans = [
        Span("compute", "forward", 0.0, 0.6, "blocks.0"),
        Span("gather", "gather blocks.0", 0.4, 0.8, "blocks.0"),
        Span("exposed", "gather", 0.6, 0.8, "blocks.0"),
        Span("compute", "backward", 0.8, 1.0, "blocks.0"),
    ]
    Timeline(spans).write(tmp_path / "trace.json")
    text = text_of(tmp_path)
    assert "gather 1 400 ms 200 ms 200 ms 20 %" in text
    assert "compute 2 800 ms" in text


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_folder(tmp_path, rows=[row(1)])
    before = run.write_run(tmp_path).read_text()
    (tmp_path / "metrics.jsonl").write_text("")

    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Files, "replace", full)
    with pytest.raises(MachineError, match=r"report\.html cannot be written: .*no space left"):
        run.write_run(tmp_path)
    assert (tmp_path / "report.html").read_text() == before
    assert [path.name for path in tmp_path.glob(".*")] == []


# Runs


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that this process made, with its trace."""
    folder = tmp_path_factory.mktemp("run")
    run_in(folder)
    return folder


def run_in(folder: Path, *more: str) -> None:
    overrides = ["debug=tiny", "data=synthetic", "offload=nvme", f"offload.path={folder}", "tracker.console=none"]
    overrides += ["sample.tokens=0", "launch.threads=1", "launch.ranks=1", "launch.malloc=default"]
    job.run(train.train, checks.parse_config(cli.settings_in(cli.compose([*overrides, *more]))), folder)


def test_a_real_run_is_told_as_it_was(finished):
    text, said = text_of(finished), read_run(finished)
    assert said.status == "finished"
    assert said.summary["val_loss"] == said.rows[-1]["val/loss"]
    assert f"Validation loss {said.summary['val_loss']:.4f} best {said.summary['best_val_loss']:.4f}" in text
    assert "Steps 4 of 4" in text
    assert scale.size(said.summary["host_peak_bytes"]) in text
    assert f"Written {scale.size(said.summary['offload_written_bytes'])}" in text
    assert "nvme" in text
    assert "model.width 32 128" in text
    planned = sum(said.summary["plan_bytes"]["nvme"].values())
    assert f"nvme moments {scale.size(planned)} {scale.size(planned)} 1.000" in text
    assert f"torch {torch.__version__}" in text


def test_a_real_run_holds_and_moves_what_was_planned(finished):
    told = read_run(finished)
    rows = {(comparison.where, comparison.what): comparison for comparison in compared(told)}
    assert {where for where, _ in rows} == {"device", "host", "nvme", "a step"}
    for (_, what), comparison in rows.items():
        if what == "activations":
            assert comparison.measured is None
        elif what == "to and from the disk":  # of a row before or after; by the fourth row three updates are done
            moved = [row["offload/read_bytes"] + row["offload/write_bytes"] for row in told.rows]
            assert min(moved) <= comparison.measured <= max(moved)
            # all pages are written; one that is still in memory is not read again
            assert 3 * 0.49 * comparison.planned < sum(moved) < 4 * 1.01 * comparison.planned, (comparison, moved)
        else:
            assert comparison.measured == pytest.approx(comparison.planned, rel=0.01), comparison


def test_a_run_that_chose_its_stage_says_what_it_predicted(tmp_path):
    run_in(tmp_path, "zero.stage=auto")
    told = read_run(tmp_path)
    (comparison,) = (comparison for comparison in compared(told) if comparison.what == TIME)
    assert comparison == ("a step", TIME, told.summary["plan_step_s"], told.typical("speed/step_s"))
    assert comparison.planned > 0
    assert comparison.measured > 0


SCHEMES = [(DARK, "rgb(16, 20, 24)"), (LIGHT, "rgb(246, 247, 248)")]


def charts_of_many_words() -> str:
    """Charts whose labels and legends are as long as they get."""
    kinds = [*KIND_COLOURS]
    series = [Series(name, [(1, 700 << 20), (2_000_000, 1 << 20)]) for name in ("waiting for the store", "whole step")]
    rows = [Bar("device, plan", [BarPart(kind, 1000 << 20, *KIND_COLOURS[kind]) for kind in kinds])]
    rows.append(Bar("measured", [BarPart(kinds[0], 1000 << 30, "blue")]))
    panels = [Panel(f"panel {number}", [(1, 1e-7), (2, 1.234e-6)], note="12.3456") for number in range(7)]
    drawn = [
        chart.lines(series, title="lines", binary=True),
        chart.lines([Series("line", [(1, 1.2e-7), (2, 1.3e-7)])], title="lines"),
        bars.bars(rows, title="bars", order=kinds),
        bars.histogram(counted_lengths([1, 90, 4000, 4000, 31000]), title="lengths", x_name="tokens", limit=4097),
        chart.multiples(panels, title="multiples"),
    ]
    parts = [page.section("Charts", *(page.figure(svg, "a chart", "a note on it") for svg in drawn))]
    return page.page("charts", kicker="k", status=page.pill("finished", "good"), parts=parts)


@needs_chromium
@pytest.mark.parametrize(("scheme", "paper"), SCHEMES, ids=["dark", "light"])
def test_nothing_is_cut_in_a_narrow_or_a_wide_window(finished, tmp_path, scheme, paper):
    """In dark and in light. What is wider, such as the timeline, scrolls; every label is in its chart, and legible."""
    said = read_run(finished)
    wide = "averylongwordwithoutaspace" * 9
    summary = said.summary | {"sample": wide, "checkpoint": f"/{wide}/step-4"}
    long = said._replace(summary=summary, overrides=[f"data.folder={wide}"])
    pages = {"report": run.report(long, defaults_for), "charts": charts_of_many_words()}
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    renderings = shown([tmp_path / f"{name}.html" for name in pages], scheme, tmp_path)
    assert [(seen.page, seen.width) for seen in renderings] == [
        (f"{p}.html", w) for w in (390, 500, 1400) for p in pages
    ]
    for seen in renderings:
        assert (seen.paper, seen.scrolls, seen.cut, seen.split, seen.pale) == (paper, 0, [], [], []), seen
        assert 7.5 < seen.font < 99
        assert all('viewBox="0 0 1120 ' in chart for chart in seen.behind), "only a chart for a whole page scrolls"


def test_the_script_says_where_the_page_is(finished, monkeypatch, capsys):
    script = str(ROOT / "scripts" / "report")
    monkeypatch.setattr(sys, "argv", [script, str(finished)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out == f"{finished / 'report.html'}\n"
    command = [sys.executable, script, finished / "nowhere"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is not a folder. Give the f" in refused.stderr


def test_a_page_is_made_without_torch(finished):
    """With the timeline of a step and a table of settings: what reads files needs nothing that computes."""
    assert (finished / "trace.json").exists()
    watch = (
        "import sys\nfrom pathlib import Path\nfrom zero.tracker.report import run, sweep\n"
        f"folder = Path({str(finished)!r})\nrun.write_run(folder), sweep.write_sweep(folder)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", watch], cwd=ROOT, timeout=LONG_S, check=True)


def test_a_page_forbids_itself_to_load_or_run_anything():
    html = page.page("t", kicker="k", status=page.pill("finished", "good"), parts=[])
    assert "default-src 'none'" in html
    for colour in [*chart.COLOURS, "ink", "soft", "line", "grid", "card", "on"]:
        assert html.count(f"--{colour}:") == 2, f"{colour} is not there for light and dark"
