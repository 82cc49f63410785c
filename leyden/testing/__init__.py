"""Things that stand in for the outside world in tests and examples, truthfully.

- `FakeUpstream`: an OpenAI-compatible server that knows the true tokens of every answer it gave, and can be told to
  misbehave.

They are part of the package so that an agent's own tests can use them. They know OpenAI's formats and nothing of
Leyden's parts.
"""

from leyden.testing.tokens import decode, encode, prompt_text
from leyden.testing.upstream import FakeUpstream, Misbehaviour, ServedCall

__all__ = ["FakeUpstream", "Misbehaviour", "ServedCall", "decode", "encode", "prompt_text"]
