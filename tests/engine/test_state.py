"""A state is a value: it is spent once, survives a step that fails, and can be looked at without being changed."""

import contextlib
import linecache
import math
import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import zero
from tests.common.small import KiB, Setting, Small, slice_of, small_batch, small_loss
from tests.conftest import LONG_S
from zero.distributed.world import World
from zero.engine.model.module_tree import ModuleTree
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, HandshakeError, PlanError, RankFailedError, StaleStateError
from zero.testing import run_processes, run_ranks

STAGES = (0, 1, 2, 3)


def batch_for(world, number, accumulate=1):
    return slice_of(small_batch(number, 6 * world.size * accumulate), world, accumulate)


# -- spent -------------------------------------------------------------------------------------------------------------


def test_a_spent_state_says_what_to_write():
    """A program that forgets to keep the new state must not see numbers of a later step."""
    world = World.solo()
    first, step = Setting().start(world)
    second, _ = step(first, batch_for(world, 0))
    for use in (
        lambda: step(first, batch_for(world, 1)),
        lambda: digest(first),
        lambda: first.step,
        lambda: first.scale,
        lambda: first.model,
    ):
        with pytest.raises(StaleStateError, match=r"consumed by step 1\. Write `state, metrics = step\(state, micro"):
            use()
    assert second.step == 1
    step(second, batch_for(world, 1))


# -- steps that fail ---------------------------------------------------------------------------------------------------


class Trip(torch.autograd.Function):
    """The identity, which raises in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ArithmeticError("tripped in backward")


class Fragile(nn.Module):
    """Layers without running statistics, which raise where `where` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, where: str) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, where if number == 2 else "")
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, where: str) -> Tensor:
        if where == "forward":
            raise ArithmeticError("tripped in forward")
        return Trip.apply(self.linear(x)).tanh() if where == "backward" else self.linear(x).tanh()


def fragile_loss(model, batch):
    x, where = batch
    if where == "before":
        raise ArithmeticError("tripped before")
    loss = model(x, where).square().mean()
    if where == "after":
        raise ArithmeticError("tripped after")
    return loss


def fragile_batch(world, number, accumulate, where=""):
    """The last microbatch trips."""
    x = torch.randn(3 * world.size * accumulate, 5, generator=torch.Generator().manual_seed(number))
    parts = slice_of(x, world, accumulate)
    return [(part, where if m == accumulate - 1 else "") for m, part in enumerate(parts)]


def stumble(world, setting, where):
    """A step, one that fails and one that would fail again, the digest; a last step, and the digest then."""
    state, step = setting.start(world, Fragile, fragile_loss)
    state, _ = step(state, fragile_batch(world, 0, setting.accumulate))
    if where:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match=f"tripped.*{where}"):
                step(state, fragile_batch(world, 1, setting.accumulate, where))
        between = digest(state)
        with pytest.raises(ArithmeticError):
            step(state, fragile_batch(world, 1, setting.accumulate, where))
        assert digest(state) == between
    else:
        between = digest(state)
    state, metrics = step(state, fragile_batch(world, 2, setting.accumulate))
    pool = state.runtime.residency.pool
    assert pool is None or (pool.overflowed, pool.pinned) == (0, 0)
    return between, digest(state), metrics


WORLDS = ((1, 1, "remat"), (2, 1, "keep"), (2, 2, "remat"), (3, 2, "keep"))
FAILURES = [
    *((0, "backward"), (1, "forward"), (2, "after"), (3, "before")),
    *((3, "forward"), (0, "before"), (3, "backward")),
]


@pytest.mark.parametrize(("stage", "where"), FAILURES)
def test_a_step_that_fails_on_every_rank_leaves_the_state_good(stage, where):
    """Not a bit changes, though an update was waiting; the next step is the one that would have been taken."""
    size, accumulate, activations = WORLDS[FAILURES.index((stage, where)) % 4]
    setting = Setting(stage=stage, accumulate=accumulate, activations=activations, clip=0.5)
    assert run_ranks(size, stumble, setting, where) == run_ranks(size, stumble, setting, "")


