"""The user's agent: a function with a decorator, or a class.

`lit_agent.py` has `LitAgent`, `decorator.py` the decorators. `inject.py` binds a function's parameters, `result.py`
records what an agent returns, `version.py` identifies an agent's code, and `emitter/` has what an agent's code calls to
add to its record. The package knows the current trace and the store's protocol, and no runner, algorithm or gateway.
"""

from leyden.agent.decorator import FunctionalLitAgent as FunctionalLitAgent
from leyden.agent.decorator import llm_rollout as llm_rollout
from leyden.agent.decorator import prompt_rollout as prompt_rollout
from leyden.agent.decorator import rollout as rollout
from leyden.agent.lit_agent import LitAgent as LitAgent
from leyden.agent.lit_agent import check_resources as check_resources
from leyden.agent.result import record_result as record_result
from leyden.agent.result import result_spans as result_spans
from leyden.agent.version import agent_version as agent_version
