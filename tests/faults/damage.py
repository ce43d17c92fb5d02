"""Damages checkpoints in many ways and checks that none loads with wrong values.

There are two checkpoints of one model, steps 10 and 20, with files of the same sizes. A copy of step 20 is damaged.
Step 10 stays good, and is the source of valid files that belong to another checkpoint. A damaged checkpoint must be
refused with one line that names it, or load exactly as it was saved, if the damage does not matter:

    folder/kept/step-0000000010     as they were saved                 folder/root/step-0000000010      never touched
    folder/kept/step-0000000020                                        folder/root/step-0000000020      damaged

The hash of a manifest with false entries is corrected. One kind of damage is not tried: other values, two exchanged
tensors of one shape, or another loss scale, with file, header, manifest and all hashes changed to match. That is a
valid checkpoint, too, which no hash without a key can distinguish from one that was saved.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import combinations
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from zero.checkpoint import load, open_checkpoint, open_latest
from zero.checkpoint.files.publish import MANIFEST_NAME
from zero.checkpoint.format.manifest import step_name
from zero.checkpoint.format.texts import CAP_BYTES
from zero.distributed.world import World
from zero.engine.state import State
from zero.engine.whole.read import digest
from zero.errors import CheckpointError
from zero.testing.thread_world import run_ranks

GOOD, DAMAGED = step_name(10), step_name(20)
BLOCK_BYTES = 512
TENSOR = "tensor"
"""The refusal must name a tensor, or the file that contains it."""

BATCH = 100
"""Cases that share a world, not more because its ranks do not collect garbage."""


class Victim(NamedTuple):
    """The checkpoint that is damaged."""

    folder: Path
    """The copy that is damaged."""
    good: Path
    """Another checkpoint, which is valid and not changed. Links to it are allowed."""
    random: Random

    def rank_file(self) -> Path:
        return self.random.choice(sorted(self.folder.glob("rank-*.safetensors")))

    def index(self) -> Path:
        return self.random.choice(sorted(self.folder.glob("rank-*.json")))

    def manifest(self) -> Path:
        return self.folder / MANIFEST_NAME

    def any_file(self) -> Path:
        return self.random.choice(sorted(self.folder.iterdir()))


class Verdict(NamedTuple):
    """The outcome of loading one damaged checkpoint.

    Attributes:
        outcome: "refused", "harmless" (loaded with the saved bits), "silent" (loaded with other bits), or "wrong"
            (anything else).
        line: the message.
    """

    seed: int
    kind: str
    outcome: str
    line: str


Damage = Callable[[Victim], str | None]
"""Damages a checkpoint. Returns what the refusal must name besides the folder, or None if that is not certain."""


# -- bytes -------------------------------------------------------------------------------------------------------------


def _flips(path_of: Callable[[Victim], Path], most_bits: int = 1, stop: int | None = None) -> Damage:
    """Invert 1 to `most_bits` bits, of the first `stop` bytes."""

    def damage(victim: Victim) -> str:
        path = path_of(victim)
        octets = bytearray(path.read_bytes())
        for bit in victim.random.sample(range(8 * len(octets[:stop])), victim.random.randint(1, most_bits)):
            octets[bit // 8] ^= 1 << bit % 8
        path.write_bytes(octets)
        return path.name

    return damage


def _resizes(path_of: Callable[[Victim], Path], size_of: Callable[[int, Random], int]) -> Damage:
    """Truncate or extend a file; an extended one is sparse."""

    def damage(victim: Victim) -> str:
        path = path_of(victim)
        os.truncate(path, size_of(path.stat().st_size, victim.random))
        return path.name

    return damage


def _shorter(size: int, random: Random) -> int:
    return random.choice([random.randrange(size), size - 1, random.randrange(0, size, BLOCK_BYTES)])


def _far_longer(size: int, random: Random) -> int:
    """Return sizes that must not be read."""
    return random.choice([CAP_BYTES + 1, 2**40])


def _grown(victim: Victim) -> str:
    path = victim.any_file()
    more = victim.random.choice([b"\0", b" ", b"\n", victim.random.randbytes(BLOCK_BYTES)])
    path.write_bytes(path.read_bytes() + more)
    return path.name


def _zeroed(victim: Victim) -> str:
    path = victim.any_file()
    with path.open("r+b") as file:
        file.seek(_block(path, victim.random))
        file.write(bytes(min(BLOCK_BYTES, path.stat().st_size - file.tell())))
    return path.name


def _exchanged_blocks(victim: Victim) -> str | None:
    first, second = victim.rank_file(), victim.rank_file()
    places = _block(first, victim.random), _block(second, victim.random)
    with first.open("r+b") as first_stream, second.open("r+b") as other:
        blocks = []
        for file, place in zip((first_stream, other), places, strict=True):
            file.seek(place)
            blocks.append(file.read(BLOCK_BYTES))
        for file, place, block in zip((first_stream, other), places, reversed(blocks), strict=True):
            file.seek(place)
            file.write(block)
    return first.name if first == second else None


def _stale_block(victim: Victim) -> str:
    """A lost write: the block has the content of another step."""
    path = victim.rank_file()
    place = _block(path, victim.random)
    old = (victim.good / path.name).read_bytes()[place : place + BLOCK_BYTES]
    with path.open("r+b") as file:
        file.seek(place)
        file.write(old)
    return path.name


def _torn(victim: Victim) -> str | None:
    """The beginning of one step's file and the end of another's."""
    path = victim.any_file()
    place = _block(path, victim.random)
    path.write_bytes(path.read_bytes()[:place] + (victim.good / path.name).read_bytes()[place:])
    return path.name if path.name != MANIFEST_NAME else None  # else only the step may be wrong


def _block(path: Path, random: Random) -> int:
    return random.randrange(0, path.stat().st_size, BLOCK_BYTES)


# -- files -------------------------------------------------------------------------------------------------------------


def _exchanged_ranks(victim: Victim) -> None:
    first, second = victim.random.sample(sorted(victim.folder.glob("rank-*.safetensors")), 2)
    first.rename(victim.folder / "aside")
    second.rename(first)
    (victim.folder / "aside").rename(second)


def _missing(victim: Victim) -> str:
    path = victim.any_file()
    path.unlink()
    return path.name


def _renamed(victim: Victim) -> str:
    path = victim.any_file()
    names = [
        path.name.upper(),
        path.name + ".bak",
        path.name.replace("0", "1", 1),
        "." + path.name,
        "rank-00009-of-00009.safetensors",
        "rank-1-of-2.safetensors",
    ]
    path.rename(path.with_name(victim.random.choice([name for name in names if name != path.name])))
    return path.name


def _extra(victim: Victim) -> str:
    names = ["rank-00009-of-00010.safetensors", "junk", ".hidden", "manifest.json~", "-rf", "a\nb", "\x1b[31mred", "é"]
    path = victim.folder / victim.random.choice([*names, "data.pkl", "x" * 255, "\udcff", " ", "..."])
    if victim.random.random() < 0.3:
        path.mkdir()
    else:
        shutil.copyfile(victim.rank_file(), path)
    return repr(path.name)


def _of_another_step(victim: Victim) -> str | None:
    path = victim.any_file()
    shutil.copyfile(victim.good / path.name, path)
    return path.name if path.name != MANIFEST_NAME else None


def _all_of_another_step(victim: Victim) -> None:
    for path in victim.folder.iterdir():
        shutil.copyfile(victim.good / path.name, path)


def _linked(victim: Victim) -> str:
    """A link instead of a file: to the file itself, to that of another step, to a device, to nothing, or to itself."""
    path = victim.any_file()
    kept = victim.folder.parent / "elsewhere"
    path.rename(kept)
    targets = [str(kept), str(victim.good / path.name), "/dev/zero", "/nowhere", path.name, ".."]
    path.symlink_to(victim.random.choice(targets))
    return path.name


def _special(victim: Victim) -> str:
    """A pipe or a folder instead of a file. Opening it must not block."""
    path = victim.any_file()
    path.unlink()
    victim.random.choice([os.mkfifo, Path.mkdir])(path)
    return path.name


def _folder_replaced(victim: Victim) -> None:
    """The folder itself is a link, a file, a pipe, empty, or missing."""
    kept = victim.folder.parent / "elsewhere"
    victim.folder.rename(kept)
    kind = victim.random.choice(["link", "link to another", "circle", "file", "pipe", "empty", "gone"])
    if kind.startswith(("link", "circle")):
        target = {"link": kept, "link to another": victim.good}.get(kind, victim.folder)
        victim.folder.symlink_to(target, target_is_directory=True)
    elif kind == "file":
        victim.folder.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(victim.folder)
    elif kind == "empty":
        victim.folder.mkdir()


def _harmless(victim: Victim) -> None:
    """Change times, rights, names or copies of a file, the order of the manifest, or the files beside."""
    path, elsewhere = victim.any_file(), victim.folder.parent / "elsewhere"

    def copy() -> None:
        shutil.copy(path, elsewhere)
        os.replace(elsewhere, path)

    def reorder() -> None:
        body = _body(victim)
        _stamp(victim, dict(victim.random.sample(sorted(body.items()), len(body))))

    changes: list[Callable[[], object]] = [
        lambda: os.utime(path, (0, victim.random.randrange(2**31))),
        lambda: path.chmod(victim.random.choice([0o400, 0o644, 0o777])),
        lambda: os.link(path, elsewhere),
        copy,
        reorder,
        lambda: _junk(victim),
    ]
    victim.random.choice(changes)()


def _junk(victim: Victim) -> None:
    root = victim.folder.parent
    (root / "step-30").mkdir()
    (root / "step-00000000099").mkdir()
    (root / "step-0000000030.tmp").mkdir()
    (root / "step-0000000031").write_bytes(b"")
    (root / "step-0000000032").symlink_to(victim.good, target_is_directory=True)
    (root / ".tmp-0000000040-0123456789abcdef").mkdir()
    shutil.copytree(victim.good, root / ".del-0000000050-0123456789abcdef")


# -- manifests that lie ------------------------------------------------------------------------------------------------


def _body(victim: Victim) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((victim.folder / MANIFEST_NAME).read_text())
    del body["sha256"]
    return body


def _stamp(victim: Victim, body: dict[str, Any]) -> None:
    """Write this manifest, with its hash made right."""
    write_manifest(victim.folder, json.dumps(body, separators=(",", ":"))[:-1] + ",\n")


def write_manifest(folder: Path, head: str) -> None:
    """A manifest of any text at all, which ends as its hash does."""
    text = f'{head}"sha256":"{sha256(head.encode("ascii")).hexdigest()}"}}\n'
    (folder / MANIFEST_NAME).write_bytes(text.encode("ascii"))


JUNK: tuple[Any, ...] = (None, -1, 0, 7, 2**63, 10**300, 0.5, True, "x", "", "../x", "a\nb", [], {}, [1], {"a": 1})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (object or list, key or index) of everything below a JSON value."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(below):
        yield value, key
        yield from places(inner)


def _spoil(body: dict[str, Any], random: Random) -> None:
    """Replace, rename, remove or double one thing."""
    holder, key = random.choice(list(places(body)))
    way = random.choice(["junk", "junk", "remove", "rename", "double"])
    if way == "remove":
        del holder[key]
    elif way == "rename" and isinstance(holder, dict):
        holder[key + "s"] = holder.pop(key)
    elif way == "double" and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = random.choice([junk for junk in JUNK if junk != holder[key]])


def _manifest_lie(victim: Victim) -> None:
    """A manifest with something else than what the save wrote, but for the facts: valid ones may be anything."""
    body = _body(victim)
    facts = body.pop("facts")
    _spoil(body, victim.random)
    _stamp(victim, body | {"facts": facts})


def _index_lie(victim: Victim) -> str:
    """An index that the manifest vouches for, with something else than what the save wrote."""
    path, random = victim.index(), victim.random
    body = json.loads(path.read_text())
    if random.random() < 0.5:
        generators = random.choice([body.pop("random"), "x", [], {"python": 1}])
        _spoil(body, random)
        text = json.dumps(body | {"random": generators})
    else:
        text = random.choice(["", "null", "[]", "[" * 3000, '{"crcs":' * 100_000, "\0", body["crcs"], "!!python/none"])
    path.write_text(text)
    manifest = _body(victim)
    rank = int(path.name.split("-")[1])
    manifest["files"][rank]["index_sha256"] = sha256(path.read_bytes()).hexdigest()
    _stamp(victim, manifest)
    return f"rank-{rank:05d}-of-"


def _exchanged_names(victim: Victim) -> None:
    """Exchange the names of two tensors of one shape, only in the manifest: the header of the file shows it."""
    body = _body(victim)
    tensors = [tensor for flat in body["flats"] for tensor in flat["tensors"] if prod(tensor["shape"])]
    pairs = [pair for pair in combinations(tensors, 2) if pair[0]["shape"] == pair[1]["shape"]]
    first, second = victim.random.choice(pairs)
    first["name"], second["name"] = second["name"], first["name"]
    _stamp(victim, body)


def _other_shape(victim: Victim) -> str:
    body = _body(victim)
    tensors = [tensor for flat in body["flats"] for tensor in flat["tensors"]]
    tensor = victim.random.choice([tensor for tensor in tensors if tensor["shape"] != tensor["shape"][::-1]])
    shape = tensor["shape"]
    tensor["shape"] = victim.random.choice([shape[::-1], [*shape, 1], [1, *shape], [*shape, 0], [2**40, 2**40]])
    _stamp(victim, body)
    return TENSOR


KINDS: dict[str, Damage] = {
    "one bit": _flips(Victim.rank_file),
    "one bit of a header": _flips(Victim.rank_file, stop=4096),
    "many bits": _flips(Victim.rank_file, most_bits=200),
    "one bit of the manifest": _flips(Victim.manifest),
    "one bit of an index": _flips(Victim.index),
    "cut short": _resizes(Victim.rank_file, _shorter),
    "manifest cut short": _resizes(Victim.manifest, _shorter),
    "emptied": _resizes(Victim.any_file, lambda size, random: 0),
    "grown": _grown,
    "grown to a terabyte": _resizes(Victim.any_file, _far_longer),
    "512 zeros": _zeroed,
    "exchanged blocks": _exchanged_blocks,
    "block of another step": _stale_block,
    "torn between steps": _torn,
    "exchanged rank files": _exchanged_ranks,
    "missing file": _missing,
    "renamed file": _renamed,
    "extra file": _extra,
    "file of another step": _of_another_step,
    "all of another step": _all_of_another_step,
    "link for a file": _linked,
    "pipe, folder": _special,
    "folder replaced": _folder_replaced,
    "nothing that matters": _harmless,
    "lie: manifest": _manifest_lie,
    "lie: index": _index_lie,
    "lie: exchanged names": _exchanged_names,
    "lie: shape": _other_shape,
}


# -- the trial ---------------------------------------------------------------------------------------------------------

Start = Callable[[World], State]


class Case(NamedTuple):
    seed: int
    kind: str


def cases(count: int, seed: int) -> list[Case]:
    """`count` cases, of all kinds in turn. Case n has seed `seed` + n."""
    kinds = list(KINDS)
    return [Case(seed + number, kinds[number % len(kinds)]) for number in range(count)]


def fuzz(size: int, start: Start, folder: Path, wanted: Sequence[Case]) -> list[Verdict]:
    """A verdict on each case, by a world of `size` thread ranks.

    Args:
        start: makes a state; called on each rank, several times.
        folder: contains `kept`, as described at the top of this file.
    """
    verdicts: list[Verdict] = []
    while len(verdicts) < len(wanted):
        batch = wanted[len(verdicts) : len(verdicts) + BATCH]
        before = len(verdicts)
        try:
            run_ranks(size, _judge, start, folder, batch, verdicts, timeout_s=300.0)
        except Exception as error:  # damaged checkpoints may raise nothing but CheckpointError
            if len(verdicts) - before == len(batch):
                raise
            case = batch[len(verdicts) - before]
            verdicts.append(Verdict(*case, "wrong", f"{type(error).__name__}: {error}"))
    return verdicts


def _judge(world: World, start: Start, folder: Path, batch: Sequence[Case], verdicts: list[Verdict]) -> None:
    kept, root = folder / "kept", folder / "root"
    state = load(start(world), open_checkpoint(world, kept / DAMAGED))
    saved = digest(state)
    state = load(state, open_checkpoint(world, kept / GOOD))
    good = digest(state)
    assert saved != good, "the two checkpoints must differ"
    for case in batch:
        named = world.share(json.dumps(_damage_copy(folder, case)) if world.rank == 0 else "")
        state, outcome, line = _tried(world, state, root, (good, saved), json.loads(named))
        everyone = world.gather_texts(json.dumps([outcome, line]), "verdicts")
        if world.rank == 0:
            if len(set(everyone)) > 1:
                outcome, line = "wrong", f"the ranks differ: {everyone}"
            verdicts.append(Verdict(*case, outcome, line))


def _damage_copy(folder: Path, case: Case) -> str | None:
    """Damage a new copy of the checkpoint. Returns what the refusal must name."""
    kept, root = folder / "kept", folder / "root"
    if not (root / GOOD).exists():
        shutil.copytree(kept / GOOD, root / GOOD)
    for path in root.iterdir():
        if path.name == GOOD:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copytree(kept / DAMAGED, root / DAMAGED)
    return KINDS[case.kind](Victim(root / DAMAGED, root / GOOD, Random(case.seed)))


def _tried(
    world: World, state: State, root: Path, digests: tuple[str, str], named: str | None
) -> tuple[State, str, str]:
    """(the state, which has the values of the good checkpoint again; outcome; line)."""
    good, saved = digests
    outcome, line, opened = "refused", "", False
    try:
        checkpoint = open_checkpoint(world, root / DAMAGED)
        opened = True
        dict(checkpoint.facts)
        state = load(state, checkpoint)
        outcome = "harmless" if digest(state) == saved else "silent"
    except CheckpointError as error:
        line = str(error)
    complaint = _complaint(line, root, named) if outcome == "refused" else ""
    if outcome == "refused" and digest(state) != good:
        complaint = "refused, but the state was changed"
    newest, rejected = open_latest(world, root)
    if newest is None or newest.folder.name != (DAMAGED if opened else GOOD):
        complaint = f"the newest valid one is not {newest}"
    about = [reason for reason in rejected if str(root / DAMAGED) in reason]  # others are extra files
    if about != ([] if opened or not os.path.lexists(root / DAMAGED) else [line]):
        complaint = f"not rejected as it was refused: {rejected}, {line}"
    state = load(state, open_checkpoint(world, root / GOOD))
    if digest(state) != good:
        complaint = "the good checkpoint no longer loads with its values"
    return (state, "wrong", f"{complaint}: {line}") if complaint else (state, outcome, line)


def _complaint(line: str, root: Path, named: str | None) -> str:
    if len(line.splitlines()) != 1 or not line.isprintable():
        return f"not one line: {line!r}"
    if str(root / DAMAGED) not in line:
        return "the checkpoint is not named"
    if named == TENSOR:
        flats = json.loads((root / GOOD / MANIFEST_NAME).read_text())["flats"]
        names = {tensor["name"] for flat in flats for tensor in flat["tensors"]}
        if "tensor" not in line and "rank-" not in line and not any(name in line for name in names):
            return "neither tensor nor file is named"
    elif named is not None and named not in line:
        return f"{named} is not named"
    return ""
