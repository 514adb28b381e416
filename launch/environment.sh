# Sourced by the other scripts: a virtual environment with the project and one of its extras in it.
# Uses the active environment if there is one, else .venv at the root, which it makes. Usage: prepare [EXTRA]

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

prepare() {
    local extra="${1:-}"
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        if [ ! -x "$root/.venv/bin/python" ]; then
            echo "making $root/.venv"
            "${PYTHON:-python3}" -m venv "$root/.venv" || {
                echo "no virtual environment could be made: Python 3.11 or newer with its venv module is needed" >&2
                return 1
            }
        fi
        # shellcheck disable=SC1091
        . "$root/.venv/bin/activate"
    fi
    local wanted stamp
    wanted="$(cat "$root/setup.cfg" "$root/pyproject.toml" | sha256sum) $root $extra"
    stamp="$VIRTUAL_ENV/.pdjax-installed${extra:+-$extra}"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing the project and what it needs into $VIRTUAL_ENV"
        python -m pip install --disable-pip-version-check -q -e "$root${extra:+[$extra]}"
        echo "$wanted" > "$stamp"
    fi
}
