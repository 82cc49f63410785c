"""`PromptSim`: a simulated problem for prompt optimisers, whose best prompts are known.

A prompt is as good as the hidden rules that it states. A simulated model works on tickets with it
and shows symptoms of unmet rules. A second simulated model reads the symptoms and rewrites the
prompt. The expected score of any prompt is exact, and the optimum is found by enumeration.

`vocabulary` has the texts, `world` the rules and chances, `score` the truth, `task_model` and
`reflection_model` the two models, `families` the eight worlds, and `sim` the class that joins them.
"""

from benchmarks.promptsim.agents import one_prompt_agent, three_prompts_agent
from benchmarks.promptsim.families import FAMILIES, PromptSetting
from benchmarks.promptsim.reflection_model import Skill
from benchmarks.promptsim.score import Optimum
from benchmarks.promptsim.sim import PromptSim, SimulatedRollout
from benchmarks.promptsim.task_model import Behaviour
from benchmarks.promptsim.world import AnswerRule, Kind, RuleInteraction, World

__all__ = [
    "FAMILIES",
    "AnswerRule",
    "Behaviour",
    "Kind",
    "Optimum",
    "PromptSetting",
    "PromptSim",
    "RuleInteraction",
    "SimulatedRollout",
    "Skill",
    "World",
    "one_prompt_agent",
    "three_prompts_agent",
]
