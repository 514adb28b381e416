#!/usr/bin/env bash
# Set up and pass the tests: lint, format, types, then pytest. Arguments go to pytest.
# The long soaks are left out; they are `launch/test.sh -m soak`.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
prepare test
cd "$root"
ruff check .
ruff format --check .
pyright
exec python -m pytest "$@"
