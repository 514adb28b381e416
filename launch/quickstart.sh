#!/usr/bin/env bash
# From a fresh clone to tokens: set up, fetch a small chat model, and answer a prompt with one prefill instance, one
# decode instance and a router on this machine. Usage: launch/quickstart.sh [PROMPT]
set -euo pipefail
. "$(dirname "$0")/environment.sh"
prepare
cd "$root"
python -m pdjax.launch fetch smollm2-135m-instruct
exec python -m pdjax.launch local --config configs/smollm2.gin --prompt "${1:-Why is the sky blue?}"
