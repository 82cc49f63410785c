"""`PromptResult`: the best prompts of a search, and how much better than the user's they are."""

from __future__ import annotations

from dataclasses import dataclass

from leyden._lib.formatting import figure
from leyden.algorithm.prompts.comparison import Comparison
from leyden.types import PromptTemplate


@dataclass(frozen=True, slots=True, repr=False)
class PromptResult:
    """The result of a run of a prompt optimiser, as `RunSummary.result` has it."""

    prompts: dict[str, PromptTemplate]
    """The best prompts, by the names of their resources."""
    resources_id: str
    """The id of the resources with the best prompts, which are labelled `prompts/RUN_ID/best`."""
    version: int
    """The version of these resources."""
    reward: float | None
    """The mean reward over the validation tasks on which the best prompts were measured; None if they were not
    measured."""
    against_first: Comparison | None
    """The best prompts compared with the user's, on validation tasks; None if both are the same."""
    test_reward: float | None = None
    """The mean reward of the best prompts on the test set; None without a test set."""
    test: Comparison | None = None
    """The best prompts compared with the user's, on the test set."""
    expected_reward: float | None = None
    """The reward to expect of the best prompts on new tasks, from GEPA and APO. The best prompts were also lucky in the
    rewards of `reward`, because these rewards helped to choose them; this estimate from the rewards of all candidates
    has little of that luck. None from FewShot."""

    def __repr__(self) -> str:
        parts = ["no reward" if self.reward is None else f"reward {figure(self.reward, 3)}"]
        if self.expected_reward is not None:
            parts[0] += f", {figure(self.expected_reward, 3)} expected on new tasks"
        parts.append(
            "the first prompts are the best" if self.against_first is None else f"better by {self.against_first}"
        )
        if self.test is not None and self.test_reward is not None:
            parts.append(f"test reward {figure(self.test_reward, 3)}, difference {self.test}")
        return "; ".join(parts)
