"""vLLM's side of `benchmarks/engine.py`: `engine_vllm.py MODEL THREADS MOST`, in the environment `vllm`.

A process that stays, because vLLM takes a minute to start: its model is compiled, which is its default. It takes commands as
`benchmarks/sides.py` gives them, `{"do": "decode", "rows": 16}`, MOST rows at most, and answers with tokens a CPU second as `value`, with
`cpu_s`, and with vLLM's `version`. The prompts' keys and values are computed first and stay in the prefix cache, so that decoding alone is
timed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=sys.argv[2],
    OMP_WAIT_POLICY="passive",  # spinning is no work
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to stdout

from vllm import LLM, SamplingParams, __version__  # noqa: E402 (it reads the variables)

PROMPT, DECODED = 200, 33


def random_tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 32_000) for _ in range(n)]


def generate(engine: LLM, n_rows: int, n_tokens: int) -> float:
    """Generate so many tokens for each prompt, and return the CPU seconds."""
    prompts = [{"prompt_token_ids": random_tokens(seed, PROMPT)} for seed in range(n_rows)]
    options = SamplingParams(temperature=1.0, max_tokens=n_tokens, ignore_eos=True, detokenize=False)
    began = time.process_time()
    done = engine.generate(prompts, options, use_tqdm=False)
    seconds = time.process_time() - began
    assert all(len(each.outputs[0].token_ids) == n_tokens for each in done)
    return seconds


def main() -> None:
    engine = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=int(sys.argv[3]),
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    for line in sys.stdin:
        n_rows = json.loads(line)["rows"]
        generate(engine, n_rows, DECODED)  # warms up; the prompts' keys and values stay
        first = generate(engine, n_rows, 1)
        seconds = generate(engine, n_rows, DECODED) - first
        rate = n_rows * (DECODED - 1) / seconds
        print(json.dumps({"value": rate, "cpu_s": seconds, "version": __version__}), file=answers, flush=True)


if __name__ == "__main__":
    main()
