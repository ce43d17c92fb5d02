"""Install this checkout with its extras into the environment of the running Python, for scripts/venv.sh.

    python scripts/install.py .[test]

uv installs in seconds where pip takes minutes; pip installs uv where it is missing. A machine without a GPU gets
torch's CPU build, 0.2 GB instead of 5: from PyTorch's index, or else from one of the user's indexes. uv reads none of
pip's settings, so this file passes on the settings that name indexes.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

OWN_CPU_BUILD = "torch==2.13.0+cpu"
"""A CPU build under the name that an index of the user's gives it; PyPI has none."""

OF_PIP = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
"""The variable with the same meaning for each setting of pip, and the separator of its values."""


def main(target: str) -> int:
    """Install `target` with the first command that succeeds; returns the exit code of the last."""
    settings = pip_settings(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout)
    environment = variables(settings, os.environ)
    is_free = find_spec("torch") is None and "UV_TORCH_BACKEND" not in os.environ  # an installed torch stays
    uv = None if "no-index" in settings else find_uv()  # uv has no variable for no-index
    *others, last = commands(target, uv, cpu=is_free and not has_gpu())
    for command in others:
        if subprocess.run(command, env=environment, capture_output=True).returncode == 0:
            return 0
    return subprocess.run(last).returncode


def find_uv() -> str | None:
    """Return the path of uv, which pip installs where it is missing; None if pip cannot."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if Path(uv).exists() or subprocess.run([*PIP, "install", "uv"], capture_output=True).returncode == 0:
        return uv
    return None


def commands(target: str, uv: str | None, *, cpu: bool) -> list[list[str]]:
    """Return the commands to try in turn; `cpu`: torch's CPU build is preferred."""
    with_pip = [*PIP, "install", "--quiet", "-e", target]
    if uv is None:
        return [with_pip]
    with_uv = [uv, "pip", "install", "--quiet", "--python", sys.executable, "-e", target]
    cpu_builds = [[*with_uv, "--torch-backend", "cpu"], [*with_uv, OWN_CPU_BUILD]]
    return [*(cpu_builds if cpu else []), with_uv, with_pip]


def has_gpu() -> bool:
    """Return whether this machine has the driver of a GPU."""
    drivers = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
    return any(driver.exists() for driver in drivers) or shutil.which("nvidia-smi") is not None


def pip_settings(listed: str) -> dict[str, str]:
    """Return the settings that `pip config list` has printed. Those of the environment replace those of files."""
    lines = [line.partition("=") for line in listed.splitlines()]
    rank = {"global": 0, "install": 1, ":env:": 2}
    settings = [(rank[section], key, ast.literal_eval(value)) for name, _, value in lines
             for section, _, key in [name.partition(".")] if section in rank]  # fmt: skip
    return {key: value for _, key, value in sorted(settings)}


def variables(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with pip's settings for uv, except where the user has set uv's own."""
    passed_on = {
        variable: separator.join(settings[key].split())
        for key, (variable, separator) in OF_PIP.items()
        if key in settings
    }
    # pip takes the newest version of all indexes; uv's default is the first index with the package
    merged = {"UV_INDEX_STRATEGY": "unsafe-best-match"} if "UV_INDEX" in passed_on else {}
    return {"UV_HTTP_RETRIES": "1", **merged, **passed_on, **environment}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
