"""A world for continual learning: users want answers in one tone, and say so with a thumb and a correction.

Its parts are at the top of a module, because they go to other processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import leyden as ly
from leyden._lib import ids
from leyden.serving.continual import RecordedTasks
from leyden.store import LightningStore
from leyden.types import Feedback, LiveRollout, PromptTemplate

Version = tuple[str, int]


def prompt(tone: str) -> PromptTemplate:
    return PromptTemplate(template=f"{tone}: {{task}}")


def tone_of(template: PromptTemplate) -> str:
    return template.template.split(":")[0]


@ly.rollout
async def support(task: dict[str, Any], prompt_template: PromptTemplate) -> float:
    """The agent with its grader, which knows what the user of a recorded request wanted."""
    if tone_of(prompt_template) == "broken":
        raise ValueError("this prompt breaks the agent")
    return float(tone_of(prompt_template) == task["wants"])


@ly.algo
def most_wanted(*, train_dataset: RecordedTasks, initial_resources: Any) -> Any:
    """Take the tone that the latest users have wished for."""
    latest = train_dataset.records[:30]
    wishes = Counter(each.value for record in latest for each in record.feedback if each.kind == "correction")
    return {"prompt": prompt(wishes.most_common(1)[0][0])}


@ly.algo
def rude(*, train_dataset: RecordedTasks) -> Any:
    return {"prompt": prompt("rude")}


@ly.algo
def nothing(*, train_dataset: RecordedTasks) -> Any:
    return None


@ly.algo
def failing(*, train_dataset: RecordedTasks) -> Any:
    raise ValueError("no idea")


@ly.algo
def dying(*, train_dataset: RecordedTasks) -> Any:
    print("I was about to", flush=True)
    os.kill(os.getpid(), 9)


@ly.algo
def burning(*, train_dataset: RecordedTasks) -> Any:
    while True:
        pass


@ly.algo
def hoarding(*, train_dataset: RecordedTasks) -> Any:
    return [bytearray(2**28) for _ in range(64)]


@ly.algo
async def sleeping(*, train_dataset: RecordedTasks) -> Any:
    await asyncio.sleep(3600)


async def release_first(store: LightningStore, tone: str) -> Version:
    update = await store.update_resources("helpdesk", {"prompt": prompt(tone)})
    await store.set_label("production", update.resources_id, update.version)
    return update.resources_id, update.version


async def serve(
    store: LightningStore,
    requests: int,
    *,
    wants: str,
    likes: Callable[[str, str], bool] = lambda tone, wants: tone == wants,
    share: float = 0.5,
    seed: int = 0,
) -> None:
    """Serve users, who each give a thumb, and a correction to what they do not like."""
    numbers = random.Random(seed)
    labels = {each.label: (each.resources_id, each.version) for each in await store.get_labels()}
    tones = {
        label: tone_of((await store.get_resources_by_id(key[0], version=key[1])).resources["prompt"])  # pyright: ignore[reportArgumentType]
        for label, key in labels.items()
    }
    rollouts: list[LiveRollout] = []
    given: list[Feedback] = []
    for number in range(requests):
        canary = "canary" in labels and numbers.random() < share
        label = "canary" if canary else "production"
        rollout = LiveRollout(
            rollout_id=ids.rollout_id(),
            attempt_id=ids.attempt_id(),
            resources_id=labels[label][0],
            version=labels[label][1],
            arm="canary" if canary else "control",
            start_time=time.time(),
            input={"wants": wants, "number": number, "seed": seed},
            status="succeeded",
        )
        rollouts.append(rollout)
        liked = likes(tones[label], wants)
        thumb = "thumbs_up" if liked else "thumbs_down"
        given.append(Feedback(rollout_id=rollout.rollout_id, source="user", kind="label", value=thumb))
        if not liked:
            given.append(Feedback(rollout_id=rollout.rollout_id, source="user", kind="correction", value=wants))
    await store.record_live_rollouts(rollouts)
    await store.add_many_feedback(given)
