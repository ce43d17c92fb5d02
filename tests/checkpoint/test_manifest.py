"""A manifest comes back as it was written; a text that was changed is refused, however well its hash was forged.

`restamped` recomputes the hash, as somebody would who means harm: what stands against that is `check`, which is held
here against a painter that knows nothing but bytes and elements (`painted`).
"""

import copy
import json
import random
import re
from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from zero.checkpoint.hashes import SPAN_BYTES, FileHash
from zero.checkpoint.manifest import (
    CAP_BYTES,
    ITEM_BYTES,
    Entry,
    Manifest,
    Piece,
    file_name,
    from_text,
    step_name,
    step_of,
    to_text,
)
from zero.errors import CheckpointError

SHA = "0123456789abcdef" * 4
HEADER_BYTES = 4096

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def laid_out(world: int, tensors: list[tuple[str, str, str, tuple[int, ...], list[int]]], **rest) -> Manifest:
    """A sound manifest: (name, kind, dtype, shape, cuts); pieces go to the ranks in turn, each file filled in order."""
    ends = [HEADER_BYTES] * world
    entries = []
    for name, kind, dtype, shape, cuts in tensors:
        numel = Entry(name, kind, dtype, shape, ()).numel
        edges = sorted({0, numel, *(cut % numel for cut in cuts)}) if numel else []
        pieces = []
        for number, (start, stop) in enumerate(pairwise(edges)):
            rank = (number + len(entries)) % world
            pieces.append(Piece(rank, start, stop, ends[rank]))
            ends[rank] += (stop - start) * ITEM_BYTES[dtype]
        entries.append(Entry(name, kind, dtype, shape, tuple(pieces)))
    crcs = [tuple(range(rank, rank + -(-end // SPAN_BYTES))) for rank, end in enumerate(ends)]
    files = tuple(FileHash(end, SHA, crc) for end, crc in zip(ends, crcs, strict=True))
    rest |= {"world": world, "entries": tuple(entries), "files": files}
    return Manifest(**{"format": 1, "step": 20, "finite": True, "facts": {}} | rest)


@st.composite
def manifests(draw) -> Manifest:
    names = draw(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=4))
    tensors = [
        (name, kind, draw(st.sampled_from(sorted(ITEM_BYTES))), tuple(shape), draw(st.lists(st.integers(0, 99))))
        for name in names
        for kind in draw(st.lists(st.sampled_from(["parameter", "exp_avg", "frozen", "buffer"]), unique=True))
        for shape in [draw(st.lists(st.integers(0, 5), max_size=3))]
    ]
    return laid_out(
        draw(st.integers(1, 4)),
        tensors,
        step=draw(st.integers(0, 9_999_999_999)),
        finite=draw(st.booleans()),
        facts=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )


def sample() -> Manifest:
    return laid_out(
        2,
        [
            ("wte.weight", "parameter", "float32", (7, 5), [9, 20, 30]),
            ("wte.weight", "exp_avg", "bfloat16", (7, 5), [9, 20]),
            ("ln.bias", "parameter", "float32", (), []),
            ("empty", "frozen", "float16", (0, 3), []),
            ("mask", "buffer", "bool", (2, 2), []),
            ("big", "buffer", "uint8", (2_500_000,), [1_300_000]),
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
    """Every element of every tensor once, every byte of every file once: by painting, without a sum."""
    files = [bytearray(file.size) for file in manifest.files]
    begin = [file.size for file in manifest.files]
    for entry in manifest.entries:
        item_bytes = getattr(torch, entry.dtype).itemsize
        elements = [element for piece in entry.pieces for element in range(piece.start, piece.stop)]
        assert elements == list(range(entry.numel))
        for piece in entry.pieces:
            begin[piece.rank] = min(begin[piece.rank], piece.offset)
            for byte in range(piece.offset, piece.offset + (piece.stop - piece.start) * item_bytes):
                files[piece.rank][byte] += 1  # beyond the end: IndexError
    for file, start in zip(files, begin, strict=True):
        assert start >= 8
        assert set(file[:start]) <= {0}
        assert set(file[start:]) <= {1}


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
def test_what_is_written_paints_every_byte_once(manifest):
    painted(manifest)


@settings(deadline=None)
@given(manifests())
def test_contents_are_the_pieces_of_each_file_in_the_order_of_their_bytes(manifest):
    contents = manifest.contents()
    assert len(contents) == manifest.world
    for rank, held in enumerate(contents):
        end = HEADER_BYTES
        for entry, piece in held:
            assert piece.rank == rank
            assert piece in entry.pieces
            assert piece.offset == end
            end += (piece.stop - piece.start) * entry.item_bytes
        assert end == manifest.files[rank].size


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
    tensors = [("a", "parameter", "float32", (3, 5), [4, 9]), ("b", "buffer", "int8", (6,), [2])]
    return laid_out(2, tensors, facts={"x": [1.5, None, "s"]})


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


def entry(body: dict) -> dict:
    return body["entries"][0]


def piece(body: dict) -> dict:
    return entry(body)["pieces"][1]


LIES = {
    "a newer format": (lambda b: b.update(format=3), "format 3, this library reads up to 1"),
    "a newer format with other keys": (lambda b: b.update(format=2, new=1), "format 2, this library reads up to 1"),
    "format zero": (lambda b: b.update(format=0), "the format is 0"),
    "format true": (lambda b: b.update(format=True), "the format is True"),
    "no format": (lambda b: b.pop("format"), "names no format"),
    "an unknown key": (lambda b: b.update(extra=1), r"the manifest lacks \[\] and has unknown \['extra'\]"),
    "a missing key": (lambda b: b.pop("facts"), r"the manifest lacks \['facts'\]"),
    "an unknown key of a tensor": (lambda b: entry(b).update(path="x"), r"tensor number 0 .* unknown \['path'\]"),
    "an unknown key of a piece": (lambda b: piece(b).update(path="x"), r"'wte.weight': a piece .* unknown \['path'\]"),
    "an unknown key of a file": (lambda b: b["files"][1].update(name="/etc/passwd"), "file number 1 .* unknown"),
    "a tensor that is a list": (lambda b: b["entries"].append([]), r"tensor number 6 is \[\]; expected an object"),
    "entries that are an object": (lambda b: b.update(entries={}), r"the list of tensors is \{\}"),
    "files that are text": (lambda b: b.update(files="x"), "the list of files is 'x'"),
    "pieces that are null": (lambda b: entry(b).update(pieces=None), "'wte.weight': the list of pieces is None"),
    "a negative step": (lambda b: b.update(step=-1), "the step is -1"),
    "a step of eleven digits": (lambda b: b.update(step=10**10), "the step is 10000000000"),
    "a step that is a float": (lambda b: b.update(step=20.0), r"the step is 20\.0"),
    "a world of three with two files": (lambda b: b.update(world=3), "2 files for a world of 3"),
    "a world of nobody": (lambda b: b.update(world=0, files=[], entries=[]), "the world is 0"),
    "a world of millions": (lambda b: b.update(world=10**6), "the world is 1000000"),
    "a file too many": (lambda b: b["files"].append(b["files"][0]), "3 files for a world of 2"),
    "finite one": (lambda b: b.update(finite=1), "`finite` is 1"),
    "facts that are a list": (lambda b: b.update(facts=[]), r"`facts` is \[\]"),
    "a fact deep down": (lambda b: b["facts"].update(x=nested(40)), "nested more than 32 deep"),
    "half a surrogate in a fact": (lambda b: b["facts"].update(x="\ud800"), "facts.'x' is .* expected text"),
    "half a surrogate in a name of a fact": (lambda b: b["facts"].update({"\udfff": 1}), "a name in facts"),
    "a nameless tensor": (lambda b: entry(b).update(name=""), "a tensor's name has 0 characters"),
    "an endless name": (lambda b: entry(b).update(name="x" * 5000), "a tensor's name has 5000 characters"),
    "a name that is a number": (lambda b: entry(b).update(name=7), "a tensor's name is 7"),
    "half a surrogate in a name": (lambda b: entry(b).update(name="\ud800"), "a tensor's name is"),
    "a kind that is a path": (lambda b: entry(b).update(kind="../x"), r"'wte.weight': its kind is '\.\./x'"),
    "a kind that is a list": (lambda b: entry(b).update(kind=["parameter"]), "its kind is"),
    "a kind with a line end": (lambda b: entry(b).update(kind="parameter\n"), "its kind is"),
    "the same tensor twice": (lambda b: entry(b).update(kind="exp_avg", name="wte.weight"), "is listed twice"),
    "an unknown dtype": (
        lambda b: entry(b).update(dtype="object"),
        r"'wte.weight' \(parameter\): its dtype is 'object'",
    ),
    "a dtype that is a list": (lambda b: entry(b).update(dtype=[]), "its dtype is"),
    "a dtype of another size": (
        lambda b: entry(b).update(dtype="float64"),
        r"'wte.weight' \(parameter\) begins at byte",
    ),
    "a negative axis": (lambda b: entry(b).update(shape=[-7, -5]), "an axis is -7"),
    "an axis that is true": (lambda b: entry(b).update(shape=[35, True]), "an axis is True"),
    "an axis that is a float": (lambda b: entry(b).update(shape=[35.0]), r"an axis is 35\.0"),
    "an axis that overflows to the right number": (lambda b: entry(b).update(shape=[2**64 + 35]), "an axis is"),
    "axes that overflow to the right number": (
        lambda b: entry(b).update(shape=[2**32, 2**32, 35]),
        f"cover 35 of {35 * 2**64} elements",
    ),
    "an axis of four thousand digits": (lambda b: entry(b).update(shape=[10**4000]), "an axis is an integer of 13"),
    "ten thousand axes": (lambda b: entry(b).update(shape=[2**62] * 10_000), "10000 axes; at most 64"),
    "another shape": (lambda b: entry(b).update(shape=[7, 6]), r"cover 35 of 42 elements of shape \(7, 6\)"),
    "a shape that is a number": (lambda b: entry(b).update(shape=35), "its shape is 35; expected an array"),
    "an empty tensor that has a piece": (
        lambda b: b["entries"][3].update(pieces=[{"rank": 0, "start": 0, "stop": 0, "offset": 4096}]),
        r"'empty' \(frozen\): a piece is \[0, 0\)",
    ),
    "a rank outside": (lambda b: piece(b).update(rank=2), "the rank of a piece is 2; expected an integer from 0 to 1"),
    "a negative rank": (lambda b: piece(b).update(rank=-1), "the rank of a piece is -1"),
    "a rank that is true": (lambda b: piece(b).update(rank=True), "the rank of a piece is True"),
    "a start that is false": (lambda b: entry(b)["pieces"][0].update(start=False), "the start of a piece is False"),
    "elements twice": (lambda b: piece(b).update(start=8), r"a piece is \[8, 20\); it must begin at 9"),
    "elements left out": (lambda b: piece(b).update(start=10), r"a piece is \[10, 20\); it must begin at 9"),
    "a piece backwards": (lambda b: piece(b).update(stop=3), r"a piece is \[9, 3\)"),
    "pieces out of order": (lambda b: entry(b)["pieces"].reverse(), "it must begin at 0"),
    "no pieces": (lambda b: entry(b).update(pieces=[]), "cover 0 of 35 elements"),
    "an offset in the length": (lambda b: piece(b).update(offset=7), "the offset of a piece is 7"),
    "an offset beyond the file": (
        lambda b: piece(b).update(offset=2**40),
        "rank-00001-of-00002.safetensors: bytes .* belong to no",
    ),
    "a gigantic offset": (lambda b: piece(b).update(offset=2**63), "the offset of a piece is"),
    "a file that is longer": (lambda b: grow(b, 0, 1), "ends at byte .* of a file of"),
    "a file that is shorter": (lambda b: grow(b, 1, -1), "rank-00001-of-00002.safetensors: .* ends at byte"),
    "a size that is a float": (lambda b: b["files"][0].update(size=1.0), r"rank-00000-.*: its size is 1\.0"),
    "a size below the header's length": (lambda b: b["files"][0].update(size=7, crcs="00000000"), "its size is 7"),
    "a size of exabytes": (lambda b: b["files"][0].update(size=2**62), "CRCs for 4611686018427387904 bytes; expected"),
    "a CRC too many": (lambda b: b["files"][1].update(crcs="0" * 80), "rank-00001-.*: 10 CRCs for"),
    "half a CRC": (lambda b: b["files"][1].update(crcs="0" * 12), "file number 1: its CRCs are"),
    "CRCs that are no hex": (lambda b: b["files"][1].update(crcs="0x00000g"), "file number 1: its CRCs are"),
    "CRCs in a list": (lambda b: b["files"][1].update(crcs=[0] * 8), "file number 1: its CRCs are"),
    "CRCs that are null": (lambda b: b["files"][1].update(crcs=None), "file number 1: its CRCs are None"),
    "CRCs with blanks": (lambda b: b["files"][1].update(crcs="00 00 00"), "file number 1: its CRCs are"),
    "CRCs in capitals": (lambda b: b["files"][1].update(crcs="0000000A"), "file number 1: its CRCs are"),
    "a SHA that is short": (lambda b: b["files"][0].update(sha256="00"), "rank-00000-of-00002.*: its SHA-256 is '00'"),
    "a SHA with a line end": (lambda b: b["files"][0].update(sha256=SHA + "\n"), "its SHA-256 is"),
    "a SHA that is null": (lambda b: b["files"][0].update(sha256=None), "its SHA-256 is None"),
}


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


def grow(body: dict, rank: int, more: int) -> None:
    body["files"][rank]["size"] += more


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name_though_the_hash_is_right(lie):
    change, says = LIES[lie]
    body = body_of(sample())
    change(body)
    line = refusal_of(restamped(body))
    assert re.search(says, line), line


def test_pieces_of_one_file_may_not_overlap():
    body = body_of(sample())
    body["entries"][2]["pieces"][0]["offset"] -= 4
    assert "inside tensor 'wte.weight' (exp_avg), which ends at" in refusal_of(restamped(body))


def test_a_file_may_have_no_hole():
    body = body_of(sample())
    for entry in body["entries"]:
        for piece in entry["pieces"]:
            piece["offset"] += 4 * (piece["rank"] == 0 and piece["offset"] > HEADER_BYTES)
    body["files"][0]["size"] += 4
    assert "before tensor 'wte.weight' (parameter), belong to no tensor" in refusal_of(restamped(body))


@pytest.mark.parametrize("entries", [[], ["a"]], ids=["without", "before"])
def test_a_header_is_not_longer_than_safetensors_reads(entries):
    tensors = [(name, "buffer", "int8", (1,), []) for name in entries]
    body = body_of(laid_out(1, tensors))
    size = body["files"][0]["size"] = 100_000_009 + len(entries)
    body["files"][0]["crcs"] = "00000000" * -(-size // SPAN_BYTES)
    for entry in body["entries"]:
        entry["pieces"][0]["offset"] = 100_000_009
    assert "a header of 100000009 bytes" in refusal_of(restamped(body))


# ---- text that json would take


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_finite_number_is_refused(value):
    text = json.dumps(body_of(sample())).replace("65536.0", value)
    assert re.search("which is not JSON|a number that is too large", refusal_of(restamped(text)))


@pytest.mark.parametrize("key", ["step", "facts", "sha256", "offset", "loss_scale"])
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
    with pytest.raises(CheckpointError, match="format 2, this library reads up to 1"):
        to_text(sample()._replace(format=2))
    with pytest.raises(CheckpointError, match="ends at byte"):
        to_text(sample()._replace(files=small_sample().files[:1] + sample().files[1:]))


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
    assert file_name(99_998, 99_999) == "rank-99998-of-99999.safetensors"


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (0, 100_000), (True, 2), (0.0, 2)])
def test_no_rank_outside_its_world_has_a_file(rank, world):
    with pytest.raises(CheckpointError, match="expected an integer from"):
        file_name(rank, world)


@pytest.mark.parametrize("step", [-1, 10**10, True, 2.0])
def test_no_other_number_is_a_step(step):
    with pytest.raises(CheckpointError, match="the step is"):
        step_name(step)
