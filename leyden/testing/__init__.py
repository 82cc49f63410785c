"""Fakes for tests and examples that stand for model servers and tasks, and whose truth is known.

- `FakeUpstream`: a server of OpenAI's and Anthropic's APIs that knows the true tokens of
  every answer it gave. A test sets its answers (`Reply`, `ToolCall`) and its faults
  (`Misbehaviour`). It reads requests and writes answers without `leyden.dialects`, so that it can
  judge the dialects' translations. `python -m leyden.testing` starts one for other programs.
- `LuckGame`: a game whose true advantages are known, for algorithms that credit single calls.
- `audit_store`: lists inconsistent records of a store, after an accident or for a
  new kind of store.

They are part of the package so that the tests of your own agents can use them.
"""

from leyden.testing.audit import audit_store as audit_store
from leyden.testing.fake_tokens import ToolCall as ToolCall
from leyden.testing.fake_tokens import decode as decode
from leyden.testing.fake_tokens import encode as encode
from leyden.testing.luck import LuckGame as LuckGame
from leyden.testing.requests import prompt_ids as prompt_ids
from leyden.testing.requests import request_prompt_ids as request_prompt_ids
from leyden.testing.upstream import FakeUpstream as FakeUpstream
from leyden.testing.upstream import Misbehaviour as Misbehaviour
from leyden.testing.upstream import Reply as Reply
from leyden.testing.upstream import ServedCall as ServedCall
