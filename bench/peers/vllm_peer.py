"""vLLM as a peer of bench/engine.py: vllm_peer.py HF_DIR DTYPE. A JSON request a line in, seconds out."""

import json
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Load, then answer until the input ends."""
    llm = LLM(sys.argv[1], dtype=sys.argv[2], max_model_len=2048, max_num_seqs=32, enable_prefix_caching=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = SamplingParams(temperature=0.0, max_tokens=request["new"], ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
