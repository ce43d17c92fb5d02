"""A manifest reads as it was written, and a changed text raises, also with a recomputed hash (`restamped`).

`painted` checks the offsets of bytes with an independent count of elements.
"""

import json
import random
import re
import time
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import zero
from zero.checkpoint.contents import flats
from zero.checkpoint.format.hashes import SPAN_BYTES, FileHash, hash_block
from zero.checkpoint.format.manifest import (
    ITEM_BYTES,
    File,
    Index,
    Manifest,
    SavedFlat,
    file_name,
    held,
    index_name,
    step_name,
)
from zero.checkpoint.format.random_generators import random_state
from zero.checkpoint.format.texts import (
    CAP_BYTES,
    FORMAT,
    from_text,
    index_cap_bytes,
    index_from_text,
    index_to_text,
    to_text,
)
from zero.core.layout import Layout
from zero.core.placement import NO_LIMIT
from zero.errors import CheckpointError
from zero.platform.safetensors_files import header
from zero.platform.step_folders import step_of
from zero.trainer.planning import PaperWorld

SHA = "0123456789abcdef" * 4

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def laid_out(world: int, shared: list[tuple[dict[str, str], int, int, dict[str, tuple[int, ...]]]], **rest) -> Manifest:
    """A sound manifest: (kinds, sharers, copies, shapes) of each flat."""
    made = tuple(
        SavedFlat(kinds, Layout.of(shapes, world_size=sharers), copies) for kinds, sharers, copies, shapes in shared
    )
    count = world * (1 + any(flat.frozen for flat in made))
    files = tuple(File(8192 + number, SHA) for number in range(count))
    defaults = {"format": FORMAT, "step": 20, "finite": True, "facts": {}}
    return Manifest(**{**defaults, "world": world, "flats": made, "files": files, **rest})


