"""Credit by forks: against a game whose advantages are known, in a run, and by how many rollouts it needs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("openai")

import leyden as ly  # noqa: E402
from leyden.algorithm import call_advantages  # noqa: E402
from leyden.algorithm.policy_gradient.step_data import StepRollout  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.errors import ConfigError  # noqa: E402
from leyden.objectives.advantages import Advantages, RLOOAdvantages, RolloutRewards, VinePPOAdvantages, find_estimator  # noqa: E402
from leyden.testing import LuckGame  # noqa: E402
from leyden.testing.luck import DIGITS, points_of  # noqa: E402
from leyden.types import read_replay_from, semconv  # noqa: E402
from tests.algorithm.asking import Rows, ask, backend  # noqa: E402

# ---- a table as the policy ---------------------------------------------------------------------------------------------


class TablePolicy:
    """Ten logits for each move of `LuckGame`, trained by the policy gradient."""

    def __init__(self, seed: int, *, n_moves: int = 4) -> None:
        self.n_moves, self.draw = n_moves, random.Random(seed)
        self.logits = [[0.0] * 10 for _ in range(n_moves)]
        self.n_rollouts = 0
        self.read_table()

    def read_table(self) -> None:
        self.table = [self.probabilities(move) for move in range(self.n_moves)]

    def probabilities(self, move: int) -> list[float]:
        exponentials = [math.exp(logit - max(self.logits[move])) for logit in self.logits[move]]
        return [each / sum(exponentials) for each in exponentials]

    def play(self, game: LuckGame, answers: Sequence[str] = ()) -> list[str]:
        """Return the answers of one rollout that keeps some first answers."""
        self.n_rollouts += 1
        moves = range(len(answers), self.n_moves)
        return [*answers, *(self.draw.choices(DIGITS, self.table[move])[0] for move in moves)]

    def step(self, advantages: Advantages, learning_rate: float, *, n_groups: int = 4, size: int = 4) -> None:
        self.read_table()
        rollouts: list[RolloutRewards] = []
        played: list[list[str]] = []
        for group in range(n_groups):
            game = LuckGame(lucky=self.draw.random() < 0.5, n_moves=self.n_moves)
            for answers in [self.play(game) for _ in range(size)]:
                forked = {
                    place: [game.reward(self.play(game, answers[:place])) for _ in range(advantages.forks_per_call)]
                    for place in advantages.fork_places(self.n_moves)
                }
                reward = game.reward(answers)
                rollouts.append(RolloutRewards(group, reward, [0.0] * 3 + [reward], forked_returns=forked))
                played.append(answers)
        estimate = find_estimator(advantages).function(rollouts, advantages).advantages
        for row, answers in zip(estimate, played, strict=True):
            for move, advantage in enumerate(row):
                size_of_step = learning_rate * advantage / len(played)
                logits = [old - size_of_step * p for old, p in zip(self.logits[move], self.table[move], strict=True)]
                logits[int(answers[move])] += size_of_step
                self.logits[move] = logits

    def skill(self) -> float:
        moves = [self.probabilities(move) for move in range(1, self.n_moves)]
        return statistics.fmean(
            sum(p * points_of(digit) for p, digit in zip(each, DIGITS, strict=True)) for each in moves
        )


def rollouts_to_learn(advantages: Advantages, learning_rate: float, *, limit: int) -> int:
    """Return after how many rollouts, forks included, each of five policies has 85 % of the points that can be learnt."""
    most = 0
    for seed in range(5):
        policy = TablePolicy(seed)
        while policy.skill() < 0.85 and policy.n_rollouts < limit:
            policy.step(advantages, learning_rate)
        most = max(most, policy.n_rollouts)
    return most


def test_credit_for_each_call_needs_less_than_half_of_the_rollouts_of_a_shared_reward() -> None:
    """Forks are rollouts, too. A rate that is too high for the noise of a shared reward fails on some seed."""
    by_forks = rollouts_to_learn(VinePPOAdvantages(n_forks=1, whiten=False), 4.0, limit=2000)
    assert by_forks < 2000
    for learning_rate in (0.1, 0.3, 1.0, 3.0):
        assert rollouts_to_learn(RLOOAdvantages(), learning_rate, limit=2 * by_forks) >= 2 * by_forks


def test_values_by_forks_agree_with_the_true_advantages_within_their_intervals() -> None:
    probabilities = dict.fromkeys(DIGITS, 0.1)
    policy, held, cases = TablePolicy(1), 0, 0
    for number in range(100):
        game = LuckGame(lucky=number % 2 == 0)
        group = [policy.play(game) for _ in range(8)]
        answers = group[0]
        forked = {place: [game.reward(policy.play(game, answers[:place])) for _ in range(8)] for place in (1, 2, 3)}
        rewards = [game.reward(each) for each in group]
        rollouts = [RolloutRewards(0, reward, [0.0] * 3 + [reward]) for reward in rewards]
        rollouts[0] = RolloutRewards(0, rewards[0], [0.0] * 3 + [rewards[0]], forked_returns=forked)
        constants = VinePPOAdvantages(whiten=False)
        (estimate, *_) = find_estimator(constants).function(rollouts, constants).advantages
        intervals = call_advantages({0: rewards[1:], **forked}, n_calls=4, own_return=rewards[0])
        assert [each.advantage for each in intervals] == pytest.approx(estimate)
        for truth, each in zip(game.advantages(answers, probabilities), intervals, strict=True):
            assert each.low is not None
            assert each.high is not None
            held += each.low - 1e-9 <= truth <= each.high + 1e-9
            cases += 1
    assert 0.92 <= held / cases <= 0.99  # Welch's interval, of small samples of a skewed distribution


# ---- in a run ----------------------------------------------------------------------------------------------------------


class Noting(ly.VinePPO):
    """Remembers what each step trained on."""

    trained: list[StepRollout]
    stop_at: int | None = None

    async def _update(self, iteration: int, data: Any) -> Any:
        if iteration == self.stop_at:
            raise ZeroDivisionError(f"in step {iteration + 1}")
        result = await super()._update(iteration, data)
        self.trained += data.trained
        return result


def noting(rows: Rows, **options: Any) -> Noting:
    defaults: dict[str, Any] = {"n_steps": 1, "tasks_per_step": 1, "rollouts_per_task": 2, "max_tokens": 1}
    algorithm = Noting(backend(), writers=[rows], **(defaults | options))
    algorithm.trained = []
    return algorithm


N_MOVES = 3


@ly.llm_rollout
async def player(task: int, llm: ly.LLM) -> float:
    """Each answer is a call of its own, which knows nothing of the others: so every move has the same probabilities."""
    answers = [await ask(llm) for _ in range(N_MOVES)]
    return LuckGame(lucky=task % 2 == 0, n_moves=N_MOVES).reward(answers)


def model_calls(spans: Sequence[ly.Span]) -> list[ly.Span]:
    return [span for span in spans if span.name == semconv.MODEL_CALL]


async def test_rollouts_are_forked_before_each_call_and_no_call_is_trained_on_twice() -> None:
    rows = Rows()
    algorithm = noting(rows, advantages=VinePPOAdvantages(n_forks=2, whiten=False), rollouts_per_task=3)
    async with ly.open_store("memory://") as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(player, [0])
        rollouts = await store.query_rollouts()
        spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    sources = {each.rollout_id: read_replay_from(each.metadata) for each in rollouts}
    originals = [rollout_id for rollout_id, source in sources.items() if source is None]
    wanted = {(original, place): 2 for original in originals for place in range(1, N_MOVES)}
    assert Counter((each.rollout_id, each.n_calls) for each in sources.values() if each) == wanted
    for rollout_id, source in sources.items():
        if source is not None:
            replayed = [span for span in model_calls(spans_of[rollout_id]) if span.attributes.get(semconv.REPLAYED)]
            assert len(replayed) == source.n_calls

    (row,) = rows.train
    n_forks = len(originals) * (N_MOVES - 1) * 2
    assert (row["rollouts"], row["forks"], row["diverged_forks"]) == (3, n_forks, 0), (
        "forks are no rollouts of the step"
    )
    assert row["fork_calls"] == len(originals) * 2 * sum(range(1, N_MOVES))
    assert row["model_calls"] == 3 * N_MOVES
    assert {each.data.rollout_id for each in algorithm.trained} == set(originals), "forks are not trained on"
    n_calls = [sum(len(each.call_spans) for each in rollout.data.trajectories) for rollout in algorithm.trained]
    assert n_calls == [N_MOVES] * 3, "each recorded call is trained on once"

    reward_of = {rollout_id: ly.find_final_reward(spans) or 0.0 for rollout_id, spans in spans_of.items()}
    for rollout in algorithm.trained:
        own = rollout.data.rollout_id
        values = [statistics.fmean(reward_of[other] for other in originals if other != own)]
        for place in range(1, N_MOVES):
            forks = [each for each, s in sources.items() if s and (s.rollout_id, s.n_calls) == (own, place)]
            values.append(statistics.fmean(reward_of[fork] for fork in forks))
        values.append(reward_of[own])
        assert rollout.advantages == pytest.approx([after - before for before, after in itertools.pairwise(values)])


@pytest.mark.slow
@pytest.mark.merge
async def test_forked_estimates_of_a_run_agree_with_the_true_advantages() -> None:
    """The policy's probabilities are those of its weights, which a forward pass gives exactly."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(WEIGHTS)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "guess 0..9"}], tokenize=False, add_generation_prompt=True
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS)
    with torch.inference_mode():
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        chances = torch.softmax(model(ids).logits[0, -1].float(), 0)
    probabilities = {digit: chances[tokenizer.convert_tokens_to_ids(digit)].item() for digit in DIGITS}
    probabilities["?"] = 1.0 - sum(probabilities.values())

    algorithm = noting(
        Rows(), advantages=VinePPOAdvantages(n_forks=12, whiten=False), tasks_per_step=4, rollouts_per_task=4
    )
    async with ly.open_store("memory://") as store:
        await ly.Trainer(algorithm=algorithm, store=store, concurrency=64).afit(player, [0, 1, 2, 3])
        rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        spans_of = await store.query_spans_of([rollout.data.rollout_id for rollout in algorithm.trained])
    held = cases = 0
    for rollout in algorithm.trained:
        spans = spans_of[rollout.data.rollout_id]
        answers = [str(triplet.response.raw_content[0]["content"]) for triplet in ly.TraceToTriplet().adapt(spans)]
        game = LuckGame(lucky=rollouts[rollout.data.rollout_id].input % 2 == 0, n_moves=N_MOVES)
        estimates = call_advantages(rollout.data.forked_returns, n_calls=N_MOVES, own_return=rollout.data.reward)
        truths = game.advantages(answers, probabilities)[1:]
        for truth, estimate, used in zip(truths, estimates, rollout.advantages[1:], strict=True):
            assert estimate.advantage == pytest.approx(used)
            assert estimate.low is not None
            assert estimate.high is not None
            held += estimate.low - 1e-6 <= truth <= estimate.high + 1e-6
            cases += 1
    assert cases == 16 * (N_MOVES - 1)
    assert held / cases >= 0.8  # 95 of 100 are expected; at most one in a thousand of such runs has fewer than 26 of 32


