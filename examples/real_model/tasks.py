"""The tasks: requests that one of three tools answers. The held-out ones have other words and other cities.

A task is `{"request": ..., "tool": ..., "argument": ...}`. For tools of your own, change `TOOLS`, the requests, the
arguments, and `SHOTS` in agent.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

Task = dict[str, str]

TOOLS: Mapping[str, Callable[[str], str]] = {
    "weather": lambda city: f"It is sunny in {city}.",
    "time": lambda city: f"It is ten past nine in {city}.",
    "route": lambda city: f"Take the night train to {city}.",
}

TRAIN_REQUESTS = {
    "weather": [
        "Do I need an umbrella in {}?",
        "How warm is it in {} today?",
        "Will it snow in {} tomorrow?",
        "Is it raining in {}?",
    ],
    "time": [
        "How late is it in {}?",
        "Is it past noon in {}?",
        "Are people in {} still asleep?",
        "What does the clock say in {}?",
    ],
    "route": [
        "How do I get to {}?",
        "Which train goes to {}?",
        "What is the fastest way to {}?",
        "How many hours does it take to drive to {}?",
    ],
}
TRAIN_CITIES = ["Tokyo", "Rome", "Cairo", "Delhi", "Oslo", "Quito", "Berlin", "Vienna"]
TRAIN_ARGUMENTS = dict.fromkeys(TOOLS, TRAIN_CITIES)

HELD_OUT_REQUESTS = {
    "weather": [
        "Should I pack a raincoat for {}?",
        "Is there a storm over {}?",
        "What is the temperature in {}?",
        "Do they have fog in {} this morning?",
        "Can I have a picnic outdoors in {} on Sunday?",
        "How strong is the wind in {}?",
        "Are there clouds above {}?",
    ],
    "time": [
        "Has the day begun in {}?",
        "Is it already midnight in {}?",
        "Is it too early to call a friend in {}?",
        "Which hour is it in {} now?",
        "Are the shops in {} already closed for the night?",
        "Is it morning or evening in {}?",
    ],
    "route": [
        "Can you lead me to {}?",
        "Where do I change trains on the way to {}?",
        "How many kilometres are there from here to {}?",
        "Is there a direct flight to {}?",
        "I want to cycle to {}. Which roads are best?",
        "What does a bus ticket to {} cost?",
        "How can I travel to {} without a car?",
    ],
}
HELD_OUT_CITIES = [
    "Athens", "Dublin", "Boston", "Seoul", "Lisbon", "Warsaw", "Nairobi", "Chicago", "Munich", "Havana",
    "Sydney", "Toronto", "Prague", "Bangkok", "Geneva", "Kyoto", "Mumbai", "Denver", "Zurich", "Lagos",
]  # fmt: skip
HELD_OUT_ARGUMENTS = dict.fromkeys(TOOLS, HELD_OUT_CITIES)


def train_tasks() -> list[Task]:
    """Return the 48 tasks to train on: each request with four of the arguments."""
    return _tasks(TRAIN_REQUESTS, TRAIN_ARGUMENTS, n_arguments=4, seed=0)


def held_out_tasks() -> list[Task]:
    """Return 100 tasks that share no request and no argument with the others: each request with five arguments."""
    return _tasks(HELD_OUT_REQUESTS, HELD_OUT_ARGUMENTS, n_arguments=5, seed=1)


def _tasks(
    requests: Mapping[str, Sequence[str]], arguments: Mapping[str, Sequence[str]], *, n_arguments: int, seed: int
) -> list[Task]:
    """Fill each request with `n_arguments` of its tool's arguments, or with all if there are fewer."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    for tool in TOOLS:
        if not requests.get(tool) or not arguments.get(tool):
            raise ValueError(f"tasks.py: the tool {tool!r} needs requests and arguments, to train on and held out")
        for request in requests[tool]:
            if "{}" not in request:
                raise ValueError(f"tasks.py: the request {request!r} needs {{}} where the argument of {tool!r} stands")
            chosen = rng.sample(arguments[tool], min(n_arguments, len(arguments[tool])))
            tasks += [{"request": request.format(argument), "tool": tool, "argument": argument} for argument in chosen]
    if unknown := (requests.keys() | arguments.keys()) - TOOLS.keys():
        raise ValueError(f"tasks.py: {', '.join(sorted(unknown))} has requests or arguments, and is not in TOOLS")
    rng.shuffle(tasks)
    return tasks
