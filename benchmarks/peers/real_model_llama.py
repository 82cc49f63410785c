"""llama.cpp's side of `benchmarks/real_model.py`: `real_model_llama.py WORK FILE.gguf`, in an environment with xllamacpp.

WORK is `decode:ROWS` or `shared`, as in `real_model_side.py`, on one thread that does not spin. The last line is the JSON object of that
script. The prompts' keys and values are computed first and stay in their slots where decoding is timed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import threading
import time

import xllamacpp

PROMPT, DECODED = 22, 17
GROUPS, GROUP_SIZE, COMMON, OWN, ANSWER = 4, 8, 50, 13, 6


def tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(n)]


def main() -> None:
    work, file = sys.argv[1:]
    kind, _, rows = work.partition(":")
    prompts = [tokens(seed, PROMPT) for seed in range(int(rows or 0))]
    if kind == "shared":
        prompts = [tokens(0, COMMON) + tokens(1 + group, OWN) for group in range(GROUPS) for _ in range(GROUP_SIZE)]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.cache_ram_mib = len(prompts), 128 * len(prompts), 0, 0
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads, threads.poll = 1, 0
    server = xllamacpp.Server(params)

    def generate(n_new: int) -> float:
        """Generate so many tokens for each prompt at once, from the whole distribution, and return the CPU seconds."""

        def one(slot: int) -> None:
            options = {"n_predict": n_new, "temperature": 1.0, "samplers": ["temperature"], "ignore_eos": True}
            answer = server.handle_completions({"prompt": prompts[slot], "id_slot": slot, "seed": slot, **options})
            answer = answer if isinstance(answer, dict) else json.loads(answer)
            assert answer["usage"]["completion_tokens"] == n_new, answer

        threads = [threading.Thread(target=one, args=(slot,)) for slot in range(len(prompts))]
        began = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.process_time() - began

    if kind == "shared":
        seconds, counted = generate(ANSWER), sum(map(len, prompts)) + ANSWER * len(prompts)
    else:
        generate(1)
        seconds, counted = generate(DECODED) - generate(1), (DECODED - 1) * len(prompts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"value": counted / seconds, "cpu_s": seconds, "peak_mib": peak}), flush=True)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
