"""A world with a known optimum: support tickets that need rules, and a model that adds one rule at a time.

Run as a program, `python rules.py RUN_DIR PORT BUDGET [resume]`, it optimises the prompt of its agent, to be killed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.testing import Reply
from tests.algorithm.killing import SECONDS

RULES = {
    "refund": "Refunds take five days.",
    "delivery": "Ask for the order number.",
    "password": "Never ask for a password.",
    "invoice": "Invoices are in the account.",
    "cancel": "Cancel within 14 days.",
}
"""What a ticket is about, and the rule that its answer needs."""
TOPICS = list(RULES)
TRAIN = [{"topic": topic, "number": number} for number in range(4) for topic in TOPICS]
VAL = [{"topic": topic, "number": number} for number in range(10, 13) for topic in TOPICS]
SEED = "Answer the ticket: {ticket}"
_COMPLAINT = re.compile(r"I do not know about (\w+)")
_PROMPT = re.compile(r"<prompt>\n(.*?)\n</prompt>", re.DOTALL)
_ADVICE = re.compile(r"RULE: (\w+)")


def reply(body: dict[str, Any]) -> str | Reply:
    """Answer as the task model, the gradient model or the edit model, each from the request alone."""
    text = str(body["messages"][0]["content"])
    if "<new_prompt>" in text:
        rule = _ADVICE.search(text)
        [prompt, *_] = _PROMPT.findall(text)
        return f"<new_prompt>{prompt}\n{RULES[rule[1]]}</new_prompt>" if rule else prompt
    if "<prompt>" in text:
        complaint = _COMPLAINT.search(text)
        return f"RULE: {complaint[1]}" if complaint else "nothing is wrong"
    topic = re.findall(r"ticket about (\w+)", text)[-1]
    return "Here is what to do." if RULES[topic] in text else f"I do not know about {topic}."


@ly.rollout
async def support(task: dict[str, Any], llm: ly.LLM, prompt_template: ly.PromptTemplate) -> float:
    prompt = prompt_template.format(ticket=f"ticket about {task['topic']}, number {task['number']}")
    answer = await llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": prompt}])
    return float("Here is" in (answer.choices[0].message.content or ""))


@ly.rollout
async def quick(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
    """Do as `support` does, without a model."""
    knows = RULES[task["topic"]] in prompt_template.format(ticket=task["number"])
    ly.emit_message("Here is what to do." if knows else f"I do not know about {task['topic']}.")
    return float(knows)


def optimum(prompt: ly.PromptTemplate) -> bool:
    return all(rule in prompt.template for rule in RULES.values())


OPTIONS: dict[str, Any] = {
    "gradient_batch_size": 4,
    "val_batch_size": 15,
    "beam_width": 2,
    "branch_factor": 2,
    "beam_rounds": 6,
    "seed": 3,
}


def main(directory: Path, port: int, rollouts: int, *, resume: bool) -> None:
    proxy = ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": f"http://127.0.0.1:{port}/v1"}])
    trainer = ly.Trainer(
        algorithm=ly.APO(**OPTIONS, budget=ly.Budget(rollouts=rollouts, seconds=SECONDS)),
        llm_proxy=proxy,
        initial_resources={"prompt": ly.PromptTemplate(template=SEED)},
        run_dir=directory,
        concurrency=8,
    )
    print(trainer.fit(support, TRAIN, VAL, resume=resume).result.prompts["prompt"].model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), resume="resume" in sys.argv[4:])