@st.composite
def manifests(draw) -> Manifest:
    world = draw(st.integers(1, 8))
    names = draw(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=6))
    shared = []
    while names:
        kinds = draw(st.lists(st.sampled_from(["parameter", "exp_avg", "frozen", "buffer"]), unique=True))
        sharers = draw(st.integers(1, world))
        shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=len(names)))
        shapes = {names.pop(): shape for shape in shapes}
        dtypes = {kind: draw(st.sampled_from(sorted(ITEM_BYTES))) for kind in kinds}
        shared.append((dtypes, sharers, draw(st.integers(1, world // sharers)), shapes))
    return laid_out(
        world,
        shared,
        step=draw(st.integers(0, 9_999_999_999)),
        finite=draw(st.booleans()),
        facts=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )


def sample() -> Manifest:
    return laid_out(
        2,
        [
            ({"parameter": "float32", "exp_avg": "bfloat16"}, 2, 1, {"wte.weight": (7, 5), "ln.bias": (), "b": (99,)}),
            ({"frozen": "float16"}, 1, 2, {"empty": (0, 3)}),
            ({"buffer": "bool"}, 1, 1, {"mask": (2, 2)}),
        ],
        facts={"config": "00ff", "rng": {"0": [1, 2**64 - 1]}, "loss_scale": 65536.0, "tracker": None, "done": False},
    )


def body_of(manifest: Manifest) -> dict:
    body = json.loads(to_text(manifest))
    del body["sha256"]
    return body


def restamped(body: dict | str) -> str:
    """With a hash that is right, by the rule in the docstring: of all lines before the last one."""
    text = body if isinstance(body, str) else json.dumps(body)
    head = text.removesuffix("}") + ",\n"
    return f'{head}"sha256":"{sha256(head.encode("utf-8", "surrogatepass")).hexdigest()}"}}\n'


def encoded(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def painted(manifest: Manifest) -> None:
    """Every element of every tensor is in one rank's file once, and each tensor begins there once."""
    if any(entry.numel > 10**5 for entry in manifest.entries):
        return  # no file is so long, and opening a file compares its length
    written = {(entry.name, entry.kind): bytearray(entry.numel) for entry in manifest.entries}
    for number in range(len(manifest.files)):
        pieces = held(manifest.flats, number, manifest.world)
        assert all(manifest.flats[piece.flat].frozen == (number >= manifest.world) for piece in pieces)
        assert len({piece.part.key for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.part.nbytes == (piece.stop - piece.start) * getattr(torch, piece.dtype).itemsize
            for element in range(piece.start, piece.stop):
                written[piece.slot.name, piece.kind][element] += 1
    assert all(count == 1 for counts in written.values() for count in counts)


def refusal_of(text: bytes | str) -> str:
    """Return the one line that rejects a text."""
    with pytest.raises(CheckpointError) as caught:
        from_text(encoded(text))
    line = str(caught.value)
    assert line
    assert "\n" not in line
    assert len(line) < 500
    return line


# ---- there and back


@settings(deadline=None)
@given(manifests(), st.randoms(use_true_random=False))
def test_a_manifest_comes_back_as_it_was_written(manifest, rng):
    """One JSON object in ASCII whose last line is its hash; facts in another order give the same text."""
    text = to_text(manifest)
    assert from_text(text.encode()) == manifest
    assert text.isascii()
    *lines, last = text.splitlines(keepends=True)
    body = json.loads(text)
    assert last == f'"sha256":"{sha256("".join(lines).encode()).hexdigest()}"}}\n'
    assert (body["step"], body["world"], body["facts"]) == (manifest.step, manifest.world, manifest.facts)
    names = list(manifest.facts)
    rng.shuffle(names)
    assert to_text(manifest._replace(facts={name: manifest.facts[name] for name in names})) == text


@settings(deadline=None)
@given(manifests(), st.data())
def test_the_files_of_all_ranks_have_every_element_once_and_the_holders_of_a_range_are_in_order(manifest, data):
    painted(manifest)
    for flat in manifest.flats:
        if flat.layout.P:
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, flat.layout.P)] * 2)))
            if start == stop:
                continue
            pieces = list(flat.holders(start, stop))
            assert [element for _, first, last in pieces for element in range(first, last)] == list(range(start, stop))
            for rank, first, last in pieces:
                begin, end = flat.share(rank)
                assert begin <= first < last <= end


@pytest.mark.parametrize("value", [b"", "", b"{}", "{}\n", b"\0" * 100, b"null", "é" * 100, b"\xff\xfe"])
def test_what_is_no_manifest_is_refused(value):
    refusal_of(value)


# ---- damage

SEED = 20


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """One of five things that happen to bytes."""
    start, other = rng.randrange(len(raw)), rng.randrange(len(raw))
    stop = min(len(raw), start + rng.choice([1, 2, 8, 64, 512]))
    return rng.choice(
        [
            raw[:start] + bytes([raw[start] ^ 1 << rng.randrange(8)]) + raw[start + 1 :],
            raw[:start] + bytes([rng.choice(b'0123456789-eE.,:[]{}"tfn\\ ')]) + raw[start + 1 :],
            raw[:start] + raw[stop:],
            raw[:other] + raw[start:stop] + raw[other:],
            raw[:start] + rng.randbytes(stop - start) + raw[stop:],
        ]
    )


def test_damaged_texts_are_refused_or_say_the_same():
    print("seed", SEED)
    rng = random.Random(SEED)
    manifest = sample()
    raw = to_text(manifest).encode()
    refused = 0
    for _ in range(1000):
        text = damaged(raw, rng)
        if text.removesuffix(b"\n") == raw.removesuffix(b"\n"):
            continue
        refusal_of(text)
        refused += 1
    assert refused > 950


def small_sample() -> Manifest:
    shared = [({"parameter": "float32"}, 2, 1, {"a": (3, 5), "c": (70,)}), ({"buffer": "int8"}, 1, 1, {"b": (6,)})]
    return laid_out(2, shared, facts={"x": [1.5, None, "s"]})


def test_damaged_texts_with_the_hash_made_right_are_refused_or_sound():
    print("seed", SEED)
    rng = random.Random(SEED)
    raw = json.dumps(body_of(small_sample())).encode()
    read = 0
    for _ in range(600):
        text = restamped(damaged(raw, rng).decode("latin-1"))
        try:
            manifest = from_text(encoded(text))
        except CheckpointError:
            refusal_of(text)
            continue
        painted(manifest)
        assert from_text(to_text(manifest).encode()) == manifest
        read += 1
    assert 15 < read < 200  # another digit of a SHA or a fact: nobody can tell; were it none, nothing was tried


# ---- lies, one at a time


def flat(body: dict) -> dict:
    return body["flats"][0]


def tensor(body: dict) -> dict:
    return flat(body)["tensors"][0]


LIES = {
    "a newer format": (
        lambda b: b.update(format=FORMAT + 1),
        "but this version of zero reads format",
    ),
    "no format": (lambda b: b.pop("format"), "format of the manifest: Field required"),
    "an unknown key": (lambda b: b.update(extra=1), "extra of the manifest: Extra inputs"),
    "an unknown key of a tensor": (lambda b: tensor(b).update(path="x"), r"flats\.0\.tensors\.0\.path of the manifest"),
    "more sharers than ranks": (lambda b: flat(b).update(sharers=3), r"flats\.0 .* on 3 ranks each need more than 2"),
    "more copies than ranks": (
        lambda b: flat(b).update(copies=2),
        r"flats\.0 .* 2 copies on 2 ranks each need more than 2",
    ),
    "a step of eleven digits": (lambda b: b.update(step=10**10), "step of the manifest: .* value is 10000000000"),
    "a world of three with the files of two": (lambda b: b.update(world=3), "4 files for a world of 3"),
    "a fact that is NaN": (lambda b: b["facts"].update(x=float("nan")), "facts.x.* of the manifest: .* finite number"),
    "a kind that is a path": (lambda b: flat(b).update(kinds={"../x": "int8"}), r"flats\.0\.kinds\.\.\./x"),
    "the same tensor twice": (lambda b: flat(b)["tensors"].append(tensor(b)), r"flats\.0 .*lists a tensor twice"),
    "an unknown dtype": (
        lambda b: flat(b)["kinds"].update(parameter="object"),
        r"kinds\.parameter .* value is 'object'",
    ),
    "a negative axis": (lambda b: tensor(b).update(shape=[-7, -5]), r"shape\.0 .* value is -7"),
    "an axis that overflows": (lambda b: tensor(b).update(shape=[2**64 + 35]), r"shape\.0"),
    "ten thousand axes": (lambda b: tensor(b).update(shape=[2**62] * 10_000), r"tensors\.0\.shape"),
    "a SHA that is short": (lambda b: b["files"][0].update(index_sha256="00"), r"files\.0\.index_sha256"),
}


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name_though_the_hash_is_right(lie):
    change, says = LIES[lie]
    body = body_of(sample())
    change(body)
    line = refusal_of(restamped(body))
    assert re.search(says, line), line


# ---- an index


def index_of(size: int) -> Index:
    hashes = FileHash(size, b"\x07" * 32, bytes(4) + b"\xff" * 4)
    return Index(hashes, {"python": [3, [1], None], "torch": "00", "cuda": None})


def test_an_index_comes_back_as_it_was_written():
    index = index_of(SPAN_BYTES + 1)
    assert index_from_text(index_to_text(index).encode(), SPAN_BYTES + 1) == index


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body.pop("crcs"), "crcs of the index: Field required"),
        (lambda body: body.update(path="/etc/passwd"), "path of the index: Extra inputs"),
        (lambda body: body.update(crcs=body["crcs"][:-8]), "crcs of the index: 8 digits do not fit"),
        (lambda body: body.update(crcs=body["crcs"][:-1] + "g"), "crcs of the index"),
        (lambda body: body.update(digests=body["digests"] * 2), "digests of the index: 128 digits do not fit"),
        (lambda body: body.update(digests=None), "digests of the index: .* value is None"),
    ],
)
def test_an_index_that_does_not_fit_its_file_is_refused(change, says):
    body = json.loads(index_to_text(index_of(SPAN_BYTES + 1)))
    change(body)
    with pytest.raises(CheckpointError, match=says):
        index_from_text(json.dumps(body).encode(), SPAN_BYTES + 1)


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"a":NaN}'])
def test_what_is_no_index_is_refused(text):
    with pytest.raises(CheckpointError) as caught:
        index_from_text(text, 4096)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_an_index_is_not_longer_than_its_cap(blocks: int):
    block = hash_block(memoryview(bytes(16 * SPAN_BYTES)))
    hashes = FileHash(blocks * block.size, block.digests * blocks, block.crcs * blocks)
    generators = random_state() | {"cuda": "00" * 16}
    assert len(index_to_text(Index(hashes, generators))) <= index_cap_bytes(hashes.size)


