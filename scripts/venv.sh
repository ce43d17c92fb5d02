# Sourced by other scripts: changes to the repository and puts its .venv first in PATH (or the folder in ZERO_VENV).
#
#     extra=test    # or nothing
#     source "$(dirname "$0")/venv.sh"
#
# Makes it if it is missing, and installs again only when the dependencies in pyproject.toml have changed, or when another
# checkout has installed itself there.
# PYTHON chooses the interpreter; default: the first suitable one of python3, python3.14, ... python3.11.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

venv=${ZERO_VENV:-.venv}
fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ ! -x "$venv/bin/python" ]; then
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if fits "$candidate"; then
            "$candidate" -m venv "$venv" || exit 1
            break
        fi
    done
    if [ ! -x "$venv/bin/python" ]; then
        echo "no Python 3.11 or newer found. Set PYTHON=/path/to/python." >&2
        exit 1
    fi
fi

stamp=$("$venv/bin/python" - <<'PYTHON'
import hashlib, pathlib, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
wanted = [project["dependencies"], project["optional-dependencies"], str(pathlib.Path.cwd())]
print(hashlib.sha256(repr(wanted).encode()).hexdigest())
PYTHON
) || exit 1
stamp_file="$venv/installed" # whose packages are there, then a line for each extra of it
there=$(cat "$stamp_file" 2>/dev/null || true)
[ "${there%%$'\n'*}" = "$stamp" ] || there=
if [ -z "$there" ] || { [ -n "${extra:-}" ] && ! grep -qx "$extra" <<<"$there"; }; then
    echo "installing into $venv: torch has 0.2 GB for a CPU, 5 GB for a GPU" >&2
    "$venv/bin/python" scripts/install.py ".${extra:+[$extra]}" >&2 || exit 1
    printf '%s\n' "${there:-$stamp}" ${extra:+"$extra"} >"$stamp_file"
fi

PATH="$(cd "$venv" && pwd)/bin:$PATH"
unset extra venv
