"""The user's agent: a function with a decorator, or a class.

Lives here: `LitAgent` (`base.py`), the decorators (`decorator.py`), what a function's parameters
are given (`inject.py`), what an agent may return (`result.py`), and which code it is
(`version.py`). It knows the current trace and the store's protocol, and no runner, algorithm or
gateway.
"""

from leyden.litagent.base import LitAgent, check_resources
from leyden.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from leyden.litagent.result import record_result, result_spans
from leyden.litagent.version import agent_version

__all__ = [
    "FunctionalLitAgent",
    "LitAgent",
    "agent_version",
    "check_resources",
    "llm_rollout",
    "prompt_rollout",
    "record_result",
    "result_spans",
    "rollout",
]
