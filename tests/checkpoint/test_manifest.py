"""A manifest comes back as it was written; a text that was changed is refused, however well its hash was forged.

`restamped` recomputes the hash, as somebody would who means harm: what stands against that is `from_text`. Where bytes
lie is held against a painter that knows nothing but elements (`painted`).
"""

import copy
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
from zero.checkpoint.hashes import SPAN_BYTES, FileHash, hash_block
from zero.checkpoint.manifest import (
    CAP_BYTES,
    FORMAT,
    ITEM_BYTES,
    UNWRITTEN,
    File,
    Flat,
    Index,
    Manifest,
    file_name,
    from_text,
    held,
    index_cap_bytes,
    index_from_text,
    index_name,
    index_to_text,
    step_name,
    to_text,
)
from zero.checkpoint.save import random_state
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
        Flat(kinds, Layout.of(shapes, world_size=sharers), copies) for kinds, sharers, copies, shapes in shared
    )
    files = tuple(File(8192 + rank, SHA) for rank in range(world))
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


def painted(manifest: Manifest) -> None:
    """Every element of every tensor is in one rank's file once, and each tensor begins there once."""
    if any(entry.numel > 10**5 for entry in manifest.entries):
        return  # no file is so long, and opening a file compares its length
    written = {(entry.name, entry.kind): bytearray(entry.numel) for entry in manifest.entries}
    for rank in range(manifest.world):
        pieces = held(manifest.flats, rank)
        assert len({piece.part.key for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.part.nbytes == (piece.stop - piece.start) * getattr(torch, piece.dtype).itemsize
            for element in range(piece.start, piece.stop):
                written[piece.slot.name, piece.kind][element] += 1
    assert all(count == 1 for counts in written.values() for count in counts)


def refusal_of(text: bytes | str) -> str:
    """The one line that refuses it."""
    with pytest.raises(CheckpointError) as caught:
        from_text(text)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    assert len(line) < 500
    return line


# ---- there and back


@settings(deadline=None)
@given(manifests())
def test_a_manifest_comes_back_as_it_was_written(manifest):
    text = to_text(manifest)
    assert from_text(text) == manifest == from_text(text.encode())
    assert to_text(from_text(text)) == text


@settings(deadline=None)
@given(manifests())
def test_the_text_is_one_json_object_in_ascii_whose_last_line_is_its_hash(manifest):
    text = to_text(manifest)
    assert text.isascii()
    *lines, last = text.splitlines(keepends=True)
    body = json.loads(text)
    assert last == f'"sha256":"{sha256("".join(lines).encode()).hexdigest()}"}}\n'
    assert body["sha256"] in last
    assert (body["step"], body["world"], body["facts"]) == (manifest.step, manifest.world, manifest.facts)


@settings(deadline=None)
@given(manifests(), st.randoms(use_true_random=False))
def test_equal_manifests_have_equal_texts(manifest, rng):
    names = list(manifest.facts)
    rng.shuffle(names)
    shuffled = manifest._replace(facts={name: manifest.facts[name] for name in names})
    assert to_text(shuffled) == to_text(manifest)


@settings(deadline=None)
@given(manifests())
def test_the_files_of_all_ranks_have_every_element_once(manifest):
    painted(manifest)


@settings(deadline=None)
@given(manifests(), st.data())
def test_the_holders_of_a_range_are_the_ranks_whose_shares_have_it_in_order(manifest, data):
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
    """One of eight things that happen to bytes."""
    start = rng.randrange(len(raw))
    stop = min(len(raw), start + rng.choice([1, 2, 8, 64, 512]))
    other = rng.randrange(len(raw))
    kind = rng.randrange(8)
    piece = raw[start:stop]
    if kind == 0:
        return raw[:start] + bytes([raw[start] ^ 1 << rng.randrange(8)]) + raw[start + 1 :]
    if kind == 1:
        return raw[:start]
    if kind == 2:
        return raw[:start] + raw[stop:]
    if kind == 3:
        return raw[:other] + piece + raw[other:]
    if kind == 4:
        return raw[:start] + bytes(len(piece)) + raw[stop:]
    if kind == 5:
        return raw[:start] + rng.randbytes(len(piece)) + raw[stop:]
    if kind == 6:
        return raw[:start] + bytes([rng.choice(b'0123456789-eE.,:[]{}"tfn\\ ')]) + raw[start + 1 :]
    return raw + rng.choice([b"\n", b" ", b"\0", raw, piece])


def test_two_thousand_damaged_texts_are_refused_or_say_the_same():
    print("seed", SEED)
    rng = random.Random(SEED)
    manifest = sample()
    raw = to_text(manifest).encode()
    refused = 0
    for _ in range(2000):
        text = damaged(raw, rng)
        if text == raw:
            continue
        refusal_of(text)
        refused += 1
    assert refused > 1950


def small_sample() -> Manifest:
    shared = [({"parameter": "float32"}, 2, 1, {"a": (3, 5), "c": (70,)}), ({"buffer": "int8"}, 1, 1, {"b": (6,)})]
    return laid_out(2, shared, facts={"x": [1.5, None, "s"]})


def test_two_thousand_damaged_texts_with_the_hash_made_right_are_refused_or_sound():
    print("seed", SEED)
    rng = random.Random(SEED)
    raw = json.dumps(body_of(small_sample())).encode()
    read = 0
    for _ in range(2000):
        text = restamped(damaged(raw, rng).decode("latin-1"))
        try:
            manifest = from_text(text)
        except CheckpointError:
            refusal_of(text)
            continue
        painted(manifest)
        assert from_text(to_text(manifest)) == manifest
        read += 1
    assert 50 < read < 500  # another digit of a SHA or a fact: nobody can tell; were it none, nothing was tried


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, name))


