"""Weights leave a run unit by unit; patches applied to the weights of a kept step make the present ones, to the bit."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zero
from tests.common.small import KiB, Setting, Small, adamw_in_bf16, slice_of, small_batch
from tests.simulation import simulated_gpu
from tests.trainer.test_planning import peak_of
from zero.engine.whole import streaming
from zero.engine.whole.edit import gathered
from zero.errors import ConfigError, HandshakeError, StaleStateError
from zero.testing import run_ranks

PLACES = [
    Setting(stage=stage, precision=precision, offload=(("preset", preset),), page_bytes=4 * KiB)
    for stage, precision, preset in [
        (0, "bf16", "none"),
        (0, "fp32", "nvme"),
        (1, "fp16", "cpu"),
        (2, "bf16", "none"),
        (2, "bf16", "nvme"),
        (3, "bf16", "none"),
        (3, "bf16", "cpu"),
        (3, "fp32", "infinity"),
    ]
]
PLACES += [
    PLACES[5].but(optimizer=adamw_in_bf16),
    PLACES[5].but(bucket=1000, keep=("blocks.*",)),
    PLACES[6].but(optimizer=zero.muon, master="whole"),
    PLACES[5].but(frozen="int8"),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces that are smaller than most units."""
    monkeypatch.setattr(streaming, "PIECE_NUMEL", 100)


def batch_for(world, number):
    return slice_of(small_batch(number, 6 * world.size), world, 1)


def patched(weights, patches):
    """The weights after patches, as a receiver makes them from flat indices and values."""
    for name, indices, values, shape in patches:
        full = weights[name]
        assert (tuple(full.shape), full.dtype, indices.dtype) == (shape, values.dtype, torch.int32)
        assert indices.diff().gt(0).all(), "ascending"
        full.view(-1)[indices.long()] = values
    return weights


def bits_of(weights):
    return {name: (tensor.dtype, tensor.shape, tensor.view(-1).view(torch.uint8).tolist()) for name, tensor in weights}


def stream_often(world, setting):
    """Return the number of elements in each stream of patches, with steps or edits before each."""
    state, step = setting.start(world)
    received, numbers = dict(zero.stream_weights(state, keep=True)), []
    for number in range(4):
        since = state.step
        for _ in range(number + 1 if number < 3 else 0):
            state, _ = step(state, batch_for(world, state.step))
        if number >= 2:
            edit(state, zero=-0.0 if number == 3 else 0.0)
        patches = [*zero.stream_weights(state, changed_since=since)]
        numbers.append(sum(patch.indices.numel() for patch in patches))
        received = patched(received, patches)
        streamed = dict(zero.stream_weights(state))
        held = zero.full_state_dict(state, "compute")
        assert [*streamed] == [*held], "names and their order are those of full_state_dict"
        assert all(torch.equal(held[name], tensor.float()) for name, tensor in streamed.items())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in streamed.values()), "copies"
        assert {tensor.dtype for tensor in streamed.values()} == {state.plan.precision.compute}
        assert bits_of(received.items()) == bits_of(streamed.items())
        assert not [*zero.stream_weights(state, changed_since=state.step)], "nothing has changed since"
    residency = state.runtime.residency
    assert residency.pool is None or not residency.pool.overflowed, "one unit at a time"
    state.runtime.store.close()
    return numbers


def edit(state, zero):
    """Change a trained and a frozen parameter. Zeros of both signs compare as equal numbers."""
    with gathered(state, ["norm.bias", "blocks.2.norm.bias"], modify=True) as full:
        full["norm.bias"].fill_(zero)
        full["blocks.2.norm.bias"].add_(1)


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("setting", PLACES)
def test_patched_equals_full(setting, size):
    numbers = run_ranks(size, stream_often, setting)
    assert len({*map(tuple, numbers)}) == 1, "every rank gets the same patches"
    assert all(number > 0 for number in numbers[0])


def test_a_copy_on_each_node_streams_the_same():
    setting = PLACES[5].but(shard="node")
    assert run_ranks(4, stream_often, setting, nodes=2) == run_ranks(4, stream_often, PLACES[5], nodes=2)