def bits_here(state):
    """Return the bits on this rank, read without the other ranks."""
    units = state.runtime.units
    tensors = [tensor.clone() for unit in units for tensor in unit.shards]
    for page, spec in state.plan.pages.store_pages().items():
        tensors.append(torch.empty(spec.numel))
        state.runtime.store.read(page, tensors[-1]).wait()
    return tensors


def one_rank_stumbles(world, stage, where, seen):
    """Notes in `seen` what each rank met and whether it still holds what it held."""
    state, step = Setting(stage=stage, update="serial").start(world, Fragile, fragile_loss)
    state, _ = step(state, fragile_batch(world, 0, 1))
    world.barrier("the first step")  # it ends with gathers, so a rank may still be at them
    before = bits_here(state)
    try:
        step(state, fragile_batch(world, 1, 1, where if world.rank == 1 else ""))
    except Exception as error:
        same = all(torch.equal(*pair) for pair in zip(before, bits_here(state), strict=True))
        seen[world.rank] = error, same and state.step == 1
        raise


@pytest.mark.parametrize(("stage", "where"), FAILURES[::2] + FAILURES[-1:])
def test_a_step_that_fails_on_one_rank_ends_all_and_changes_nothing(stage, where):
    """The first cause is what is reported, with its rank; the others name it, and no rank keeps half a step."""
    seen = {}
    with pytest.raises(ArithmeticError, match=f"tripped.*{where}") as caught:
        run_ranks(3, one_rank_stumbles, stage, where, seen)
    assert "raised on rank 1 of 3" in caught.value.__notes__
    assert sorted(seen) == [0, 1, 2]
    assert all(same for _, same in seen.values())
    for rank in (0, 2):
        assert isinstance(seen[rank][0], RankFailedError)
        assert "rank 1 failed first: ArithmeticError: tripped" in str(seen[rank][0])


# -- looking -----------------------------------------------------------------------------------------------------------


def look(world, setting, looks):
    """Train `Small`; between steps, evaluate it and compare with a plain model of the same parameters."""
    state, step = setting.start(world)
    forward = zero.make_forward(state.plan, lambda model, tokens: model(tokens))
    tokens = small_batch(99, 8)[:, 0]
    for number in range(3):
        state, _ = step(state, batch_for(world, number))
        if looks:
            seen = forward(state, tokens)
            assert not seen.requires_grad
            assert state.model.training
            plain = Small().eval()
            buffers = {name.replace("module.", ""): buffer for name, buffer in state.model.named_buffers()}
            plain.load_state_dict(full_state_dict(state, "compute") | buffers, strict=False)
            for parameter in plain.parameters():
                parameter.data = parameter.data.to(seen.dtype)
            assert torch.equal(seen, plain(tokens))
            before = digest(state)
            assert torch.equal(forward(state, tokens), seen)
            assert digest(state) == before
    return digest(state)


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_forward_sees_the_waiting_update_and_changes_nothing(stage, precision):
    """Evaluation between steps: the state's own step is what is seen, and training goes on as if nobody had looked."""
    setting = Setting(stage=stage, precision=precision, clip=0.5)
    assert run_ranks(2, look, setting, True) == run_ranks(2, look, setting, False)


def failing_look(world, stage):
    state, step = Setting(stage=stage).start(world)
    state, _ = step(state, batch_for(world, 0))

    def fn(model, tokens):
        model(tokens)
        raise ArithmeticError("tripped while looking")

    with pytest.raises(ArithmeticError):
        zero.make_forward(state.plan, fn)(state, small_batch(99, 8)[:, 0])
    assert state.model.training
    state, _ = step(state, batch_for(world, 1))
    return digest(state)