async def test_a_resumed_step_finds_the_forks_that_have_run(tmp_path: Path) -> None:
    calls = itertools.count()

    @ly.llm_rollout
    async def counting(task: int, llm: ly.LLM) -> float:
        next(calls)
        answers = [await ask(llm) for _ in range(N_MOVES)]
        return LuckGame(lucky=task % 2 == 0, n_moves=N_MOVES).reward(answers) + random.Random(answers[0]).random()

    constants = VinePPOAdvantages(n_forks=2)
    first = noting(Rows(), advantages=constants, rollouts_per_task=4)
    first.stop_at = 0
    with pytest.raises(ZeroDivisionError):
        await ly.Trainer(algorithm=first, run_dir=tmp_path / "run").afit(counting, [0])
    n_calls = next(calls)
    assert n_calls == 4 + 4 * 2 * 2
    rows = Rows()
    second = noting(rows, advantages=constants, rollouts_per_task=4)
    await ly.Trainer(algorithm=second, run_dir=tmp_path / "run").afit(counting, [0], resume=True)
    assert next(calls) == n_calls + 1, "nothing runs twice"
    assert rows.train[0]["forks"] == 16
    assert len(second.trained) == 4


async def test_forks_of_an_agent_that_is_not_deterministic_are_counted_and_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = itertools.count()

    @ly.llm_rollout
    async def forgetful(task: int, llm: ly.LLM) -> float:
        for _ in range(2):
            await ask(llm, f"guess {next(asked)}")
        return random.random()

    rows = Rows()
    algorithm = noting(rows, advantages=VinePPOAdvantages(n_forks=2), n_steps=2)
    async with ly.open_store("memory://") as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(forgetful, [0])
    assert [(row["forks"], row["diverged_forks"]) for row in rows.train] == [(4, 4), (4, 4)]
    assert caplog.text.count("4 of 4 forks asked something else than the rollout that they repeat") == 1
    assert "call 0: messages[0].content is" in caplog.text
    assert all(len(set(rollout.advantages)) == 1 for rollout in algorithm.trained), "both calls share the rollout's"


async def test_a_group_without_signal_is_not_forked() -> None:
    @ly.llm_rollout
    async def equal(task: int, llm: ly.LLM) -> float:
        for _ in range(2):
            await ask(llm)
        return 1.0

    rows = Rows()
    async with ly.open_store("memory://") as store:
        await ly.Trainer(algorithm=noting(rows), store=store).afit(equal, [0])
        assert len(await store.query_rollouts()) == 2
    assert (rows.train[0]["flat_groups"], rows.train[0]["forks"]) == (1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VinePPOAdvantages(n_forks=0), "n_forks is 0"),
        (lambda: VinePPOAdvantages(calls=()), "calls is empty"),
        (lambda: VinePPOAdvantages(calls=(-1,)), "calls is -1"),
        (lambda: ly.VinePPO(backend(), rollouts_per_task=1), "rollouts_per_task is 1; a group needs at least 2"),
        (lambda: ly.VinePPO(backend(), kl_in_reward=0.1), "kl_in_reward is 0.1, and the rewards of forks"),
    ],
)
def test_wrong_options_are_refused_with_their_name_and_value(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
