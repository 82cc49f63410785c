"""Conversations of every dialect through the gateway, to a server that cuts, delays and errs: no token is wrong."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.attack.conversing import hold_conversations
from tests.attack.harness import Attack, sizes

SHARE_OF_FAULTS = 0.3


@sizes(("n_conversations", "at_once"), faults=(160, 80), long=(10_000, 250))
def test_conversations_with_a_server_that_cuts_delays_and_errs(
    attack: Attack, n_conversations: int, at_once: int
) -> None:
    """Every second gateway has a server without a fault. The clients' own work takes most of the time."""
    n_processes = min(8, os.cpu_count() or 1)
    shares = [SHARE_OF_FAULTS * (number % 2) for number in range(n_conversations // at_once)]
    seeds = [attack.seed + number for number in range(len(shares))]
    with ProcessPoolExecutor(n_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for figures in pool.map(converse_in_this_process, [at_once] * len(shares), seeds, shares):
            attack.count(**figures)
    assert attack.figures["conversations"] == n_conversations
    for fault in ("429", "500", "503", "garbage"):  # less those whose agent had left
        unheard = attack.figures[f"done_{fault}"] - attack.figures[f"recorded_{fault}"]
        assert 0 <= unheard <= attack.figures["given_up"]


def converse_in_this_process(n: int, seed: int, share: float) -> Counter[str]:
    return asyncio.run(hold_conversations(n, seed, share))
