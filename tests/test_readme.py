"""The README's Python runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs(capsys):
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "gathered units" in printed
    assert "stage 3, 1 rank, bfloat16 compute" in printed
    assert names["metrics"].loss < 5  # it began at ln 256 = 5.5
    assert names["state"].step == 20
    assert set(names["weights"]) == {name for name, _ in names["model"].named_parameters()}


def test_every_file_it_points_to_exists():
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link
