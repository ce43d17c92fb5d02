"""The README and the docs: their code and commands run as written, and their links lead somewhere."""

import contextlib
import copy
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import train
import zero
from tests.common.command_lines import refusal_of
from tests.common.inference import Engine, Group, Remote
from tests.conftest import LONG_S
from zero.__main__ import main as zero_train
from zero.testing import forked_ranks, run_processes
from zero.trainer import compose
from zero.trainer.models import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]
SHOWN = {"own_loop": "own-loop.md", "initialize": "coming-from-deepspeed.md", "hugging_face": "hugging-face.md"}
SHOWN |= {"hf_trainer": "hugging-face-trainer.md", "lightning_trainer": "lightning.md", "fsdp2": "coming-from-fsdp.md"}
"""Example -> the page of docs/ whose first block shows it."""

BESIDE = ("tensor_parallel", "split_mlp", "experts")
"""The examples of which docs/parallelism.md shows lines."""

NEEDS = {"hugging_face": "transformers", "hf_trainer": "accelerate", "lightning_trainer": "lightning"}
PINNED = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")  # of Trainer, without a GPU
LIGHTNINGS = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|is not supported by the model summary)",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
)


def blocks(page: str) -> list[str]:
    """Return the Python of a page, without the example that it begins with."""
    texts = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    return texts[1:] if Path(page).name in SHOWN.values() else texts


def run(source: str, names: dict[str, Any]) -> None:
    exec(compile(source, "a page", "exec"), names)


def own_loop(world: zero.World | None = None, **settings: Any) -> dict[str, Any]:
    """Make the names that the blocks of docs/own-loop.md go on from: those of its example."""
    names = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    world = world or zero.open_world()
    with zero.empty():
        model = nn.Sequential(nn.Embedding(256, 64), names["Block"](64), nn.Linear(64, 256))
    plan = zero.Plan(model, optimizer=zero.adamw(lr=3e-3), world=world, **settings)
    batch = torch.randint(256, (2, 9))
    made = {"plan": plan, "state": zero.init(plan, zero.open_store(plan)), "world": world, "torch": torch}
    return {"zero": zero, "loss_fn": names["loss_fn"], "batch": batch, "microbatches": [batch, batch], **made}


# -- the examples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_begins_with_its_example_or_a_part_of_it(name: str):
    text, source = (ROOT / "docs" / SHOWN[name]).read_text(), (EXAMPLES / f"{name}.py").read_text()
    shown = re.findall(r"```\w*\n(.*?)```", text, flags=re.S)[0]
    assert shown in source or indent(shown, "    ") in source, f"paste {name}.py into docs/{SHOWN[name]}"
    assert len(source.splitlines()) < 60


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", printed)]