def at(value, path):
    for name in path:
        value = value[name]
    return value


STRANGE_NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 4096, 2**31, 2**63, 2**64, 10**400, 1.0, -0.5, 1e308])
STRANGE_TEXTS = st.sampled_from(
    ["", "a", "1", "float32", "bool", "parameter", "../../etc/passwd", "\n", "\ud800", "\0"]
)
STRANGE_JSON = st.sampled_from(["null", "true", "false", "[]", "{}", "[[]]", "[1]", "[-1]"]).map(json.loads)
STRANGE = STRANGE_NUMBERS | STRANGE_TEXTS | STRANGE_JSON


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_changed_values_with_the_hash_made_right_are_refused_or_sound(data):
    body = body_of(small_sample())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in places(body) if path]))
        holder, name = at(body, path[:-1]), path[-1]
        change = data.draw(st.sampled_from(["set", "move", "delete", "twice"]))
        if change == "set":
            holder[name] = data.draw(STRANGE)
        elif change == "move" and type(holder[name]) is int:
            holder[name] += data.draw(st.integers(-5, 5))
        elif change == "delete":
            del holder[name]
        elif isinstance(holder, list):
            holder.insert(name, copy.deepcopy(holder[name]))
        else:
            holder[f"{name}2"] = holder[name]
    text = restamped(body)
    try:
        manifest = from_text(text)
    except CheckpointError:
        refusal_of(text)
        return
    painted(manifest)
    assert json.dumps(body_of(manifest), sort_keys=True) == json.dumps(body, sort_keys=True)


# ---- lies, one at a time


def flat(body: dict) -> dict:
    return body["flats"][0]


def tensor(body: dict) -> dict:
    return flat(body)["tensors"][0]