def two_steps(world, stage):
    state, step = Setting(stage=stage).start(world)
    for number in range(2):
        state, _ = step(state, batch_for(world, number))
    return digest(state)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_fails_changes_nothing(stage):
    assert run_ranks(2, failing_look, stage) == run_ranks(2, two_steps, stage)


# -- first values ------------------------------------------------------------------------------------------------------


def first_values(world, setting):
    state, _ = setting.start(world)
    return full_state_dict(state)


def assert_same(state_dict, other):
    assert state_dict.keys() == other.keys()
    assert all(torch.equal(state_dict[name], other[name]) for name in state_dict)


def test_first_values_depend_on_the_seed_alone():
    """Not on stage, world, precision or bucket, or on what is called a unit."""
    expected = first_values(World.solo(), Setting())
    for size, stage in ((1, 0), (2, 1), (3, 2), (8, 3), (3, 3)):
        units = (None, ("Block",), ("Small",), ("Linear", "Norm", "Embedding"))[stage]
        setting = Setting(stage=stage, units=units, bucket=2048 * stage, precision=("fp32", "bf16", "fp16")[size % 3])
        for state_dict in run_ranks(size, first_values, setting):
            if setting.precision == "fp32":
                assert_same(state_dict, expected)
            else:  # frozen parameters have no master
                trained = {name for name in state_dict if not name.startswith("blocks.2") and name != FROZEN}
                assert_same({n: state_dict[n] for n in trained}, {n: expected[n] for n in trained})
    other = first_values(World.solo(), Setting(seed=1))
    assert not torch.equal(other["blocks.0.linear.weight"], expected["blocks.0.linear.weight"])
    assert not torch.equal(expected["blocks.0.linear.weight"], expected["blocks.1.linear.weight"])


FROZEN = "blocks.0.linear.bias"


def test_making_first_values_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    first_values(World.solo(), Setting())
    assert torch.equal(torch.get_rng_state(), before)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.odd = nn.Module()
        self.odd.scale = nn.Parameter(torch.empty(3))


def test_an_owner_that_cannot_reset_itself_is_named():
    plan = Setting().plan(World.solo(), Bare)
    with pytest.raises(PlanError, match=r"at odd holds odd\.scale and has no reset_parameters\(\).*weights="):
        zero.init(plan, zero.open_store(plan))


def given_values() -> dict[str, Tensor]:
    """A plain model's values, the tied one under its first name."""
    torch.manual_seed(5)
    plain = Small()
    for block in plain.blocks:
        block.reset_parameters()
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def with_weights(world, stage, weights):
    plan = Setting(stage=stage).plan(world)
    return full_state_dict(zero.init(plan, zero.open_store(plan), weights=weights))


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_come_from_a_mapping_a_file_or_a_function(tmp_path, stage):
    """All three give exactly the values given, on every rank; a file may hold more than is asked for."""
    values = given_values()
    save_file({**values, "head.weight": values["embed.weight"].clone()}, tmp_path / "w.safetensors")

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(values[name])

    for weights in (values, tmp_path / "w.safetensors", str(tmp_path / "w.safetensors"), fill):
        for state_dict in run_ranks(2, with_weights, stage, weights):
            assert_same(state_dict, values)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    values = given_values()
    missing = {name: value for name, value in values.items() if name != "norm.weight"}
    save_file(missing, tmp_path / "missing.safetensors")
    for weights in (missing, tmp_path / "missing.safetensors"):
        with pytest.raises(PlanError, match=r"have no norm\.weight"):
            with_weights(World.solo(), 3, weights)
    with pytest.raises(PlanError, match=r"have norm\.bias in shape \(4,\), but the model has \(13,\)"):
        with_weights(World.solo(), 3, values | {"norm.bias": torch.zeros(4)})
    with pytest.raises(PlanError, match="there is no such file"):
        with_weights(World.solo(), 3, tmp_path / "nothing.safetensors")


# -- what is agreed, what is held --------------------------------------------------------------------------------------


