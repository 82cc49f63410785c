"""vLLM as the sampler beside Leyden's learner.

Lives here: the server as a child process or at a URL (`process`), its HTTP routes (`client`), model
folders as a server reloads them (`folder`), the probes that compare sampler and learner (`parity`),
and the backend that composes them (`backend`). It knows token ids, folders and weights; not
rollouts, rewards or the store. Importing it loads neither torch nor vLLM.
"""

from leyden.engine.vllm.backend import VLLMBackend
from leyden.engine.vllm.folder import untie_embeddings

__all__ = ["VLLMBackend", "untie_embeddings"]