LIES = {
    "a newer format": (lambda b: b.update(format=3), "format 3, this library reads format 2; load it with the version"),
    "a newer format with other keys": (lambda b: b.update(format=4, new=1), "format 4, this library reads format 2"),
    "an older format": (lambda b: b.update(format=1), "format 1, this library reads format 2"),
    "format zero": (lambda b: b.update(format=0), "the format is 0"),
    "format true": (lambda b: b.update(format=True), "the format is True"),
    "no format": (lambda b: b.pop("format"), "names no format"),
    "an unknown key": (lambda b: b.update(extra=1), r"the manifest lacks \[\] and has unknown \['extra'\]"),
    "a missing key": (lambda b: b.pop("facts"), r"the manifest lacks \['facts'\]"),
    "an unknown key of a tensor": (lambda b: tensor(b).update(path="x"), r"flat number 0: a tensor .* \['path'\]"),
    "an unknown key of a flat": (lambda b: flat(b).update(path="x"), r"flat number 0 .* unknown \['path'\]"),
    "an unknown key of a file": (lambda b: b["files"][1].update(name="/etc/passwd"), "rank-00001-of-.* unknown"),
    "a flat that is a list": (lambda b: b["flats"].append([]), r"flat number 3 is \[\]; expected an object"),
    "flats that are an object": (lambda b: b.update(flats={}), r"the list of flats is \{\}"),
    "files that are text": (lambda b: b.update(files="x"), "the list of files is 'x'"),
    "tensors that are null": (lambda b: flat(b).update(tensors=None), "flat number 0: the list of tensors is None"),
    "no sharers": (lambda b: flat(b).update(sharers=0), "flat number 0: the number of sharers is 0"),
    "more sharers than ranks": (lambda b: flat(b).update(sharers=3), "the number of sharers is 3; .* from 1 to 2"),
    "sharers that are true": (lambda b: flat(b).update(sharers=True), "the number of sharers is True"),
    "no copies": (lambda b: flat(b).update(copies=0), "flat number 0: the number of copies is 0"),
    "more copies than ranks": (lambda b: flat(b).update(copies=2), "the number of copies is 2; .* from 1 to 1"),
    "a negative step": (lambda b: b.update(step=-1), "the step is -1"),
    "a step of eleven digits": (lambda b: b.update(step=10**10), "the step is 10000000000"),
    "a step that is a float": (lambda b: b.update(step=20.0), r"the step is 20\.0"),
    "a world of three with two files": (lambda b: b.update(world=3), "2 files for a world of 3"),
    "a world of nobody": (lambda b: b.update(world=0, files=[], flats=[]), "the world is 0"),
    "a world of millions": (lambda b: b.update(world=10**6), "the world is 1000000"),
    "a file too many": (lambda b: b["files"].append(b["files"][0]), "3 files for a world of 2"),
    "finite one": (lambda b: b.update(finite=1), "`finite` is 1"),
    "facts that are a list": (lambda b: b.update(facts=[]), r"`facts` is \[\]"),
    "a fact deep down": (lambda b: b["facts"].update(x=nested(40)), "nested more than 32 deep"),
    "half a surrogate in a fact": (lambda b: b["facts"].update(x="\ud800"), "facts.'x' is .* expected text"),
    "half a surrogate in a name of a fact": (lambda b: b["facts"].update({"\udfff": 1}), "a name in facts"),
    "a nameless tensor": (lambda b: tensor(b).update(name=""), "a tensor's name has 0 characters"),
    "an endless name": (lambda b: tensor(b).update(name="x" * 5000), "a tensor's name has 5000 characters"),
    "a name that is a number": (lambda b: tensor(b).update(name=7), "a tensor's name is 7"),
    "a name that is a list": (lambda b: tensor(b).update(name=[]), r"a tensor's name is \[\]"),
    "half a surrogate in a name": (lambda b: tensor(b).update(name="\ud800"), "a tensor's name is"),
    "a kind that is a path": (lambda b: flat(b).update(kinds={"../x": "int8"}), r"flat number 0: a kind is '\.\./x'"),
    "kinds that are a list": (lambda b: flat(b).update(kinds=["parameter"]), "flat number 0: its kinds are"),
    "a kind with a line end": (lambda b: flat(b).update(kinds={"parameter\n": "int8"}), "a kind is"),
    "the same tensor twice": (lambda b: flat(b)["tensors"].append(tensor(b)), "tensor 'wte.weight' is listed twice"),
    "the same tensor in two flats": (
        lambda b: b["flats"].append(flat(b)),
        r"tensor 'wte.weight' \(.*\) is listed twice",
    ),
    "an unknown dtype": (lambda b: flat(b)["kinds"].update(parameter="object"), "the dtype of parameter is 'object'"),
    "a dtype that is a list": (lambda b: flat(b)["kinds"].update(parameter=[]), r"the dtype of parameter is \[\]"),
    "a negative axis": (lambda b: tensor(b).update(shape=[-7, -5]), "tensor 'wte.weight': an axis is -7"),
    "an axis that is true": (lambda b: tensor(b).update(shape=[35, True]), "an axis is True"),
    "an axis that is a float": (lambda b: tensor(b).update(shape=[35.0]), r"an axis is 35\.0"),
    "an axis that overflows": (lambda b: tensor(b).update(shape=[2**64 + 35]), "an axis is"),
    "axes that overflow": (lambda b: tensor(b).update(shape=[2**32, 2**32, 35]), "its number of elements is"),
    "an axis of four thousand digits": (lambda b: tensor(b).update(shape=[10**4000]), "an axis is an integer of 13"),
    "ten thousand axes": (lambda b: tensor(b).update(shape=[2**62] * 10_000), "10000 axes; at most 64"),
    "sixty large axes": (
        lambda b: tensor(b).update(shape=[2**62] * 60),
        "its number of elements is an integer of 3721",
    ),
    "a shape that is a number": (lambda b: tensor(b).update(shape=35), "its shape is 35; expected an array"),
    "a size that is a float": (lambda b: b["files"][0].update(size=1.0), r"rank-00000-.*: its size is 1\.0"),
    "a size below the header's length": (lambda b: b["files"][0].update(size=7), "rank-00000-.*: its size is 7"),
    "a SHA that is short": (lambda b: b["files"][0].update(index_sha256="00"), "rank-00000-.*: the hash of its index"),
    "a SHA with a line end": (lambda b: b["files"][0].update(index_sha256=SHA[:-1] + "\n"), "the hash of its index"),
    "a SHA that is null": (
        lambda b: b["files"][0].update(index_sha256=None),
        "the hash of its index: None; expected 64",
    ),
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
    return Index(FileHash(size, b"\x07" * 32, bytes(4) + b"\xff" * 4), {"python": [3, [1], None]})


def test_an_index_comes_back_as_it_was_written():
    index = index_of(SPAN_BYTES + 1)
    assert index_from_text(index_to_text(index).encode(), SPAN_BYTES + 1) == index


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body.pop("crcs"), r"the index lacks \['crcs'\]"),
        (lambda body: body.update(path="/etc/passwd"), r"unknown \['path'\]"),
        (lambda body: body.update(crcs=body["crcs"][:-8]), "its CRCs: .* expected 16 hex digits"),
        (lambda body: body.update(crcs=body["crcs"][:-1] + "g"), "its CRCs"),
        (lambda body: body.update(crcs=body["crcs"].upper()), "its CRCs"),
        (lambda body: body.update(crcs=[0, 1]), "its CRCs"),
        (lambda body: body.update(digests=body["digests"] * 2), "its digests: .* expected 64 hex digits"),
        (lambda body: body.update(digests=None), "its digests: None"),
    ],
)
def test_an_index_that_does_not_fit_its_file_is_refused(change, says):
    body = json.loads(index_to_text(index_of(SPAN_BYTES + 1)))
    change(body)
    with pytest.raises(CheckpointError, match=says):
        index_from_text(json.dumps(body).encode(), SPAN_BYTES + 1)


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"a":NaN}', b'{"a":1,"a":1}'])
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
    """Rank 0 alone checks sizes before a save and publishes after it. Time all of that except opening files."""
    with torch.device("meta"):
        model = Model(width, depth)
    world = PaperWorld(ranks, local_size=8, device="cpu")
    optimizer = zero.adamw(lr=1e-4)
    plan = zero.Plan(model, optimizer=optimizer, stage=3, precision="bf16", world=world, room=NO_LIMIT)
    began_s = time.process_time()
    shared = flats(plan, {})
    manifest = Manifest(FORMAT, 10**9, ranks, shared, (UNWRITTEN,) * ranks, False, {})
    parts = [piece.part for piece in held(shared, 0)]
    before = to_text(manifest)
    size = len(header(parts)) + sum(part.nbytes for part in parts)
    text = to_text(manifest._replace(files=(File(size, SHA),) * ranks, finite=True))
    read = from_text(text)
    taken_s = time.process_time() - began_s
    print(f"{taken_s:.2f} s, {len(text)} bytes")
    assert taken_s < 2
    assert len(text) <= len(before) < 8e6
    assert sum(entry.numel for entry in read.entries) == 3 * sum(parameter.numel() for parameter in model.parameters())
    assert size * ranks > 12 * sum(parameter.numel() for parameter in model.parameters())
    assert index_cap_bytes(size) < 2e6


