# pyright: reportIncompatibleMethodOverride=false
"""Resources with Agent Lightning's methods."""

from __future__ import annotations

import importlib
from typing import Any

from leyden import types
from leyden.types import AttemptedRollout


class ProxyLLM(types.ProxyLLM):
    """A model behind the gateway, whose base URL carries an attempt's ids."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for an attempt; without ids, the gateway's own.

        Raise ValueError for one id alone.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        return super().get_base_url(rollout_id, attempt_id)

    def with_attempted_rollout(self, rollout: AttemptedRollout | str, attempt_id: str | None = None) -> types.LLM:
        """Return the plain LLM that one attempt should call."""
        if isinstance(rollout, AttemptedRollout):
            return super().with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
        return super().with_attempted_rollout(rollout, attempt_id or "")


class PromptTemplate(types.PromptTemplate):
    """A prompt with placeholders; `jinja` and `poml` templates are rendered by their own
    packages.
    """

    def format(self, **kwargs: Any) -> str:
        """Return the template with values in the place of its placeholders."""
        if self.engine == "jinja":
            jinja: Any = importlib.import_module("jinja2")
            return str(jinja.Template(self.template).render(**kwargs))
        if self.engine == "poml":
            poml: Any = importlib.import_module("poml")
            return str(poml.poml(self.template, context=kwargs, format="raw"))
        return self.template.format(**kwargs)