# ---- the largest worlds


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.mlp = nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, width)])


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100_000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 100_000, bias=False)


@pytest.mark.parametrize(("width", "depth", "ranks"), [(16_384, 126, 1024), (25_600, 128, 4096)], ids=["405B", "1T"])
def test_rank_0_makes_the_manifest_of_the_largest_model_in_two_seconds(width: int, depth: int, ranks: int):
    """Rank 0 alone publishes a save. Time all of that except opening files."""
    with torch.device("meta"):
        model = Model(width, depth)
    world = PaperWorld(ranks, local_size=8, device="cpu")
    optimizer = zero.adamw(lr=1e-4)
    plan = zero.Plan(model, optimizer=optimizer, stage=3, precision="bf16", world=world, room=NO_LIMIT)
    began_s = time.process_time()
    shared = flats(plan, {})
    parts = [piece.part for piece in held(shared, 0, ranks)]
    size = len(header(parts)) + sum(part.nbytes for part in parts)
    text = to_text(Manifest(FORMAT, 10**9, ranks, shared, (File(size, SHA),) * ranks, True, {}))
    read = from_text(text.encode())
    taken_s = time.process_time() - began_s
    print(f"{taken_s:.2f} s, {len(text)} bytes")
    assert taken_s < 2
    assert len(text) < 8e6
    assert sum(entry.numel for entry in read.entries) == 3 * sum(parameter.numel() for parameter in model.parameters())
    assert size * ranks > 12 * sum(parameter.numel() for parameter in model.parameters())
    assert index_cap_bytes(size) < 2e6


