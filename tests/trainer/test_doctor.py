"""Any machine can be put before the doctor: a folder in place of /, and answers in place of commands."""

import re
from pathlib import Path

import pytest

from zero.platform.run_files import mount_of
from zero.trainer.config import read
from zero.trainer.doctor import Diagnosis, Host, checks, disks, doctor_report, exit_code
from zero.trainer.doctor.software import pins, within

GiB = 2**30
CPUINFO = "model name\t: A processor\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
MOUNTS = "22 1 0:1 / / rw - ext4 /dev/sda rw\n30 22 0:2 / /mnt/far\\040away rw shared:1 - nfs4 server:/x rw\n"
H100 = "NVIDIA H100, 81559, 81000, 550.54, 9.0\n"


class Made(Host):
    """A machine as described: a healthy one with a processor, but for what is given."""

    def __init__(self, root: Path, **given) -> None:
        super().__init__(root)
        self._given = {"gpus": "", "torch_gpus": 0, "cores": 4, "versions": {}, **given}
        files = {"/proc/cpuinfo": CPUINFO, "/proc/self/mountinfo": MOUNTS}
        for path, text in (files | self._given.get("texts", {})).items():
            where = root / path.lstrip("/")
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)

    def memory(self):
        return self._given.get("memory", (16 * GiB, 8 * GiB))

    def space(self, folder):
        return self._given.get("space", (2**40, 2**39))

    def output(self, *command):
        return self._given["gpus"]

    def cores(self):
        return self._given["cores"]

    def version(self, package):
        return self._given["versions"].get(package, super().version(package))

    def torch_gpus(self):
        return self._given["torch_gpus"]


@pytest.fixture(autouse=True)
def _a_quick_disk_and_no_account(monkeypatch, tmp_path):
    monkeypatch.setattr(disks, "probe", lambda *args, **how: 2e9)
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def found_on(tmp_path, *, config=None, **given) -> dict[str, Diagnosis]:
    return {check.name: check for check in checks(read(config or {}), Made(tmp_path / "root", **given))}


def test_a_healthy_machine_is_well(tmp_path):
    diagnoses = list(checks(read({}), Made(tmp_path / "root")))
    assert {check.state for check in diagnoses} == {"ok"}, doctor_report(diagnoses)
    assert exit_code(diagnoses) == 0
    names = {"versions", "memory", "/dev/shm", "CPU", "GPUs"}
    names |= {"offload.path", "disk rate", "checkpoints", "W&B"}
    assert {check.name for check in diagnoses} == names
    assert [path.name for path in tmp_path.iterdir()] == ["root"], "something was left behind"


def test_this_machine_is_looked_at_to_the_end():
    diagnoses = list(checks(read({})))
    assert doctor_report(diagnoses).count("\n") >= len(diagnoses)
    assert exit_code(diagnoses) == (3 if "\nbad" in f"\n{doctor_report(diagnoses)}" else 0)


def test_a_report_is_aligned_and_has_the_advice_below():
    diagnoses = [
        Diagnosis("memory", "ok", "lots"),
        Diagnosis("W&B", "warn", "no key", "log in"),
        Diagnosis("GPUs", "bad", "none"),
    ]
    assert doctor_report(diagnoses) == (
        "ok    memory  lots\n"
        "warn  W&B     no key\n"
        "              -> log in\n"
        "bad   GPUs    none\n"
        "\n"
        "3 checks: 1 bad, 1 to look at"
    )
    assert exit_code(diagnoses) == 3
    assert exit_code(diagnoses[:2]) == 0


