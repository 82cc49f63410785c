"""A candidate's prompts, and where they came from.

Pure values and functions: they know no store and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leyden.algorithm.prompts.texts import placeholders_of
from leyden.errors import ConfigError
from leyden.options import nearest
from leyden.types import NamedResources, PromptTemplate


@dataclass(frozen=True, slots=True)
class Branch:
    """The position of a candidate in the search: its round and its branch of the round, both
    counted from 0.
    """

    round: int
    branch: int

    def __str__(self) -> str:
        return f"{self.round}/{self.branch}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """All prompts of one candidate, and its origin."""

    prompts: Mapping[str, PromptTemplate]
    """Prompts by the name of their resource."""
    round: int = 0
    """The round in which it was written, from 1; 0: the prompts that the user gave."""
    branch: int = 0
    """The branch of the round that made the candidate."""
    parent: tuple[str, int] | None = None
    """The resources id and version that it was made from."""
    edited: str | None = None
    """The name of the prompt that differs from the parent's; several are joined by commas."""
    reason: str = ""
    """The critique that the edit follows; of several edits, one a line."""
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

        parent: the id and version of this candidate's resources.
        """
        prompt = self.prompts[name].model_copy(update={"template": text})
        round_, branch = (0, 0) if place is None else (place.round + 1, place.branch)
        return Candidate({**self.prompts, name: prompt}, round_, branch, parent, name, reason)

    def resources(self, others: NamedResources) -> NamedResources:
        """Return the resources with this candidate's prompts in them."""
        return {**others, **self.prompts}

    def as_json(self) -> dict[str, Any]:
        """Return the candidate for `from_json`."""
        return {
            "prompts": {name: prompt.model_dump(mode="json") for name, prompt in self.prompts.items()},
            **{name: getattr(self, name) for name in ("round", "branch", "parent", "edited", "reason")},
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Candidate:
        """Return the candidate whose `as_json` is `stored`."""
        read: dict[str, Any] = {**stored}
        read["prompts"] = {name: PromptTemplate.model_validate(prompt) for name, prompt in stored["prompts"].items()}
        read["parent"] = None if stored["parent"] is None else tuple(stored["parent"])
        return cls(**read)


def names_to_improve(resources: NamedResources, resource_name: str | None, *, algorithm: str) -> list[str]:
    """Return the names of the prompts to improve: the given one, or all.

    algorithm: the name of its class, for errors.
    Raise ConfigError if there is none, or if one cannot be formatted.
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
        placeholders_of(prompts[name])
    return names
