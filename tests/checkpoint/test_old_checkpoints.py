"""Checkpoints that an earlier version wrote load to the bits that were saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zero
from tests.common.old_checkpoints import RUNS, digest, opened
from zero.core.optimizers import OPTIMIZERS
from zero.formats import export_checkpoint, open_newest
from zero.testing import run_ranks

FIXTURES = Path(__file__).parent / "fixtures"

DIGESTS = {
    "format-3/adamw": "8427d0164af40cbfab68050c10284c875d490f1244b514dbeb20ff80893eb164",
    "format-3/adam": "e087b25c2831b25426177514f4c5cca316807a5df9ef641b0f74856636999217",
    "format-3/sgd": "8643da63f7ae8d86fe4c651bf54c5b82ccc86953b0b742ecf32bf25e795d9403",
    "format-3/lion": "080bbe46aadff059b06e8d1744dfef86cffdfad8b3050c009cbc753e15ca2d0f",
    "format-3/adagrad": "1303e9a0ae2ca738932e877dc41a01e6df415f15ea2ce6ac9ebd3eeb3a922e25",
    "format-3/muon": "a568a9df1deef3a8c72e95bfba3ab0d35dd53ae8872b0c3a702bab941dd97ccc",
    "format-3/lora-int8": "66eedd022bc84fbbd1029121a453ce5776205b9f0a630bdb3ae3796c2f690baf",
    "format-3/lora-nf4": "d8e290b3c912ed186a700de42919be7a57ee656be45138d159013a7d128e4209",
}
"""Folder of a checkpoint -> digest of the state that was saved. Entries are added, and none is changed."""


def folder_of(key: str) -> Path:
    (folder,) = (FIXTURES / key).iterdir()
    return folder


def loaded_digest(world: zero.World, key: str, stage: int) -> tuple[str, str]:
    """The digests of other first values and of the loaded state."""
    with opened(world, Path(key).name, stage, start=1) as (state, _):
        before = digest(state)
        return before, digest(zero.load(state, zero.open_checkpoint(world, folder_of(key))))


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (1, 0)])
@pytest.mark.parametrize("key", DIGESTS)
def test_an_old_checkpoint_loads_to_the_bits_that_were_saved(key: str, ranks: int, stage: int):
    for before, after in run_ranks(ranks, loaded_digest, key, stage):
        assert before != DIGESTS[key], "a load that does nothing would pass"
        assert after == DIGESTS[key]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's files, flat, joined in the order of the ranks, as safetensors reads them."""
    pieces: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, piece in load_file(path).items():
            pieces.setdefault(name, []).append(piece.flatten())
    return {name: torch.cat(several) for name, several in pieces.items()}


def saved_again(world: zero.World, key: str, root: Path) -> Path:
    with opened(world, Path(key).name, start=1) as (state, _):
        return zero.save(zero.load(state, zero.open_checkpoint(world, folder_of(key))), root, {"run": Path(key).name})


def facts_of(folder: Path) -> dict[str, object]:
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    return {name: fact for name, fact in facts.items() if name not in ("lineage", "versions")}


@pytest.mark.parametrize("key", DIGESTS)
def test_a_loaded_old_checkpoint_is_saved_with_the_same_tensors_and_numbers(key: str, tmp_path: Path):
    """Codes and moments keep their dtype and bits in a save, which full values in fp32 do not show."""
    old, (new,) = folder_of(key), run_ranks(1, saved_again, key, tmp_path)
    actual, expected = tensors_in(new), tensors_in(old)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].view(torch.uint8), value.view(torch.uint8)), name
    assert facts_of(new) == facts_of(old)


@pytest.mark.parametrize("weights", ["parameter", "ema"])
def test_an_export_of_an_old_checkpoint_has_the_tensors_of_its_files(weights: str, tmp_path: Path):
    folder = folder_of("format-3/adamw")
    export_checkpoint(open_newest(folder)[0], "torch", tmp_path / "model.pt", weights=weights)
    exported, saved = torch.load(tmp_path / "model.pt"), tensors_in(folder)
    kinds = {"norm.forwards": "buffer"}
    names = {"head.weight": "embed.weight"}  # tied
    assert exported.keys() >= {"embed.weight", "head.weight", "linear.weight", "gain", "unused", "norm.forwards"}
    for name, value in exported.items():
        assert torch.equal(value.flatten(), saved[f"{kinds.get(name, weights)}/{names.get(name, name)}"]), name


def test_each_optimizer_and_each_run_has_an_old_checkpoint():
    """Write one with tests/common/old_checkpoints.py, and commit it with its digest."""
    names = {Path(key).name for key in DIGESTS}
    assert {*OPTIMIZERS} <= names
    assert {*RUNS} == names
    folders = {str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("*/*")}
    assert folders == {*DIGESTS}
    for key in DIGESTS:
        assert sum(path.stat().st_size for path in folder_of(key).iterdir()) < 50_000, f"{key}: a repository keeps it"