@PINNED
@LIGHTNINGS
@pytest.mark.parametrize("name", ["hugging_face", "hf_trainer", "lightning_trainer"])
def test_an_example_learns(name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip(NEEDS[name])
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert losses(printed)[-1] < min(losses(printed)[0], 4)
    if name == "hugging_face":
        assert "transformers has 197,184 trained parameters" in printed


def printed_by(world: zero.World, name: str) -> str:
    """Return the output of one rank of `world` that runs ten steps of an example."""
    with (
        patch.object(zero, "open_world", lambda **_: world),
        patch("sys.argv", [name, "--steps", "10"]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        main(**({"steps": 10} if name in ("own_loop", "long_rows") else {}))
    return printed.getvalue()


def test_ranks_share_the_rows_of_the_example_of_long_rows(here: Path):
    pytest.importorskip("transformers")
    page, source = blocks("docs/parallelism.md"), (EXAMPLES / "long_rows.py").read_text()
    assert [block for block in page if "sequence_parallel" in block and block in source], "paste it from long_rows.py"
    rank_0, rank_1, rank_2, rank_3 = run_processes(4, printed_by, "long_rows")
    assert losses(rank_0)[-1] < 5.5
    assert not rank_1 + rank_2 + rank_3, "only rank 0 prints"


@pytest.mark.parametrize("name", ["own_loop", "initialize"])  # tests/integrations/ has the others on two ranks
def test_an_example_runs_on_two_ranks(name: str, here: Path):
    first, second = run_processes(2, printed_by, name)
    assert losses(first)[-1] < 5.5
    assert not second, "only rank 0 prints"


def printed_on_a_mesh(_: zero.World, name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps=20)
    return printed.getvalue()


@pytest.mark.parametrize("name", BESIDE)
def test_an_example_beside_other_parallelism_learns_on_four_ranks(name: str, here: Path):
    first, *others = run_processes(4, printed_on_a_mesh, name)
    assert losses(first)[-1] < losses(first)[0] < 1
    assert not any(others), "only rank 0 prints"


def test_the_page_of_other_parallelism_shows_lines_of_its_examples():
    sources = [(EXAMPLES / f"{name}.py").read_text() for name in (*BESIDE, "long_rows")]
    shown = blocks("docs/parallelism.md")
    assert len(shown) == 5
    assert all(any(block in source for source in sources) for block in shown), "paste them from the examples"
    assert all(len(source.splitlines()) <= 100 for source in sources)


# -- the README and the other blocks of the docs -----------------------------------------------------------------------


def test_the_blocks_of_the_readme_run_as_pasted(here: Path, capsys: pytest.CaptureFixture[str]):
    loop, script = blocks("README.md")
    names: dict[str, Any] = {}
    run(loop, names)
    assert "moments" in capsys.readouterr().out
    assert names["state"].step == 40
    assert len((here / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (here / "runs" / "mine" / "report.html").exists()
    assert [path.name for path in (here / "runs" / "mine" / "checkpoints").iterdir()] == ["step-0000000040"]
    names["store"].close()
    shutil.copy(EXAMPLES / "ds_config.json", here)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)).eval()  # as a model of from_pretrained
    names |= {"model": model, "rows": torch.randint(256, (48, 9))}
    run(script, names)
    assert names["engine"].global_steps >= 2
    assert (here / "checkpoints" / "latest").exists()
    names["engine"].destroy()


def test_the_commands_of_the_readme_run_one_after_another(here: Path):
    """The commands about checkpoints, with a small model and a hundredth of the steps."""
    readme = (ROOT / "README.md").read_text()
    (block,) = (text for text in re.findall(r"```bash\n(.*?)```", readme, flags=re.S) if "resume=latest" in text)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    for _, program, *words in filter(None, lines):
        if program == "train.py":
            fewer = [re.sub(r"((?:steps|checkpoint.every)=\d+)00$", r"\1", word) for word in words]
            with forked_ranks():
                assert train.main(["debug=tiny", *fewer]) == 0
        else:
            folder = str(next(here.glob("runs/*/*/checkpoints")).parent)
            assert zero_train([program.removeprefix("scripts/"), folder, *words[1:]]) == 0


def commands(page: Path) -> list[list[str]]:
    """Return the words after train.py in each command of a page, but not those of mistakes, after a `$`."""
    lines = [line for line in page.read_text().splitlines() if not line.startswith("    $")]
    typed = [re.split(r"`|\\|  ", text)[0].split() for line in lines for text in line.split("python train.py ")[1:]]
    typed = [[word.strip("'") for word in words] for words in typed]
    return [[*itertools.takewhile(lambda word: "=" in word or word.startswith("-"), words)] for words in typed]


def write_files_of(page: Path) -> None:
    """Write the settings files that a page shows, each under the name before it, into the current folder."""
    for name, text in re.findall(r"`(settings/\S+)`.*?```yaml\n(.*?)```", page.read_text(), flags=re.S):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


OWN = r"(resume|model\.path|data\.path|ds_config)=\S+ (does not exist|is not a file)|hydra/\S+ is not installed"
"""Messages about files that only a reader has: a checkpoint, a model, texts, a plugin."""


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_every_command_of_a_page_is_accepted(page: Path, here: Path):
    write_files_of(page)
    for words in commands(page):
        settings = [word.replace("/mnt/nvme", ".") for word in words if not word.startswith("-")]
        for run_settings in compose.runs_in(settings) if "-m" in words else [settings]:
            message = refusal_of(run_settings)
            assert not message or re.match(OWN, message), f"{words}: {message}"


def test_a_settings_file_of_the_docs_counts_and_its_mistake_is_shown_as_it_is_said(here: Path) -> None:
    page = ROOT / "docs" / "settings-file.md"
    write_files_of(page)
    of_file, with_steps, of_group = (
        compose.settings_in(compose.compose([word for word in words if "=" in word])) for words in commands(page)
    )
    assert (of_file["steps"], of_file["zero"]["stage"], of_file["optim"]["lr"]) == (500, 3, 3e-4)
    assert (of_file["model"]["layers"], of_file["offload"]["optimizer"], with_steps["steps"]) == (12, "cpu", 20)
    assert of_group["model"] == compose.settings_in(compose.compose(["model=gpt_nano"]))["model"] | {"width": 64}
    mine = Path("settings/experiment/mine.yaml")
    mine.write_text(mine.read_text().replace("stage:", "stge:"))
    assert f"`{refusal_of(commands(page)[0])}`" in page.read_text()


def test_the_blocks_of_own_loop_run(here: Path):
    names = own_loop(accumulate=2)
    pieces, evaluation, text, *_ = blocks("docs/own-loop.md")
    run(pieces, names)
    assert names["state"].step == 1
    run(evaluation, names)
    assert (here / "trace.json").exists()
    assert (here / "checkpoints").is_dir()
    run(text, names)
    assert names["tokens"].shape == (1, 24)


def feed(world: zero.World, address: Any) -> list[dict[str, torch.Tensor]]:
    """Train, and feed the engine at `address` by the functions of the docs, then by vLLM's calls for full weights.

    Returns the weights of this rank's state at each of the three.
    """
    names = own_loop(world=world, stage=3, precision="bf16")
    run(blocks("docs/own-loop.md")[3], names)
    state, step = names["state"], zero.make_step(names["plan"], names["loss_fn"])
    sends = world.rank == 0
    engine, group = (Remote(address), Group("127.0.0.1", 0, 0, 2)) if sends else (None, None)
    broadcast = None
    if engine is not None and group is not None:
        place = {"master_address": "127.0.0.1", "master_port": group.store.port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as beside:
            call = beside.submit(engine.init_weights_update_group, **place, group_name="weights", backend="gloo")
            group.connect()
            call.result()
        broadcast = group.broadcast
    held = []
    for number in range(3):
        if number == 0:
            names["send_all"](state, engine, broadcast)
        elif number == 1:
            names["send_changes"](state, engine, broadcast, since=0)
        else:
            send_all_to_vllm(state, engine, broadcast)
        if engine is not None:
            engine.generate()
        held.append(
            {name: tensor.to(torch.bfloat16) for name, tensor in zero.full_state_dict(state, "compute").items()}
        )
        state, _ = step(state, [names["batch"]])
    if engine is not None:
        engine.leave()
    return held


def send_all_to_vllm(state: zero.State, engine: Any, broadcast: Any) -> None:
    """All parameters in one call of `update_weights`, as vLLM's own trainers send them."""
    sends, shapes = state.plan.world.rank == 0, state.plan.facts.splitting.shapes()
    with ThreadPoolExecutor(1) as beside:
        if sends:
            engine.start_weight_update()
            info = {
                "names": [*shapes],
                "dtype_names": ["bfloat16"] * len(shapes),
                "shapes": [*map(list, shapes.values())],
            }
            call = beside.submit(engine.update_weights, info)
        for _, tensor in zero.stream_weights(state):
            if sends:
                broadcast(tensor)
        if sends:
            call.result()
            engine.finish_weight_update()


def test_an_engine_in_another_process_has_the_weights_of_the_trainers():
    """This process is the engine; two trainers run the functions of the docs."""
    engine = Engine()
    with engine.served() as address:
        [held, others] = run_processes(2, feed, address)
    for received, first, second in zip(engine.seen, held, others, strict=True):
        assert received.keys() == first.keys()
        assert all(torch.equal(received[name], first[name]) for name in first)
        assert all(torch.equal(first[name], second[name]) for name in first)
    parameters, rounds = len(held[0]), "".join(f"{name} " for name in engine.calls).split("generate ")
    assert rounds[0] == "init_weights_update_group " + "update_weights_from_distributed " * parameters
    first, *updates, last, _ = rounds[1].split(" ")
    assert (first, {*updates}, last) == ("start_weight_update", {"update_weights"}, "finish_weight_update")
    assert len(updates) <= parameters
    assert rounds[2] == "start_weight_update update_weights finish_weight_update "


def test_the_loop_of_tracking_goes_on_where_it_stopped(here: Path):
    (tracked,) = blocks("docs/tracking.md")
    names = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    rows = {"dataset": torch.randint(256, (40, 9)), "held_out": torch.randint(256, (8, 9))}
    for epochs in (1, 2):
        with zero.empty():
            model = nn.Sequential(nn.Embedding(256, 64), names["Block"](64), nn.Linear(64, 256))
        names |= {"zero": zero, "model": model, "world": zero.open_world(), **rows}
        run(tracked.replace("epochs, rows = 2, 4", f"epochs, rows = {epochs}, 4"), names)
        assert names["state"].tried == 10 * epochs
        names["store"].close()
    lines = [json.loads(line) for line in (here / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["samples"], row["val/loss"] is not None) for row in lines] == [
        (10, 40, True),
        (20, 80, True),
    ]
    assert (here / "runs" / "mine" / "report.html").exists()
    assert (here / "runs" / "mine" / "tensorboard").is_dir()


class Reader(nn.Module):
    """Carries a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(64, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        read, hidden = self.layer(self.embed(tokens), hidden)
        return self.head(read), hidden


def test_hidden_state_of_the_docs_is_carried_as_in_plain_torch():
    model, pieces = Reader(), torch.randint(64, (4, 41)).unfold(1, 9, 8).unbind(1)
    plain, world = copy.deepcopy(model), zero.open_world()
    plan = zero.Plan(model, optimizer=zero.sgd(lr=1.0), world=world)
    names = {"zero": zero, "plan": plan, "state": zero.init(plan, zero.open_store(plan)), "pieces": pieces}
    run(blocks("docs/own-loop.md")[-1], names)
    hidden, optimizer = None, torch.optim.SGD(plain.parameters(), lr=1.0)
    for rows in pieces:
        logits, hidden = plain(rows[:, :-1], None if hidden is None else hidden.detach())
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(zero.get_full(names["state"], name), value.detach(), rtol=0, atol=1e-6)


def test_the_ema_of_the_docs_is_saved_and_the_trained_weights_come_back(here: Path):
    model, config = Reader(), {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = zero.initialize(model=model, config=config | {"optimizer": adam, "zero_optimization": {"stage": 3}})
    weights = [engine.module_state_dict()]
    batches = torch.randint(64, (3, 4, 9)).unbind()

    def loss_fn(model: Any, rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and engine.global_steps:
            weights.append(engine.module_state_dict())
        return nn.functional.cross_entropy(model(rows[:, :-1])[0].flatten(0, 1), rows[:, 1:].flatten())

    names = {"zero": zero, "torch": torch, "engine": engine, "batches": batches, "held_out": batches[0]}
    run(blocks("docs/coming-from-deepspeed.md")[0], names | {"loss_fn": loss_fn})
    weights.append(engine.module_state_dict())
    mean = dict(weights[0])
    for after in weights[1:]:
        mean = {name: value.lerp(after[name], 1 - 0.999) for name, value in mean.items()}
    saved = load_file(here / "ema" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in mean.items())
    assert len(weights) == 4
    assert zero.get_full(engine, "head.weight", "mu").any()
    engine.destroy()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_lora_of_the_docs_runs(here: Path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=64, pad_token_id=None))
    names = {"peft": peft, "zero": zero, "model": model, "world": zero.open_world()}
    run(blocks("docs/hugging-face.md")[0], names)
    assert len(names["adapter"]) == 4


def test_the_mixin_of_the_docs_makes_a_trainer():
    """Transformers' own Trainer stands in for TRL's."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names: dict[str, Any] = {"trl": SimpleNamespace(RewardTrainer=transformers.Trainer)}
    run(blocks("docs/trl.md")[1], names)
    assert issubclass(names["RewardTrainer"], names["ZeroTrainerMixin"])


def test_whole_values_of_the_docs_are_read_and_written():
    with zero.empty():
        model = GPT(GPTConfig(vocab=16, width=16, layers=2, heads=2, seq=8))
    plan = zero.Plan(model, optimizer=zero.adamw(lr=1e-3), world=zero.open_world())
    names = {"zero": zero, "state": zero.init(plan, zero.open_store(plan))}
    run(blocks("docs/whole-values.md")[0], names)
    assert not zero.get_full(names["state"], "embed.weight")[0].any()
    assert not names["full"], "the whole values are freed"


def test_fsdp2_and_its_example_print_the_same_losses(here: Path):
    """Run both in a process of their own, because torch's process group is global."""
    (fsdp2,) = blocks("docs/coming-from-fsdp.md")
    example = repr(str(EXAMPLES / "fsdp2.py"))
    program = f"""import os, runpy, torch
globals().update(runpy.run_path({example}))
{fsdp2}
torch.distributed.destroy_process_group()
runpy.run_path({example}, run_name="__main__")
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29732"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=here, capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **alone},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = losses(done.stdout)
    assert len(printed) == 12
    assert printed[6:] == pytest.approx(printed[:6], abs=0.005)


def test_the_recipe_for_ray_runs_its_rank(here: Path, monkeypatch: pytest.MonkeyPatch):
    """A trainer that runs one rank with a small model stands in for Ray's."""

    def fit(trainer: Any) -> None:
        overrides = ["debug=tiny", "steps=2", "launch.threads=1"]
        trainer.rank(trainer.train_loop_config | {"overrides": overrides})

    def trainer(rank: Any, **settings: Any) -> SimpleNamespace:
        made = SimpleNamespace(rank=rank, **settings)
        made.fit = lambda: fit(made)
        return made

    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(ScalingConfig=dict))
    monkeypatch.setitem(sys.modules, "ray.train.torch", SimpleNamespace(TorchTrainer=trainer))
    run(blocks("docs/schedulers.md")[0].replace("/shared", str(here)), {})
    assert (here / "runs" / "ray" / "metrics.jsonl").read_text().count("\n") >= 2


def test_every_block_of_the_docs_has_a_test():
    tested = {
        "README": 2,
        "own-loop": 5,
        "tracking": 1,
        "whole-values": 1,
        "hugging-face": 1,
        "trl": 2,
    }
    tested |= {"parallelism": 5, "coming-from-deepspeed": 1, "coming-from-fsdp": 1, "schedulers": 1}
    counted = {page.stem: len(blocks(str(page.relative_to(ROOT)))) for page in PAGES}
    assert {page: count for page, count in counted.items() if count} == tested


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_every_file_that_a_page_points_to_exists(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^":]+)"', text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_every_heading_that_a_page_points_to_exists(page: Path):
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / path if path else page).read_text()
        headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{path}#{anchor}"
