"""`Candidate`: the prompts of one candidate of a search, and their origin. Functions choose the prompts to rewrite.

Values and pure functions, which know no store and no model.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden._lib.options import nearest
from leyden.algorithm.prompts.texts import placeholders_of
from leyden.errors import ConfigError
from leyden.types import NamedResources, PromptTemplate


@dataclass(frozen=True, slots=True)
class Branch:
    """The position of a candidate in the search: its round and its branch of the round, both counted from 0."""

    round: int
    branch: int

    def __str__(self) -> str:
        return f"{self.round}/{self.branch}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """All prompts of one candidate, and their origin."""

    prompts: Mapping[str, PromptTemplate]
    """The prompts, by the names of their resources."""
    round: int = 0
    """The round in which the candidate was written, from 1; 0 for the user's prompts."""
    branch: int = 0
    """The branch of the round that made the candidate."""
    parent: tuple[str, int] | None = None
    """The id and version of the resources from which the candidate was made."""
    edited: str | None = None
    """The name of the prompt that differs from the parent's; several names are joined by commas."""
    reason: str = ""
    """The critique that the edit follows; those of several edits are joined by line breaks."""
    key: str = field(init=False)
    """A digest of the prompts. Equal prompts have equal keys."""

    def __post_init__(self) -> None:
        texts = {name: [prompt.engine, prompt.template] for name, prompt in self.prompts.items()}
        digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
        object.__setattr__(self, "key", digest.hexdigest()[:16])

    def edit(
        self, name: str, text: str, *, place: Branch | None, parent: tuple[str, int] | None, reason: str
    ) -> Candidate:
        """Return a candidate with another text of one prompt.

        name, text: the name of the prompt, and its new text.
        place: the position of the new candidate in the search; None: none.
        parent: the id and version of this candidate's resources.
        reason: the critique that the edit follows.
        """
        prompt = self.prompts[name].model_copy(update={"template": text})
        round_, branch = (0, 0) if place is None else (place.round + 1, place.branch)
        return Candidate({**self.prompts, name: prompt}, round_, branch, parent, name, reason)

    def resources(self, others: NamedResources) -> NamedResources:
        return {**others, **self.prompts}

    def as_json(self) -> dict[str, Any]:
        """Return the candidate for `from_json`."""
        return {
            "prompts": {name: prompt.model_dump(mode="json") for name, prompt in self.prompts.items()},
            **{name: getattr(self, name) for name in ("round", "branch", "parent", "edited", "reason")},
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Candidate:
        """Return the candidate that `as_json` has described."""
        read: dict[str, Any] = {**stored}
        read["prompts"] = {name: PromptTemplate.model_validate(prompt) for name, prompt in stored["prompts"].items()}
        read["parent"] = None if stored["parent"] is None else tuple(stored["parent"])
        return cls(**read)


def names_to_improve(resources: NamedResources, resource_name: str | None, *, algorithm: str) -> list[str]:
    """Return the names of the prompts to improve: `resource_name`, or all prompts if it is None.

    algorithm: the name of the algorithm's class, for messages.
    Raise ConfigError if there is no such prompt, or if one cannot be formatted.
    """
    prompts = {name: prompt for name, prompt in resources.items() if isinstance(prompt, PromptTemplate)}
    if not prompts:
        raise ConfigError(
            f"{algorithm} improves prompt templates, and there is none among the initial resources; "
            "give Trainer(initial_resources={'prompt': PromptTemplate(template='...')})"
        )
    if resource_name is not None and resource_name not in prompts:
        raise ConfigError(f"resource_name is {resource_name!r}; {nearest(resource_name, prompts)}")
    names = list(prompts) if resource_name is None else [resource_name]
    for name in names:
        placeholders_of(prompts[name])  # raises ConfigError for a template that cannot be read
    return names


def name_to_improve(names: Sequence[str], edits: Mapping[str, tuple[int, int]], turn: int, seed: str) -> str:
    """Return the name of the prompt to rewrite: each in turn until all were rewritten once, then by how often that has
    helped.

    The choice is Thompson sampling: a rate of success is drawn for each prompt from its Beta distribution, and the
    highest one wins. So a prompt whose edits never help is chosen more and more seldom, but is not given up.

    edits: for each prompt, by its name: how often it was rewritten, and how often that raised the reward.
    turn: the number of the choice, from 0.
    seed: of the draw; equal arguments give equal names.
    """
    if any(name not in edits for name in names):
        return names[turn % len(names)]
    rng = random.Random(f"{seed}/component")
    rates = {name: rng.betavariate(1 + edits[name][1], 1 + edits[name][0] - edits[name][1]) for name in names}
    return max(names, key=lambda name: rates[name])