def test_two_nodes_stream_the_same_by_node():
    setting = PLACES[5].but(between=("node", "exact"))
    assert run_ranks(4, stream_often, setting, nodes=2) == run_ranks(4, stream_often, PLACES[5], nodes=2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("setting", [PLACES[0], *PLACES[2:4], *PLACES[5:8]])
def test_no_wait_is_missing_on_a_gpu(setting):
    with simulated_gpu():
        expected = run_ranks(2, stream_often, setting)
    with simulated_gpu(races=True, order="late"):
        assert run_ranks(2, stream_often, setting) == expected


def stream_what_was_updated_ahead(world):
    """Reading one parameter gathers the units after it ahead, on a stream of its own, which updates them first."""
    state, step = PLACES[5].but(prefetch=12).start(world)
    for _ in zero.stream_weights(state, keep=True):
        pass
    forward = zero.make_forward(state.plan, lambda model, tokens: model(tokens))
    for number in range(2):
        state, _ = step(state, batch_for(world, number))
        if number == 0:
            forward(state, small_batch(9, 5)[:, 0])
    with torch.no_grad():
        state.model.embed.weight.sum()
    return [(name, bits.tolist()) for name, _, bits, _ in zero.stream_weights(state, changed_since=0)]


def test_no_wait_is_missing_for_units_that_were_updated_ahead():
    with simulated_gpu():
        expected = run_ranks(2, stream_what_was_updated_ahead)
    with simulated_gpu(races=True, order="late"):
        assert run_ranks(2, stream_what_was_updated_ahead) == expected


def step_a_little(world, lr):
    state, step = PLACES[5].but(lr=lr, weight_decay=0.0).start(world)
    for _ in zero.stream_weights(state, keep=True):
        pass
    state, _ = step(state, batch_for(world, 0))
    patches = [*zero.stream_weights(state, changed_since=0)]
    return sum(patch.indices.numel() for patch in patches), state.plan.numel


def test_only_elements_that_change_in_the_dtype_of_compute_are_yielded():
    (large, numel), _ = run_ranks(2, step_a_little, 1e-2)
    (small, _), _ = run_ranks(2, step_a_little, 1e-6)
    assert 0 < small < large / 5 < numel


def misuse(world):
    state, step = PLACES[5].start(world)
    with pytest.raises(ConfigError, match=r"changed_since=0: no step was kept\. Stream all"):
        zero.stream_weights(state, changed_since=0)
    [*itertools.islice(zero.stream_weights(state, keep=True), 3)]
    with pytest.raises(ConfigError, match="no step was kept"):  # the stream was not read to its end
        zero.stream_weights(state, changed_since=0)
    [*zero.stream_weights(state, keep=True)]
    state, _ = step(state, batch_for(world, 0))
    first, second = (zero.stream_weights(state, changed_since=0) for _ in range(2))
    assert [*first]
    with pytest.raises(ConfigError, match="changed_since=0: the step that was kept is 1"):
        next(second)  # the changes have been yielded to another
    stream = zero.stream_weights(state)
    next(stream)
    old, (state, _) = state, step(state, batch_for(world, 1))
    with pytest.raises(StaleStateError, match="already consumed by step 2"):
        next(stream)
    with pytest.raises(StaleStateError):
        zero.stream_weights(old)
    with pytest.raises(ConfigError, match="changed_since=2: the step that was kept is 1"):
        zero.stream_weights(state, changed_since=2)
    with pytest.raises(ConfigError, match=r"for name, tensor in zero.stream_weights\(state\):"):
        zero.stream_weights(state.model)  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match="changed_since"):
        zero.stream_weights(state, changed_since=world.rank)


def test_misuse_raises_on_every_rank():
    run_ranks(2, misuse)


def use_the_model_meanwhile(world):
    """A reader that evaluates between two tensors, so that other units take the pool's buffers."""
    state, step = PLACES[5].start(world)
    state, _ = step(state, batch_for(world, 0))
    forward = zero.make_forward(state.plan, lambda model, tokens: model(tokens))
    expected = dict(zero.stream_weights(state))
    for name, tensor in zero.stream_weights(state, device="cpu"):
        assert torch.equal(tensor, expected[name]), name
        forward(state, small_batch(9, 5)[:, 0])


def test_a_reader_may_use_the_model_between_two_tensors():
    run_ranks(2, use_the_model_meanwhile)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.4, 1.0])
def test_patches_take_memory_for_a_piece_and_not_for_a_parameter(share, monkeypatch):
    monkeypatch.setattr(streaming, "PIECE_NUMEL", 4096)
    state, _ = PLACES[5].start(zero.open_world(device="cpu"), lambda: Small(width=512))
    changed, since = round(share * 512), state.step
    for _ in zero.stream_weights(state, keep=True):
        pass
    with gathered(state, ["blocks.1.linear.weight"], modify=True) as full:
        full["blocks.1.linear.weight"][:, :changed] += 1
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        count = sum(len(patch.indices) for patch in zero.stream_weights(state, changed_since=since))
    assert count == 512 * changed
    assert peak_of(profiled) < 40 * 4096 + 64 * KiB
