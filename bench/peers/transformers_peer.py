"""transformers for bench/engine.py: transformers_peer.py HF_DIR DTYPE. A JSON request a line in, seconds out."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load, then answer until the input ends."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
    model.generation_config.eos_token_id = None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["new"],
                min_new_tokens=request["new"],
                do_sample=False,
                pad_token_id=0,
            )
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