def test_every_check_that_is_not_well_says_what_to_do(tmp_path):
    worst = {
        "texts": {
            "/proc/cpuinfo": "",
            "/sys/fs/cgroup/cpu.max": "100000 100000",
        },
        "memory": (16 * GiB, 10**6),
        "space": (2**20, 2**20),
        "versions": {"torch": "1.0"},
    }
    config = {"precision": {"compute": "bf16"}, "tracker": {"name": "wandb", "mode": "online"}}
    diagnoses = found_on(tmp_path, config=config, **worst)
    wrong = {name: check for name, check in diagnoses.items() if check.state != "ok"}
    assert all(check.advice for check in wrong.values())
    assert not any(check.advice for check in diagnoses.values() if check.state == "ok")
    assert {name for name, check in wrong.items() if check.state == "bad"} == {"versions", "memory"}
    warned = {"/dev/shm", "CPU quota", "CPU and dtype", "disk rate", "checkpoints", "W&B"}
    assert set(wrong) - {"versions", "memory"} == warned
    assert wrong["CPU quota"].finding == "the container may use 1 of 4 cores"
    assert "torch 1.0 (>=2.11)" in wrong["versions"].finding


@pytest.mark.parametrize(
    ("group", "folder", "files"),
    [
        ("0::/a/b", "/sys/fs/cgroup/a", ("memory.max", "memory.current")),
        ("0::/a/b", "/sys/fs/cgroup/a", ("memory.high", "memory.current")),
        ("4:cpu,memory:/a", "/sys/fs/cgroup/memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_containers_limit_counts_wherever_it_is_set(tmp_path, group, folder, files):
    limit, used = (f"{folder}/{name}" for name in files)
    texts = {"/proc/self/cgroup": f"{group}\n", limit: "3221225472\n", used: "1073741824\n"}
    diagnosis = found_on(tmp_path, texts=texts)["memory"]
    assert diagnosis.finding == "16.0 GiB, 8.0 GiB free, container limit 3.0 GiB, 1.0 GiB of it in use"
    assert diagnosis.state == "warn"


def test_no_limit_is_not_shown(tmp_path):
    texts = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.current": "1\n",
    }
    assert "container" not in found_on(tmp_path, texts=texts)["memory"].finding


@pytest.mark.parametrize(
    ("given", "name", "state", "finding"),
    [
        ({"gpus": H100, "torch_gpus": 1}, "GPUs", "ok", "1 for torch: NVIDIA H100 79.6 GiB, driver 550.54"),
        ({"gpus": H100}, "GPUs", "bad", "1, and torch can use none"),
        ({"texts": {"/proc/driver/nvidia/version": "550"}}, "GPUs", "bad", "a driver, but no GPU answers"),
        ({"gpus": H100.replace("81000", "40000"), "torch_gpus": 1}, "GPU memory", "warn", "in use on GPU 0"),
        ({"gpus": H100.replace("9.0", "7.5"), "torch_gpus": 1}, "GPU and dtype", "warn", "bf16 is emulated"),
        ({"gpus": H100, "torch_gpus": 1}, "GPUs and ranks", "bad", "launch.ranks=2 of 1 GPUs"),
    ],
)
def test_gpus(tmp_path, given, name, state, finding):
    config = {"precision": {"compute": "bf16"}, "launch": {"ranks": 2}}
    diagnosis = found_on(tmp_path, config=config, **given)[name]
    assert (diagnosis.state, finding) == (state, diagnosis.finding[: len(finding)])


def test_a_mount_is_the_longest_that_holds_the_path():
    assert mount_of(MOUNTS, "/home/x") == "ext4"
    assert mount_of(MOUNTS, "/mnt/far away/runs") == "nfs4"
    assert mount_of(MOUNTS, "/mnt/far awayer") == "ext4"
    assert mount_of("", "/x") == "unknown"


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "tmpfs", "overlay"])
def test_a_file_system_that_is_not_a_local_disk_is_named(tmp_path, kind):
    texts = {"/proc/self/mountinfo": f"22 1 0:1 / / rw - {kind} x rw\n"}
    diagnoses = found_on(tmp_path, texts=texts)
    assert diagnoses["offload.path"].state == "warn"
    assert kind in diagnoses["offload.path"].finding
    assert diagnoses["checkpoints"].state == ("ok" if kind == "overlay" else "warn")