# ---- text that json would take


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_finite_number_is_refused(value):
    text = json.dumps(body_of(sample())).replace("65536.0", value)
    assert re.search("which is not JSON|a number that is too large", refusal_of(restamped(text)))


@pytest.mark.parametrize("key", ["step", "facts", "index_sha256", "sharers", "loss_scale"])
def test_a_key_said_twice_is_refused_though_both_say_the_same(key):
    text = json.dumps(body_of(sample()), separators=(",", ":"))
    at = text.index(f'"{key}":')
    said = text[at:].split(",", 1)[0].rstrip("}]") if key != "facts" else '"facts":{}'
    assert f"says {key!r} twice" in refusal_of(restamped(text[:at] + said + "," + text[at:]))


@pytest.mark.parametrize("bracket", ["[", '{"a":', '[{"a":['])
@pytest.mark.parametrize("depth", [33, 900, 1_000, 100_000, 3_000_000])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_deep_nesting_is_refused(bracket, depth, closed):
    shut = "".join({"[": "]", "{": "}"}.get(letter, "") for letter in reversed(bracket))
    value = bracket * depth + "0" + shut * depth * closed
    text = json.dumps(body_of(sample())).replace("65536.0", value)
    refusal_of(restamped(text))
    refusal_of(restamped(text.replace('"step": 20', f'"step": {value}')))


