"""`PromptWriter`: lets one model criticise what an agent did, and another one rewrite the prompt.

It knows requests, answers and candidates. It runs no agent and measures nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

from leyden._lib.options import check_several
from leyden.algorithm.apo.requests import CRITIQUE_FIELDS, EDIT_FIELDS, RequestTemplate, shipped_requests
from leyden.algorithm.evaluator import Score
from leyden.algorithm.prompts.candidate import Branch, Candidate
from leyden.algorithm.prompts.proposed_prompts import Request, proposed_prompt, without_reasoning
from leyden.algorithm.prompts.reflector import Reflector
from leyden.algorithm.prompts.texts import braced, placeholders_of, rollouts_as_text


class PromptWriter:
    """Writes new prompts in two calls: a model criticises a prompt's rollouts, and a model edits the prompt.

    Each call uses one of several requests. The seed, the new prompt's position in the search and its parent decide
    which, so that a resumed round asks the same.

    gradient_model, apply_edit_model: the models that criticise and rewrite; None: the only one.
    critique_files, edit_files: files with requests; None: Leyden's own.
    max_characters: the most characters of a prompt; a longer one is refused.
    """

    def __init__(
        self,
        *,
        gradient_model: str | None,
        apply_edit_model: str | None,
        critique_files: Sequence[str | Path] | None,
        edit_files: Sequence[str | Path] | None,
        max_characters: int,
        seed: int,
    ) -> None:
        self.gradient_model, self.apply_edit_model = gradient_model, apply_edit_model
        for name, files in {"gradient_prompt_files": critique_files, "apply_edit_prompt_files": edit_files}.items():
            check_several(name, files or ())
        critiques, edits = critique_files or shipped_requests("critique"), edit_files or shipped_requests("edit")
        self._critiques = [RequestTemplate(path, CRITIQUE_FIELDS) for path in critiques]
        self._edits = [RequestTemplate(path, EDIT_FIELDS) for path in edits]
        self._max_characters, self._seed = max_characters, seed

    async def criticise(
        self, reflector: Reflector, parent: Candidate, name: str, scores: Sequence[Score], place: Branch | None
    ) -> str | None:
        """Return a critique of one prompt of a candidate; None if the model wrote none.

        name: the name of the prompt.
        scores: rollouts with the candidate, which the model reads.
        place: the position of the new candidate; None: the answer is not kept for a resumed run.
        """
        question = self._chosen(self._critiques, parent, place).fill(
            prompt=parent.prompts[name].template, rollouts=rollouts_as_text(scores)
        )

        def check(answer: str) -> tuple[str | None, str]:
            text = without_reasoning(answer)
            return text or None, "its reasoning has no end" if text is None else "it is empty"

        return await reflector.ask(
            "critique", self.gradient_model, question, check, place=_record_key(place, "critique", parent)
        )

    async def rewrite(
        self,
        reflector: Reflector,
        parent: Candidate,
        name: str,
        critique: str,
        place: Branch | None,
        *,
        version: tuple[str, int],
        known: Collection[str],
    ) -> Candidate | None:
        """Return a candidate with a new text of one prompt; None if the model wrote none that can be used.

        place: the position of the new candidate; None: the answer is not kept for a resumed run.
        version: the id and version of the parent's resources.
        known: the keys of candidates that are refused, because they were tried before.
        """
        prompt, tried = parent.prompts[name], frozenset(known)
        chosen = self._chosen(self._edits, parent, place)
        question = chosen.fill(
            prompt=prompt.template,
            critique=critique,
            placeholders=braced(placeholders_of(prompt), prompt),
            max_characters=self._max_characters,
        )

        request = Request(chosen.text, question)

        def check(answer: str) -> tuple[Candidate | None, str]:
            text, problem = proposed_prompt(answer, prompt, request, max_characters=self._max_characters)
            if text is None:
                return None, problem
            child = parent.edit(name, text, place=place, parent=version, reason=critique)
            return (None, "this prompt was tried before") if child.key in tried else (child, "")

        return await reflector.ask(
            "edit", self.apply_edit_model, question, check, place=_record_key(place, "edit", parent)
        )

    def _chosen(self, requests: Sequence[RequestTemplate], parent: Candidate, place: Branch | None) -> RequestTemplate:
        return random.Random(f"{self._seed}/{place}/{parent.key}").choice(requests)


def _record_key(place: Branch | None, purpose: str, parent: Candidate) -> str:
    return "" if place is None else f"{place}/{purpose}/{parent.key}"