def disagree(world, key, values):
    setting = Setting().but(**{key: values[world.rank]})
    with pytest.raises(HandshakeError) as caught:
        setting.start(world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "told", "values"),
    [
        ("stage", "zero.stage", (3, 2)),
        ("prefetch", "zero.prefetch", (1, 2)),
        ("bucket", "zero.bucket", (0, 2**20)),
        ("bucket", "zero.bucket", ("auto", 1024)),
        ("clip", "optim", (None, 1.0)),
        ("accumulate", "batch.accumulate", (1, 2)),
        ("seed", "seed", (0, 1)),
    ],
)
def test_ranks_that_were_started_differently_are_refused(key, told, values):
    """By every rank, with the field and both values."""
    for message in run_ranks(2, disagree, key, values):
        assert told in message
        assert all(str(value) in message for value in values)


def held_bytes(world, setting):
    """Return the plan's bytes beside the measured ones after two steps, tier by tier and kind by kind."""
    state, step = setting.start(world)
    for number in range(2):
        state, _ = step(state, batch_for(world, number, setting.accumulate))
    digest(state)
    parts = state.runtime
    pages = {"master": 0, "moments": 0}
    for page in state.plan.pages.store_pages():
        in_place = parts.store.in_place(page)
        pages["master" if page.kind.startswith("master") else "moments"] += in_place.nbytes
    assert parts.store.allocated_bytes == sum(pages.values())
    held = {
        "parameters": storages(
            [unit.resident.flat] if unit.resident is not None else unit.shards for unit in parts.units
        ),
        "gathered units": parts.residency.pool.allocated_bytes if parts.residency.pool is not None else 0,
        "gradients": storages([unit.grad] for unit in parts.units if unit.grad is not None),
        "gradient flats": storages([flat.whole] for flat in parts.reducer.reductions.flats._all),
        **pages,
        "buffers": sum(buffer.nbytes for buffer in state.model.buffers()),
    }
    return state.plan.bytes["device"], held