def test_a_million_keys_are_read_in_time():
    keys = ",".join(f'"{number}":0' for number in range(1_000_000))
    text = json.dumps(body_of(sample())).replace("65536.0", "{" + keys + ',"999999":1}')
    assert "says '999999' twice" in refusal_of(restamped(text))


@pytest.mark.parametrize("value", ["1" * 5000, "-" + "1" * 5000])
def test_a_number_of_five_thousand_digits_is_refused(value):
    assert "not JSON" in refusal_of(restamped(json.dumps(body_of(sample())).replace("65536.0", value)))


def test_text_outside_ascii_is_refused_though_json_takes_it():
    text = restamped(json.dumps(body_of(sample())).replace("mask", "mäsk"))
    for raw in (text, text.encode(), text.encode("utf-16"), b"\xef\xbb\xbf" + to_text(sample()).encode()):
        assert "not ASCII" in refusal_of(raw)


def test_an_older_hash_is_not_enough():
    """The last line of another manifest."""
    first, second = to_text(sample()), to_text(small_sample())
    assert "does not match" in refusal_of("\n".join([first.splitlines()[0], second.splitlines()[1], ""]))


# ---- size


def test_what_would_not_be_read_is_not_written():
    with pytest.raises(CheckpointError, match="format 3, this library reads format 2"):
        to_text(sample()._replace(format=3))
    with pytest.raises(CheckpointError, match="1 files for a world of 2"):
        to_text(sample()._replace(files=sample().files[:1]))


