"""Things that stand in for the outside world in tests and examples, truthfully.

- `FakeUpstream`: a server of OpenAI's and Anthropic's APIs that knows the true tokens of every
  answer it gave, and can be told what to say (`Reply`, `Call`) and to misbehave. It reads and
  writes the formats by itself, apart from `leyden.dialects`, and knows nothing of Leyden's parts.
- `PromptSim`: a world for prompt optimisation whose best prompt is known, with a model that works
  and one that reflects.
- `LuckGame`: a game whose true advantages are known, for algorithms that credit single calls.
- `audit_store`: what is wrong with a store's records, for whoever writes a store or had an
  accident with one.

They are part of the package so that an agent's own tests can use them.
"""

from leyden.testing.audit import audit_store
from leyden.testing.luck import LuckGame
from leyden.testing.promptsim import PromptSim
from leyden.testing.requests import prompt_ids, request_prompt_ids
from leyden.testing.tokens import Call, decode, encode
from leyden.testing.upstream import FakeUpstream, Misbehaviour, Reply, ServedCall

__all__ = [
    "Call",
    "FakeUpstream",
    "LuckGame",
    "Misbehaviour",
    "PromptSim",
    "Reply",
    "ServedCall",
    "audit_store",
    "decode",
    "encode",
    "prompt_ids",
    "request_prompt_ids",
]
