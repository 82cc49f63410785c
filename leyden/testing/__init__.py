"""Things that stand in for the outside world in tests and examples, truthfully.

- `FakeUpstream`: a server of OpenAI's and Anthropic's APIs that knows the true tokens of
  every answer it gave. A test sets its answers (`Reply`, `ToolCall`) and its faults
  (`Misbehaviour`). It reads and writes the formats by itself, apart from `leyden.dialects`,
  and knows nothing of Leyden's parts.
- `PromptSim`: a world for prompt optimisation whose best prompt is known, with a model that works
  and one that reflects.
- `LuckGame`: a game whose true advantages are known, for algorithms that credit single calls.
- `audit_store`: lists inconsistent records of a store, after an accident or for a
  new kind of store.

They are part of the package so that an agent's own tests can use them.
"""

from leyden.testing.audit import audit_store as audit_store
from leyden.testing.luck import LuckGame as LuckGame
from leyden.testing.promptsim import PromptSim as PromptSim
from leyden.testing.requests import prompt_ids as prompt_ids
from leyden.testing.requests import request_prompt_ids as request_prompt_ids
from leyden.testing.tokens import ToolCall as ToolCall
from leyden.testing.tokens import decode as decode
from leyden.testing.tokens import encode as encode
from leyden.testing.upstream import FakeUpstream as FakeUpstream
from leyden.testing.upstream import Misbehaviour as Misbehaviour
from leyden.testing.upstream import Reply as Reply
from leyden.testing.upstream import ServedCall as ServedCall