def storages(groups) -> int:
    """Bytes of the memory behind tensors, which may be more than the tensors show."""
    tensors = [tensor for group in groups for tensor in group]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_is_true(stage, size):
    """Every byte that the plan announces is there, and no other."""
    accumulate, prefetch = ((1, 0), (2, 2))[(stage + size) % 2]
    precision, bucket = ("fp32", "bf16")[(stage // 2 + size) % 2], (0, 3 * KiB, "auto")[(stage + size) % 3]
    setting = Setting(stage=stage, precision=precision, accumulate=accumulate, prefetch=prefetch, bucket=bucket)
    for planned, held in run_ranks(size, held_bytes, setting):
        assert planned == held


def test_a_plan_follows_the_formula():
    """bf16 and Adam on W ranks, padding aside: 18P, 6P + 12P/W, 2P + 16P/W, 18P/W bytes of model state, of which a
    split master saves 2. Where nothing is accumulated, stage 1 keeps no more of the gradient than stage 2."""
    formula = {(0, 2): (18, 0), (1, 2): (6, 12), (1, 1): (2, 16), (2, 2): (2, 16), (3, 2): (0, 18)}
    for (stage, accumulate), (everywhere, shared) in formula.items():
        for master, saved in (("whole", 0), ("split", 2)):
            setting = Setting(stage=stage, accumulate=accumulate, precision="bf16", master=master)
            expected = everywhere + shared / 4 - (saved if stage == 0 else saved / 4)
            for planned, numel in run_ranks(4, planned_states, setting):
                assert math.isclose(planned / numel, expected, rel_tol=0.02)


def planned_states(world, setting):
    plan = setting.plan(world, lambda: nn.Sequential(nn.Linear(99, 301), nn.Linear(301, 99)))
    device = plan.bytes["device"]
    return sum(device[kind] for kind in ("parameters", "gradients", "master", "moments")), plan.numel


class Interrupt:
    """Ctrl-C at the `line`-th line of the library that this thread runs.

    Attributes:
        place: file and line where it came; None before.
        lines: lines run so far.
    """

    def __init__(self, line: int) -> None:
        self.line, self.lines, self.place = line, 0, None

    def __call__(self, frame, event, argument):
        if f"{os.sep}zero{os.sep}" not in frame.f_code.co_filename:
            return None
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with:  # Python itself leaves a block without its exit if one comes there
            self.lines += 1
            if self.lines == self.line:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self

    def during(self, call):
        """Return the result of `call`."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(before)


def step_once(state, step, number):
    return step(state, fragile_batch(state.plan.world, number, 1))[0]


def evaluate(state, folder, step):
    x = fragile_batch(state.plan.world, 9, 1)[0][0]
    return state, zero.make_forward(state.plan, lambda model: model(x, "").sum().item())(state)


def read(state, folder, step):
    return state, sum(layer.linear.weight.detach().sum().item() for layer in state.model.layers)


def edit(state, folder, step):
    with zero.gathered(state, ["layers.*.bias"], modify=True) as full:
        for tensor in full.values():
            tensor.fill_(0.5)
    return state, None


def stream(state, folder, step):
    return state, [(name, tensor.tolist()) for name, tensor in zero.stream_weights(state, keep=True)]


def save(state, folder, step):
    return state, zero.save(state, folder / "saved").name


def load(state, folder, step):
    return zero.load(state, zero.open_latest(state.plan.world, folder / "first")[0]), None


USES = {
    "step": lambda state, folder, step: (step_once(state, step, 2), None),
    "evaluation": evaluate,
    "read": read,
    "edit": edit,
    "stream": stream,
    "save": save,
    "load": load,
}


READS = "evaluation", "read", "stream", "save"


def after_interrupt(world, setting, use, line, folder):
    """The interrupt at a line of a use after the second step; the result of the use, and the digest after a last step.

    Both are "spent" if the interrupt has spent the state.
    """
    state, step = setting.start(world, Fragile, fragile_loss)
    folder.mkdir()
    for number in range(2):
        state = step_once(state, step, number)
        if use == "load" and not number:
            zero.save(state, folder / "first")
    if (
        use in READS
    ):  # an update that waits would be made inside of the use, and an interrupt of an update spends the state
        evaluate(state, folder, step)
    interrupt, result = Interrupt(line), None
    with contextlib.closing(state.runtime.store):
        try:
            state, result = interrupt.during(partial(USES[use], state, folder, step))
            assert interrupt.place is None, "an interrupt was lost"
        except KeyboardInterrupt:
            if state.spent_:
                return interrupt, "spent"
        try:
            if interrupt.place:
                state, result = USES[use](state, folder, step)
            state = step_once(state, step, 3)
            pool = state.runtime.residency.pool
            assert pool is None or (pool.overflowed, pool.pinned) == (0, 0)
            return interrupt, (result, digest(state))
        except StaleStateError as error:
            return interrupt, "spent" if "was interrupted half-way" in str(error) else str(error)


def interrupted(world, preset, use, seed, folder):
    setting = Setting(offload=(("preset", preset),), page_bytes=4 * KiB, clip=0.5)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    whole, wanted = after_interrupt(world, setting, use, -1, folder / "whole")
    spent = 0
    for line in sorted(random.Random(seed).sample(range(1, whole.lines), 12 if use == "step" else 5)):
        interrupt, told = after_interrupt(world, setting, use, line, folder / str(line))
        assert told in (wanted, "spent"), f"line {line} of {whole.lines}, {interrupt.place}: {told}"
        spent += told == "spent"
    return spent


@pytest.mark.process
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("preset", ["none", "nvme", "infinity"])
def test_after_ctrl_c_at_any_line_of_a_use_the_state_is_as_before_or_spent(preset, use, tmp_path):
    """Never another state, and no error of the library's own about what the interrupt left behind."""
    seed = random.randrange(1000)
    print(f"seed {seed}")
    [spent] = run_processes(1, interrupted, preset, use, seed, tmp_path)
    assert not spent or use not in READS
    assert spent < 12


# -- one thread at a time ----------------------------------------------------------------------------------------------


def elsewhere(call):
    """Return the error that `call` raises in a thread of its own, or None."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).exception(timeout=LONG_S)


@pytest.mark.parametrize("stage", [0, 3])
def test_while_a_thread_uses_a_state_others_get_an_error_and_change_nothing(stage):
    """Forwards of several threads at once left wrong parameters behind."""
    world = World.solo()
    state, step = Setting(stage=stage).start(world, Fragile, fragile_loss)
    plan, batch = state.plan, fragile_batch(world, 0, 1)
    forward = zero.make_forward(plan, lambda model, x: model(x, ""))
    uses = {
        "forward": lambda: forward(state, batch[0][0]),
        "step": lambda: step(state, batch),
        "model": lambda: state.model(batch[0][0], ""),
        "read": lambda: state.model.layers[0].linear.weight.sum(),
        "save": lambda: full_state_dict(state),
    }
    errors = {}

    def loss(model, batch):
        errors.update({name: elsewhere(use) for name, use in uses.items()})
        return fragile_loss(model, batch)

    state, metrics = zero.make_step(plan, loss)(state, batch)
    for name, error in errors.items():
        assert isinstance(error, ConfigError), f"{name}: {error!r}"
        assert "one thread at a time" in str(error)
    alone, step = Setting(stage=stage).start(world, Fragile, fragile_loss)
    alone, expected = step(alone, batch)
    assert (digest(state), metrics) == (digest(alone), expected)
    assert elsewhere(uses["forward"]) is None, "a thread may use it after another one"


def test_a_step_does_not_end_while_another_thread_runs_the_model():
    """A forward under way would go on with other parameters."""
    state, _ = Setting().start(World.solo(), Fragile, fragile_loss)
    [batch] = fragile_batch(World.solo(), 0, 1)
    step = zero.Step(state)
    step.microbatch()
    step.backward(fragile_loss(state.model, batch))
    forward = zero.make_forward(state.plan, lambda model: [elsewhere(use) for use in (step.finish, step.forget)])
    for error in forward(state):
        assert isinstance(error, ConfigError)
        assert "one thread at a time" in str(error)
    step.finish()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_an_error_instead_of_a_step_that_hangs():
    """A forked process has none of the store's threads."""
    world = World.solo()
    state, step = Setting(offload=(("preset", "infinity"),)).start(world, Fragile, fragile_loss)
    state, _ = step(state, fragile_batch(world, 0, 1))
    child = os.fork()
    if not child:
        try:
            step(state, fragile_batch(world, 1, 1))
        except ConfigError as error:
            os._exit(17 if "forked" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def test_a_backward_before_the_first_microbatch_names_the_call_that_is_missing():
    world = World.solo()
    state, _ = Setting().start(world, Fragile, fragile_loss)
    step = zero.Step(state)
    [batch] = fragile_batch(world, 0, 1)
    for call in (step.backward, step.count):
        with pytest.raises(ConfigError, match=r"Call step.microbatch\(\) before the forward"):
            call(fragile_loss(state.model, batch))
    step.microbatch()
    step.backward(fragile_loss(state.model, batch))
    step.finish()


# -- a model that changes after its state was made ---------------------------------------------------------------------


def exchanged(model: nn.Module) -> None:
    model.head = nn.Linear(13, 12)


def registered(model: nn.Module) -> None:
    model.blocks[1].register_parameter("shift", nn.Parameter(torch.zeros(3)))


def nested_later(model: nn.Module) -> None:
    model.extra = nn.Module()
    model.extra.inner = nn.ModuleList([nn.Linear(2, 2, bias=False)])


def deleted(model: nn.Module) -> None:
    model.norm = nn.Identity()


def untied(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def adapted(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=r"blocks\.0\.linear"))


def parametrized(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.head, "bias", nn.Tanh())


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.norm, "weight", 2)


def wrapped(model: nn.Module) -> None:
    model.norm = nn.Sequential(model.norm, nn.Tanh())


def reordered(model: nn.Module) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def tied_part_wrapped(model: nn.Module) -> None:
    model.head = nn.Sequential(model.head)


def hidden(model: nn.Module) -> None:
    model.head.__dict__.update(bias=nn.Parameter(torch.zeros(11)))


def replaced_in_a_new_dict(model: nn.Module) -> None:
    model.norm.__dict__["_parameters"] = dict(nn.LayerNorm(13).named_parameters())


CHANGES = {
    hidden: r"head\.bias is hidden by an attribute of its module",
    replaced_in_a_new_dict: r"norm\.weight \(13,\) was exchanged for \(13,\)",
    parametrized: r"head\.bias is now head\.parametrizations\.bias\.original",
    pruned: r"norm\.weight is now norm\.weight_orig",
    wrapped: r"norm\.weight is now norm\.0\.weight, norm\.bias is now norm\.0\.bias",
    reordered: r"blocks\.0\.gain is now blocks\.1\.gain, blocks\.0\.unused is now",
    tied_part_wrapped: r"head\.weight is now head\.0\.weight, head\.bias is now head\.0\.bias",
    exchanged: r"head\.bias \(11,\) was exchanged for \(12,\)",
    registered: r"blocks\.1\.shift appeared",
    nested_later: r"extra\.inner\.0\.weight appeared",
    deleted: r"norm\.weight vanished, norm\.bias vanished",
    untied: r"head\.weight appeared",
    adapted: r"blocks\.0\.linear\.lora_A\.default\.weight appeared, blocks\.0\.linear\.lora_B",
}


@pytest.mark.parametrize(("change", "said"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_a_parameter_that_the_plan_does_not_have_ends_the_next_step_save_and_load(change, said, tmp_path):
    plan = zero.Plan(Small(), optimizer=zero.adamw(1e-2), world=zero.open_world())
    with contextlib.closing(zero.open_store(plan)) as store:
        state, step = zero.init(plan, store), zero.make_step(plan, small_loss)
        state, _ = step(state, [small_batch(0, 12)])
        checkpoint = zero.open_checkpoint(plan.world, zero.save(state, tmp_path))
        change(state.model)
        for call in (
            lambda: step(state, [small_batch(1, 12)]),
            lambda: zero.save(state, tmp_path),
            lambda: zero.load(state, checkpoint),
            lambda: zero.full_state_dict(state),
            lambda: list(zero.stream_weights(state)),
        ):
            with pytest.raises(
                ConfigError, match=rf"^the model was changed after .*: ({said}).* Change it before zero"
            ):
                call()


def test_a_layer_in_the_memory_of_a_deleted_one_is_noticed():
    """Python gives it the `id` of the deleted one, unless somebody still refers to that."""
    model = nn.Module()
    model.layer = nn.Linear(4, 4)
    tree = ModuleTree(model)
    del model.layer
    model.layer = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="was exchanged for"):
        tree.check()


def test_parameters_may_get_further_names_and_modules_without_parameters_may_change():
    def trained(change) -> dict[str, Tensor]:
        with zero.empty():
            model = Small()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=zero.open_world())
        with contextlib.closing(zero.open_store(plan)) as store:
            state, step = zero.init(plan, store), zero.make_step(plan, small_loss)
            for number in range(3):
                state, _ = step(state, [small_batch(number, 12)])
                change(state.model)
            return full_state_dict(state)

    def change(model: nn.Module) -> None:
        model.before = model.blocks[0]
        model.blocks.append(nn.Identity())

    torch.testing.assert_close(trained(change), trained(lambda model: None), rtol=0, atol=0)
