"""vLLM as the sampler beside Leyden's learner.

- `process`: the server as a child process, or at a URL;
- `vllm_client`: the server's HTTP routes;
- `folder`: model folders in the form in which a server reloads them;
- `parity`: the probes that compare sampler and learner;
- `backend`: `VLLMBackend`, which composes these.

The package knows token ids, folders and weights; not rollouts, rewards or the store. Importing it loads neither torch
nor vLLM.
"""

from leyden.engine.vllm.backend import VLLMBackend
from leyden.engine.vllm.folder import untie_embeddings

__all__ = ["VLLMBackend", "untie_embeddings"]