# ---- text that json would take


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_deep_nesting_is_refused(bracket):
    shut = "".join({"[": "]", "{": "}"}.get(letter, "") for letter in reversed(bracket))
    value = bracket * 1_000_000 + "0" + shut * 1_000_000
    text = json.dumps(body_of(sample())).replace("65536.0", value)
    refusal_of(restamped(text))
    refusal_of(restamped(text.replace('"step": 20', f'"step": {value}')))


def test_a_number_of_five_thousand_digits_raises():
    text = json.dumps(body_of(sample())).replace("65536.0", "1" * 5000)
    assert "cannot be parsed as ASCII JSON" in refusal_of(restamped(text))


def test_text_outside_ascii_is_refused_though_json_takes_it():
    text = restamped(json.dumps(body_of(sample())).replace("mask", "mäsk"))
    assert "cannot be parsed as ASCII JSON" in refusal_of(text)


def test_an_older_hash_is_not_enough():
    """The last line of another manifest."""
    first, second = to_text(sample()), to_text(small_sample())
    assert "not the hash" in refusal_of("\n".join([first.splitlines()[0], second.splitlines()[1], ""]))


# ---- limits of what is written


def test_what_would_not_be_read_is_not_written():
    with pytest.raises(CheckpointError, match="1 files for a world of 2"):
        to_text(sample()._replace(files=sample().files[:1]))
    room = CAP_BYTES + 1 - len(to_text(laid_out(1, [], facts={"x": ""})))
    with pytest.raises(CheckpointError, match=f"would have {CAP_BYTES + 1} bytes"):
        to_text(laid_out(1, [], facts={"x": "y" * room}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("inf"), "facts.x.float of the manifest: .* value is inf"),
        ((1, 2), r"facts.x of the manifest: .* value is \(1, 2\)"),
        (torch.ones(2), "facts.x of the manifest: input was not a valid JSON value"),
        ({1: 2}, "facts.x.* of the manifest: .* value is 1"),
        (10**5000, "a fact cannot be written as JSON"),
        (nested(3000), "facts.x.* of the manifest: Recursion error"),
    ],
    ids=["inf", "tuple", "tensor", "key", "long", "deep"],
)
def test_a_fact_that_would_not_come_back_is_not_written(value, says):
    with pytest.raises(CheckpointError, match="^" + says):
        to_text(laid_out(1, [], facts={"x": value}))


# ---- names


def test_the_name_of_a_step_says_the_step():
    for step in (0, 20, 9_999_999_999):
        assert step_of(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-10", "step-00000000020", "step-+00000020", "step-٠٠٠٠٠٠٠٠٢٠", " step-0000000020", "step-0000000020\n"],
)
def test_no_other_name_is_a_step(name):
    assert step_of(name) is None


def test_files_are_named_by_rank_and_world():
    assert file_name(1, 2) == "rank-00001-of-00002.safetensors"
    assert index_name(99_998, 99_999) == "rank-99998-of-99999.json"
