"""The user's agent: a function with a decorator, or a class.

`base.py` has `LitAgent`, `decorator.py` the decorators. `inject.py` binds a function's parameters,
`result.py` records what an agent returns, and `version.py` identifies an agent's code. The package
knows the current trace and the store's protocol, and no runner, algorithm or gateway.
"""

from leyden.litagent.base import LitAgent as LitAgent
from leyden.litagent.base import check_resources as check_resources
from leyden.litagent.decorator import FunctionalLitAgent as FunctionalLitAgent
from leyden.litagent.decorator import llm_rollout as llm_rollout
from leyden.litagent.decorator import prompt_rollout as prompt_rollout
from leyden.litagent.decorator import rollout as rollout
from leyden.litagent.result import record_result as record_result
from leyden.litagent.result import result_spans as result_spans
from leyden.litagent.version import agent_version as agent_version
