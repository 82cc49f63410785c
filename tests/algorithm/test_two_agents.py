"""Two agents with a model each play one game: one model is trained, and the other does not change by a bit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import leyden as ly  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.cli.demo.game import Game  # noqa: E402
from tests.algorithm.asking import Rows  # noqa: E402


@ly.rollout
async def two_players(task: dict[str, int], resources: ly.NamedResources, rollout: Any) -> float:
    """Guess the number in turns: the learner begins, the partner goes on. Both read the whole game."""
    proxy: Any = resources["main_llm"]
    main_llm: ly.LLM = proxy.with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
    partner: Any = resources["partner"]
    game = Game(task["secret"])
    messages: list[Any] = [{"role": "user", "content": game.prompt()}]
    while not game.done:
        llm = partner if game.turns % 2 else main_llm
        answer = await llm.openai().chat.completions.create(
            model=llm.model, messages=messages, temperature=1.0, max_tokens=4
        )
        reply = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": game.guess(reply).text},
        ]
    return float(game.won)


def weights_of(model: Any) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.merge
async def test_the_weights_of_an_agent_that_is_not_trained_stay_equal_to_the_bit() -> None:
    learner, other = (AutoModelForCausalLM.from_pretrained(WEIGHTS) for _ in range(2))
    before = weights_of(other)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    options: dict[str, Any] = {"tokenizer": tokenizer, "device": "cpu", "max_length": 128}
    rows = Rows()
    algorithm = ly.GRPO(
        ly.EmbeddedBackend(learner, **options),
        n_steps=2,
        tasks_per_step=4,
        rollouts_per_task=8,
        minibatch_size=16,
        epochs=2,
        max_tokens=4,
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        writers=[rows],
    )
    async with ly.EmbeddedBackend(other, **options) as partner:
        trainer = ly.Trainer(
            algorithm=algorithm,
            store="memory",
            concurrency=96,
            initial_resources={"partner": partner.endpoint()},
        )
        await trainer.afit(two_players, [{"secret": secret} for secret in range(10)])
        assert (await partner.statistics()).requests > 50, "the partner has played"
    assert sum(rows.column("optimizer_steps")) >= 4
    after = weights_of(other)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before), "the partner's weights have changed"
    assert not all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())