@pytest.mark.parametrize(
    ("path", "why"), [("nowhere", "does not exist"), ("file", "is not a folder"), ("/proc/self", "is not writable")]
)
def test_a_folder_that_cannot_be_used_is_bad_where_it_is_asked_for(tmp_path, path, why):
    (tmp_path / "file").touch()
    diagnoses = found_on(tmp_path, config={"offload": {"path": path}})
    assert diagnoses["offload.path"].state == "bad"
    assert diagnoses["offload.path"].finding == f"{tmp_path / path} {why}"
    assert "disk rate" not in diagnoses


@pytest.mark.parametrize(("optimizer", "state"), [("none", "warn"), ("nvme", "bad")])
def test_the_current_folder_must_do_only_if_something_goes_there(tmp_path, monkeypatch, optimizer, state):
    monkeypatch.chdir("/proc/self")
    diagnoses = found_on(tmp_path, config={"offload": {"optimizer": optimizer}})
    assert (diagnoses["offload.path"].state, diagnoses["checkpoints"].state) == (state, "bad")


@pytest.mark.parametrize(("speed", "state", "said"), [(0.1e9, "warn", "0.10 GB/s"), (3e9, "ok", "3.00 GB/s")])
def test_the_disks_rate_is_judged(tmp_path, monkeypatch, speed, state, said):
    monkeypatch.setattr(disks, "probe", lambda *args, **how: speed)
    diagnosis = found_on(tmp_path)["disk rate"]
    assert (diagnosis.state, said in diagnosis.finding) == (state, True)


@pytest.mark.parametrize(
    ("threads", "state", "advice"),
    [("auto", "warn", "set offload.threads=32"), (16, "warn", "set offload.threads=32"), (32, "ok", "")],
)
def test_threads_are_doubled_until_the_rate_of_each_disk_stops_growing(tmp_path, monkeypatch, threads, state, advice):
    rates, asked = {4: 2e9, 8: 3.9e9, 16: 6e9, 32: 6.5e9}, []
    monkeypatch.setattr(disks, "probe", lambda folder, *, threads: asked.append(threads) or rates[threads])
    config = {"offload": {"path": [str(tmp_path), "."], "threads": threads}}
    check = found_on(tmp_path, config=config)["disk rate"]
    assert (check.state, check.advice.partition(",")[0]) == (state, advice)
    assert "6.00 GB/s read beside 6.00 GB/s written, by 16 threads" in check.finding
    assert asked == [4, 8, 16, 32] * 2


@pytest.mark.parametrize(
    ("version", "pin", "fits"),
    [
        *[("2.11", ">=2.11,<2.14", True), ("2.13.1+cu126", ">=2.11,<2.14", True), ("2.14", ">=2.11,<2.14", False)],
        *[("2.9.1", ">=2.11", False), ("7", "", True), ("3.14.0rc1", ">=3.11,<3.14", False)],
        *[("2.11.0a0+git12", ">=2.11,<2.14", True), ("2.11.0.dev20260101", ">=2.11,<2.14", True)],
    ],
)
def test_a_version_inside_its_pin(version, pin, fits):
    assert within(version, pin) is fits


def test_pins_are_those_of_the_project():
    needed = pins()
    assert needed["python"] == ">=3.11"
    assert needed["torch"] == ">=2.11"
    assert {"hydra-core", "wandb", "pydantic", "psutil"} <= set(needed)
    assert "deepspeed" not in needed
    assert all(re.fullmatch(r"([<>=!]+[\d.]+,?)*", pin) for pin in needed.values())


def test_the_key_for_wandb_is_never_shown(tmp_path, monkeypatch):
    canary = "c0ffee" * 7
    monkeypatch.setenv("WANDB_API_KEY", canary)
    monkeypatch.setenv("WANDB_MODE", "offline")
    diagnoses = list(checks(read({"tracker": {"name": "wandb"}}), Made(tmp_path / "root")))
    assert diagnoses[-1] == Diagnosis("W&B", "ok", "a key is set, runs are offline")
    assert canary not in doctor_report(diagnoses)
