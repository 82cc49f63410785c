"""The user's agent, as Leyden calls it.

Lives here: `LitAgent`, the decorators that make one of a function, and what an agent may return. It knows tasks, resources and
rollouts; it does not know who runs it. To pass agents something new by name, add a line to `inject.py`.
"""

from leyden.litagent.agent import LitAgent
from leyden.litagent.decorators import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from leyden.litagent.inject import check_resources

__all__ = ["FunctionalLitAgent", "LitAgent", "check_resources", "llm_rollout", "prompt_rollout", "rollout"]
