"""The support tickets of `tests.algorithm.apo.rules`, with a model that answers GEPA's requests.

Run as a program, `python evolving.py RUN_DIR PORT BUDGET [resume]`, it optimises the prompt of its agent, to be killed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.testing import Reply
from tests.algorithm.apo import rules
from tests.algorithm.killing import SECONDS

_COMPLAINT = re.compile(r"I do not know about (\w+)")
_PROMPT = re.compile(r"```\n(.*?)\n```", re.DOTALL)


def reply(body: dict[str, Any]) -> str | Reply:
    """Answer as the task model or as the reflection model, from the request alone."""
    text = str(body["messages"][0]["content"])
    if "new instruction" not in text:
        return rules.reply(body)
    complaint, [prompt, *_] = _COMPLAINT.search(text), _PROMPT.findall(text)
    rule = rules.RULES[complaint[1]] if complaint else "Be kind."
    return f"```\n{prompt}\n{rule}\n```"


OPTIONS: dict[str, Any] = {"max_steps": 12, "minibatch_size": 4, "seed": 3}


def main(directory: Path, port: int, rollouts: int, *, resume: bool) -> None:
    proxy = ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": f"http://127.0.0.1:{port}/v1"}])
    trainer = ly.Trainer(
        algorithm=ly.GEPA(**OPTIONS, budget=ly.Budget(rollouts=rollouts, seconds=SECONDS)),
        llm_proxy=proxy,
        initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
        run_dir=directory,
        concurrency=8,
    )
    result = trainer.fit(rules.support, rules.TRAIN, rules.VAL, resume=resume).result
    print(result.prompts["prompt"].model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), resume="resume" in sys.argv[4:])
