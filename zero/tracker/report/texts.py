"""The sections of a run's page about its data: a row, the lengths of its documents, and a sample from the model."""

from zero.tracker.report.bars import histogram
from zero.tracker.report.folder import RecordedRun, mapping
from zero.tracker.report.page import Html, figure, marked, note, section, side_by_side, together, verbatim
from zero.tracker.report.scale import finite_values


def data_section(run: RecordedRun) -> Html:
    """Return the section with the first training row, in which the tokens that train are marked, and the lengths."""
    parts, lengths = run.summary.get("example"), _lengths(run)
    if not isinstance(parts, list):
        return section("Data", side_by_side(lengths))
    row = marked((str(text), bool(trains)) for text, trains in parts)
    shown = together(note("The first row, without padding. The loss counts the marked tokens."), row)
    return section("Data", side_by_side(shown, lengths) if lengths else shown)


def _lengths(run: RecordedRun) -> Html:
    """Return a histogram of the tokens of each document, as `zero.trainer.data.lengths` counts them."""
    recorded = mapping(run.summary.get("lengths"))
    counts, row = recorded.get("counts"), finite_values(recorded.get("row"))
    if not isinstance(counts, list):
        return Html()
    known = [tuple(map(finite_values, entry)) for entry in counts if isinstance(entry, list) and len(entry) == 3]
    bins = [(first, last, count) for first, last, count in known if first and last and count is not None]
    bins = [entry for entry in bins if 0 < entry[0] < entry[1]]
    drawn = histogram(bins, title="lengths", x_name="tokens", limit=row if row and row > 0 else None)
    return figure(drawn, "Lengths", "documents by their tokens") if bins else Html()


def sample_section(run: RecordedRun) -> Html:
    """Return the section with the text that the run printed at its end."""
    text = str(run.summary.get("sample") or "").rstrip()
    blocks = [verbatim(text)] if text else []
    return section("Sample", *blocks, note="Text from the model, as the run printed it at its end.")
