"""`PromptResult`: what a search for better prompts has found, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.algorithm.prompts.comparison import Comparison
from leyden.types import PromptTemplate
from leyden.utils.figures import figure


@dataclass(frozen=True, slots=True, repr=False)
class PromptResult:
    """The outcome of a run: `RunSummary.result`."""

    prompts: dict[str, PromptTemplate]
    """The best prompts, by the name of the resource."""
    resources_id: str
    """The resources that have them, labelled `prompts/RUN_ID/best`."""
    version: int
    reward: float | None
    """The mean over the validation tasks on which the best prompts were measured;
    None if they were not."""
    against_first: Comparison | None
    """The best prompts compared with the user's, on validation tasks; None if both are the same."""
    test_reward: float | None = None
    """The mean reward of the best prompts on the test set; None without a test set."""
    test: Comparison | None = None
    """The best prompts compared with the user's, on the test set."""
    expected_reward: float | None = None
    """The reward that is expected on new tasks. GEPA chooses by `reward`, so the best prompts were
    also lucky; this estimate from the rewards of all candidates has little of that luck. None from
    APO, which does not choose by `reward`, and from FewShot.
    """

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
