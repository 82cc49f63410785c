"""DSPy's MIPROv2 on a world of `PromptSim`: a peer's half of `benchmarks/prompts.py`.

The program has a predictor for each prompt of the world's agent. MIPROv2 runs with `auto="light"` and without demonstrations in the
prompts, because no demonstration states a rule. Rollouts of one evaluation count as run at the same time, as its threads would run
them; those that collect demonstrations run one after another, as they do in the package.

Runs in the environment `bench-prompts`. Takes `{"family": ..., "seed": ...}` a line and prints the run as JSON.
"""

# The package is in the environment `bench-prompts`, so its names are unknown here.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise each start asks the network for a table of prices
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import dspy
import dspy.teleprompt.mipro_optimizer_v2 as mipro

from benchmarks.peers.prompts_world import BUDGET, N_TRAIN, N_VAL, Trace, measure

_FIELD = re.compile(r"\[\[ ## (\w+) ## \]\]\s*\{\1\}")
_ABOUT = "A support desk of a shop answers tickets."


class _Spent(Exception):
    """The next evaluation would exceed the budget."""


class _Model(dspy.BaseLM):
    """A model in this process."""

    def __init__(self, answer: Any) -> None:
        super().__init__(model="simulated", cache=False)
        self._answer = answer

    def copy(self, **kwargs: Any) -> Any:
        return self

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        text = "\n\n".join(message["content"] for message in messages)
        message = SimpleNamespace(content=self._answer(text), role="assistant", tool_calls=None)
        choice = SimpleNamespace(message=message, finish_reason="stop", index=0)
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return SimpleNamespace(choices=[choice], usage=usage, model="simulated", id="simulated")


class _Program(dspy.Module):
    """The world's agent."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.names = list(trace.sim.initial_prompts)
        for name, text in trace.sim.initial_prompts.items():
            setattr(self, name, dspy.Predict(dspy.Signature("ticket -> answer", text)))

    def prompts(self) -> dict[str, str]:
        """Return the instructions of all predictors."""
        return {name: getattr(self, name).signature.instructions for name in self.names}

    def forward(self, ticket: str, number: int) -> Any:
        attempt = _SIDE.run(self.prompts(), number)
        if not attempt.answers:
            raise TimeoutError("unfinished at the deadline")
        for name, answer in zip(self.names, attempt.answers, strict=True):
            _SIDE.answer = answer
            found = getattr(self, name)(ticket=ticket)
        return dspy.Prediction(answer=found.answer, reward=attempt.reward)


class _Side:
    """One run: what the models and the program share."""

    def __init__(self) -> None:
        self.trace: Any = None
        self.answer = ""
        self.batch: list[float] | None = None
        """Durations of the rollouts of an evaluation under way; None outside of one."""
        self.best = -1.0

    def run(self, prompts: dict[str, str], number: int) -> Any:
        trace, task = self.trace, self.trace.sim.tasks(1, start=number)[0]
        trace.rollouts += 1
        seconds = trace.seconds(prompts, task)
        if self.batch is None:
            trace.clock.run([seconds])
        else:
            self.batch.append(seconds)
        return trace.sim.attempt(prompts, task)

    def reflect(self, text: str) -> str:
        """Answer a request of the package, in the form that it asks for: a new instruction, or a description."""
        trace = self.trace
        trace.reflections += 1
        trace.clock.reflect()
        wanted = _FIELD.findall(text)[-1]
        if "instruction" in wanted:
            found = trace.sim.reflect(_FIELD.sub("", text), replica=trace.reflections)
        else:
            found = _ABOUT
        return f"[[ ## {wanted} ## ]]\n{found}\n\n[[ ## completed ## ]]"

    def evaluate(self, batch_size: int, valset: Any, program: _Program, evaluate: Any, rng: Any = None) -> Any:
        """Do as the package's `eval_candidate_program`, and note the best program."""
        if self.trace.rollouts + batch_size > BUDGET:
            raise _Spent
        self.batch = []
        found = _EVALUATE(batch_size, valset, program, evaluate, rng)
        self.trace.clock.run(self.batch)
        self.batch = None
        if found.score / 100 > self.best:
            self.best, self.prompts = found.score / 100, program.prompts()
            self.trace.best(self.prompts)
        return found


_SIDE = _Side()
_EVALUATE = mipro.eval_candidate_program


def optimise(trace: Trace, seed: int) -> tuple[dict[str, str], float]:
    """Run the package, and return its best prompts and their mean reward on the validation set."""
    _SIDE.__init__()
    _SIDE.trace = trace

    def examples(count: int, start: int = 0) -> list[Any]:
        tasks = trace.sim.tasks(count, start=start)
        return [
            dspy.Example(ticket=task["text"], number=task["number"]).with_inputs("ticket", "number") for task in tasks
        ]

    optimiser = mipro.MIPROv2(
        metric=lambda example, found, trace=None: found.reward,
        prompt_model=_Model(_SIDE.reflect),
        task_model=_Model(lambda text: f"[[ ## answer ## ]]\n{_SIDE.answer}\n\n[[ ## completed ## ]]"),
        max_bootstrapped_demos=0,
        max_labeled_demos=0,
        auto="light",
        num_threads=1,
        max_errors=10_000,
        seed=seed + 1,  # 0 would be taken as none
    )
    try:
        optimiser.compile(_Program(trace), trainset=examples(N_TRAIN), valset=examples(N_VAL, 100))
    except _Spent:
        pass
    return _SIDE.prompts, _SIDE.best


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    logging.disable(logging.CRITICAL)
    mipro.eval_candidate_program = _SIDE.evaluate
    for line in sys.stdin:
        asked = json.loads(line)
        run = measure("DSPy 3.4.1 MIPROv2", optimise, asked["family"], asked["seed"])
        print(json.dumps(vars(run)), file=answers, flush=True)


if __name__ == "__main__":
    main()