def test_a_text_beyond_the_cap_is_refused_before_it_is_read():
    assert f"more than {CAP_BYTES} bytes" in refusal_of(b"[" * (CAP_BYTES + 1))


def test_a_text_at_the_cap_is_read_and_no_longer_one_is_written():
    room = CAP_BYTES - len(to_text(laid_out(1, [], facts={"x": ""})))
    text = to_text(laid_out(1, [], facts={"x": "y" * room}))
    assert len(text) == CAP_BYTES
    assert len(from_text(text).facts["x"]) == room
    with pytest.raises(CheckpointError, match=f"would have {CAP_BYTES + 1} bytes"):
        to_text(laid_out(1, [], facts={"x": "y" * (room + 1)}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "facts.'x' is nan"),
        (float("inf"), "facts.'x' is inf"),
        ((1, 2), "facts.'x' is a tuple"),
        (b"raw", "facts.'x' is a bytes"),
        ({1: 2}, "a name in facts.'x' is 1"),
        (2**5000, "facts.'x' is an integer of 5001 bits"),
        (nested(33), "facts.'x' is nested more than 32 deep"),
        ({"y": {"z": [0.5, object()]}}, "facts.'x'.'y'.'z' is a object"),
    ],
    ids=lambda value: re.sub(" at 0x\\w+", "", str(value)),
)
def test_a_fact_that_would_not_come_back_is_not_written(value, says):
    with pytest.raises(CheckpointError, match="^" + says):
        to_text(laid_out(1, [], facts={"x": value}))


# ---- names


@given(st.integers(0, 9_999_999_999))
def test_the_name_of_a_step_says_the_step(step):
    assert step_of(step_name(step)) == step
    assert len(step_name(step)) == 15


@given(st.integers(0, 9_999_999_999), st.integers(0, 9_999_999_999))
def test_names_of_steps_sort_as_their_steps(first, second):
    assert (step_name(first) < step_name(second)) == (first < second)


@pytest.mark.parametrize(
    "name",
    [
        "step-9",
        "step-10",
        "step-00000000020",
        "step--000000020",
        "step-+00000020",
        "step-00000_0020",
        "step-٠٠٠٠٠٠٠٠٢٠",
        "step-",
        "",
        " step-0000000020",
        "step-0000000020 ",
        "step-0000000020\n",
        "step-0000000020\0",
        "STEP-0000000020",
        "step-0000000020/..",
        "../step-0000000020",
        ".tmp-0000000040-00",
    ],
)
def test_no_other_name_is_a_step(name):
    assert step_of(name) is None


@given(st.text(max_size=20))
def test_a_name_is_a_step_only_if_the_step_has_that_name(name):
    step = step_of(name)
    assert step is None or step_name(step) == name


def test_files_are_named_by_rank_and_world():
    assert file_name(1, 2) == "rank-00001-of-00002.safetensors"
    assert index_name(1, 2) == "rank-00001-of-00002.json"
    assert file_name(99_998, 99_999) == "rank-99998-of-99999.safetensors"


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (0, 100_000), (True, 2), (0.0, 2)])
def test_no_rank_outside_its_world_has_a_file(rank, world):
    with pytest.raises(CheckpointError, match="expected an integer from"):
        file_name(rank, world)


@pytest.mark.parametrize("step", [-1, 10**10, True, 2.0])
def test_no_other_number_is_a_step(step):
    with pytest.raises(CheckpointError, match="the step is"):
        step_name(step)
