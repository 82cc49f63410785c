"""Options are refused by their names, and right ones are not."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from pydantic import ValidationError

import leyden as ly
import leyden.rl as rl
from leyden._lib.host.asgi import ConnectionLimits
from leyden._lib.host.listening import check_token
from leyden._lib.options import check_flag, check_number, check_port
from leyden.algorithm import IterativeAlgorithm
from leyden.algorithm.evaluation import Evaluation
from leyden.engine import SamplingParams
from leyden.errors import ConfigError, InvalidArgument
from leyden.execution import SharedMemoryExecutionStrategy
from leyden.gateway import AttemptLimits
from leyden.serving.assignment import Assignment
from leyden.store import Sweeper
from leyden.types.rollout import EnqueueRolloutRequest
from leyden_compat.order_execution.reward import PAPenaltyReward, PPOReward


@pytest.mark.parametrize("value", ["2", None, True, float("nan"), float("inf"), 1.5, 0, 11, [2]])
def test_what_is_no_whole_number_of_the_range_is_refused_with_name_value_and_remedy(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_number("size", value, at_least=1, at_most=10, whole=True)
    assert str(caught.value) == f"size is {value!r}; it must be a whole number, at least 1 and at most 10"


def test_the_limits_themselves_are_right_and_what_must_be_above_one_is_not() -> None:
    for value in (1, 10):
        check_number("size", value, at_least=1, at_most=10, whole=True)
    check_number("seconds", 0.001, above=0)
    with pytest.raises(ConfigError, match=r"^seconds is 0; it must be a number, above 0$"):
        check_number("seconds", 0, above=0)


def test_none_is_right_only_where_it_means_something() -> None:
    check_number("most", None, at_least=1, or_none="no limit")
    with pytest.raises(ConfigError, match=r"at least 1, or None for no limit$"):
        check_number("most", 0, at_least=1, or_none="no limit")


@pytest.mark.parametrize("value", [-1, 65536, "80", True])
def test_a_port_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^port is "):
        check_port("port", value)


def test_a_flag_is_true_or_false() -> None:
    check_flag("daemon", value=False)
    with pytest.raises(ConfigError, match=r"^daemon is 'no'; possible: True, False$"):
        check_flag("daemon", "no")


def test_a_token_is_demanded_where_other_machines_reach_the_server() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "store.example"):
        with pytest.raises(
            ConfigError, match=rf"^host '{host}'.* give key, or bind to 127\.0\.0\.1, or say open=True$"
        ):
            check_token("key", None, host=host, or_say="open=True")
        check_token("key", None, host=host, or_say="open=True", insecure=True)
        check_token("key", "sesame", host=host)
    check_token("key", None, host="::1")


@pytest.mark.parametrize("token", ["", " ", "\t\n"])
def test_an_empty_token_is_refused_even_where_none_is_needed(token: str) -> None:
    for options in ({"host": "127.0.0.1"}, {"host": "0.0.0.0", "insecure": True}):
        with pytest.raises(ConfigError, match=r"^key is empty"):
            check_token("key", token, **options)


def test_a_token_of_another_type_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^key is bytes; it must be a string, or None$"):
        check_token("key", b"secret", host="127.0.0.1")


MISTYPED: list[tuple[Callable[[], object], str]] = [
    (lambda: ly.PolicyGradient(ly.EmbeddedBackend("model"), n_stepz=2), "PolicyGradient has no option 'n_stepz'; did you mean 'n_steps'?"),
    (lambda: ly.PolicyGradient(ly.EmbeddedBackend("model"), writer=[]), "PolicyGradient has no option 'writer'; did you mean 'writers'?"),
    (lambda: ly.Trainer(algoritm="baseline"), "Trainer has no option 'algoritm'; did you mean 'algorithm'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Baseline(epochs=2), "Baseline has no option 'epochs'; did you mean 'n_epochs'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.LLMProxy(prot=1), "LLMProxy has no option 'prot'; did you mean 'port'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.IsolatedBackend("model", dtyp="bfloat16"), "IsolatedBackend has no option 'dtyp'; did you mean 'dtype'?"),
    (lambda: ly.OptimParams(lr=1.0), "OptimParams has no option 'lr'; possible: learning_rate, "),  # pyright: ignore[reportCallIssue]
    (lambda: ly.SqliteLightningStore("file", readonly=True), "SqliteLightningStore has no option 'readonly'; did you mean 'read_only'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.LitAgentRunner(concurency=2), "LitAgentRunner has no option 'concurency'; did you mean 'concurrency'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.OtelTracer(model_host=()), "OtelTracer has no option 'model_host'; did you mean 'model_hosts'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Checkpoint("folder", kep=1), "Checkpoint has no option 'kep'"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Monitor(rule=()), "Monitor has no option 'rule'; did you mean 'rules'?"),  # pyright: ignore[reportCallIssue]
    (lambda: SharedMemoryExecutionStrategy(n_runer=1), "SharedMemoryExecutionStrategy has no option 'n_runer'; did you mean 'n_runners'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Trainer(algorithm="baseline").fit(agent, [1], resme=True), "Trainer.fit has no option 'resme'; did you mean 'resume'?"),  # pyright: ignore[reportCallIssue]
    (lambda: asyncio.run(ly.Trainer(algorithm="baseline").afit(agent, [1], resme=True)), "Trainer.afit has no option 'resme'"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Trainer().dev(agent, [1], dataset=[2]), "Trainer.dev has no option 'dataset'; did you mean 'val_dataset'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.open_store("file", readonly=True), "open_store has no option 'readonly'; did you mean 'read_only'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.LLM(endpoint="http://a/v1", model="m", api_kay="k"), "LLM has no option 'api_kay'; did you mean 'api_key'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.RolloutConfig(timeout_second=3), "RolloutConfig has no option 'timeout_second'; did you mean 'timeout_seconds'?"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Retention(max_age=3), "Retention has no option 'max_age'; did you mean 'max_age_seconds'?"),  # pyright: ignore[reportCallIssue]
]  # fmt: skip

MISSING: list[tuple[Callable[[], object], str]] = [
    (lambda: ly.PolicyGradient(), "PolicyGradient needs backend; write PolicyGradient(backend, ...)"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.IsolatedBackend(), "IsolatedBackend needs model; write IsolatedBackend(model, ...)"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.open_store(), "open_store needs url; write open_store(url, ...)"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.Trainer().fit(), "Trainer.fit needs agent; write Trainer.fit(agent, ...)"),  # pyright: ignore[reportCallIssue]
    (lambda: ly.LLM(model="m"), "LLM needs endpoint; write LLM(endpoint=..., model=...)"),  # pyright: ignore[reportCallIssue]
]  # fmt: skip


@pytest.mark.parametrize(("construct", "told"), MISSING)
def test_a_missing_argument_is_named_with_what_to_write(construct: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        construct()
    assert str(caught.value) == told


def test_a_field_that_is_read_from_a_file_still_raises_the_error_of_pydantic() -> None:
    with pytest.raises(ValidationError):
        ly.RolloutConfig.model_validate({"timeout_second": 3})


def test_a_wrong_field_of_a_model_is_named_without_the_key_beside_it() -> None:
    with pytest.raises(InvalidArgument, match=r"RolloutConfig's timeout_seconds is -1 \(a int\): .* greater than 0"):
        ly.RolloutConfig(timeout_seconds=-1)
    with pytest.raises(InvalidArgument) as caught:
        ly.LLM(endpoint="http://a/v1", model="m", api_key=["secret"])  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == "LLM's api_key is list: must be a valid string"


@pytest.mark.parametrize(("construct", "told"), MISTYPED)
def test_an_unknown_option_is_answered_with_the_nearest_known_one(construct: Callable[[], object], told: str) -> None:
    with pytest.raises(TypeError) as caught:
        construct()
    assert isinstance(caught.value, ConfigError)
    assert told in str(caught.value)


def test_options_of_a_users_own_classes_are_named_too_and_what_they_pass_on_counts() -> None:
    class Mine(IterativeAlgorithm):
        def __init__(self, width: int = 1, **options: Any) -> None:
            super().__init__(max_iters=1, **options)
            self.width = width

        async def step(self, iteration: int) -> dict[str, float]:
            return {}

    assert Mine(width=2, keep_last=3).keep_last == 3
    assert list(inspect.signature(Mine).parameters) == ["width", "options"]
    with pytest.raises(InvalidArgument, match=r"Mine has no option 'widht'; did you mean 'width'\?"):
        Mine(widht=2)
    with pytest.raises(InvalidArgument, match="Mine has no option 'speed'; possible: width, max_iters, val_every"):
        Mine(speed=2)


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("Qwen/Qwen3-0.6B", r"PolicyGradient\(IsolatedBackend\('Qwen/Qwen3-0.6B'\)\)"),
        (
            ly.EmbeddedBackend,
            r"the class EmbeddedBackend; give an instance: PolicyGradient\(EmbeddedBackend\(MODEL\)\)",
        ),
        (None, r"backend is a NoneType; give a PolicyBackend"),
    ],
)
def test_what_is_no_backend_is_refused_with_what_to_write(backend: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        ly.PolicyGradient(backend)


WITHOUT_PACKAGES = """
import importlib, sys
for name in ("numpy", "torch", "gymnasium", "ray"):
    sys.modules[name] = None
for name in sys.argv[1:]:
    module, _, attribute = name.partition(":")
    try:
        getattr(importlib.import_module(module), attribute or "__name__")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_a_loss_is_configured_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_PACKAGES, "leyden.objectives.losses", "leyden.engine:OptimParams"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_a_module_or_name_whose_extra_is_not_installed_says_which_extra() -> None:
    needs = {
        "leyden.rl:PPO": "rl",
        "leyden.rl.policy:PPO": "rl",
        "leyden_compat.order_execution:Order": "rl",
        "leyden.rl.trainer": "rl",
        "leyden.algorithm.verl:AgentLightningTrainer": "verl",
        "leyden.algorithm.verl:AgentDataset": "verl",
    }
    command = [sys.executable, "-c", WITHOUT_PACKAGES, *needs]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for line, (name, extra) in zip(said, needs.items(), strict=True):
        needed_by = re.escape(name.replace(":", "."))
        assert re.match(
            rf"MissingExtra {needed_by} needs \w+, which is not installed; install the extra '{extra}'", line
        )


@ly.rollout
async def agent(task: Any) -> float:
    return 1.0


def backend() -> ly.EmbeddedBackend:
    return ly.EmbeddedBackend("model")


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: ly.PolicyGradient(backend(), n_steps="5"), "n_steps is '5'; it must be a whole number"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), rollouts_per_task="4"), "rollouts_per_task is '4'"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), temperature="1"), "temperature is '1'"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), advantages="gpro"), "advantages is 'gpro'; did you mean 'grpo'?"),
    (lambda: ly.PolicyGradient(backend(), advantages=True), "advantages is True; give a name ("),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), loss="pop"), "loss is 'pop'; did you mean 'ppo'?"),
    (lambda: ly.PolicyGradient(backend(), optim=1e-4), r"optim is 0.0001; give OptimParams(...)"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), loss=0.2), "loss is 0.2; give a name ("),  # pyright: ignore[reportArgumentType]
    (lambda: ly.PolicyGradient(backend(), agent_match=3), "agent_match is 3, which is no regular expression"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.OptimParams(learning_rate="1e-4"), "learning_rate is '1e-4'; it must be a number, at least 0"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.OptimParams(learning_rate=-1), "learning_rate is -1"),
    (lambda: ly.Baseline(n_epochs="2"), "n_epochs is '2'"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.IsolatedBackend("model", dtype="bf16"), "dtype is 'bf16'; did you mean 'bfloat16'"),
    (lambda: ly.IsolatedBackend("model", device="gpu"), "device is 'gpu'; possible: 'cpu', 'cuda'"),
    (lambda: ly.IsolatedBackend("model", max_length="9"), "max_length is '9'"),
    (lambda: ly.PolicyGradient(backend(), writers=ly.CsvWriter("rows.csv")), "(a CsvWriter); give a list: writers=[...]"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.TrainLoop(max_iters=1, callbacks=3), "callbacks is 3 (a int); give a list: callbacks=[...]"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.CsvWriter(3), "CsvWriter's path is 3 (a int); give a path such as 'result.csv'"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.open_store(None), "url is None (a NoneType); give a path such as 'runs.sqlite'"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.rollout(3), "the agent is 3 (a int), which is no function; decorate a function"),  # pyright: ignore[reportArgumentType]
    (lambda: ly.llm_rollout(int), "the agent is <class 'int'> (a type), which is no function"),
    (lambda: fit("tasks.jsonl"), "train_dataset is a str; give a list of tasks, for example the lines of the file"),
    (lambda: fit({"a": 1}), "train_dataset is a dict; give a list of tasks"),
]  # fmt: skip


def fit(data: Any) -> object:
    return ly.Trainer(algorithm="baseline", store="memory").fit(agent, data)


@pytest.mark.parametrize(("construct", "told"), WRONG)
def test_a_value_of_the_wrong_kind_is_refused_where_it_is_given(construct: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        construct()


def test_a_mistyped_name_of_the_package_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PolicyGradiant'; did you mean 'PolicyGradient'"):
        getattr(ly, "PolicyGradiant")  # noqa: B009 -- type checkers refuse the attribute


def test_a_traceback_gives_the_nearest_name_once() -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(ly, "MongoLightningStore")  # noqa: B009
    assert "".join(traceback.format_exception(caught.value)).lower().count("did you mean") == 1


WRONG_NUMBERS = ("3", True, math.nan, math.inf, [2])
Refusal = tuple[functools.partial[Any], str, Any]


def numeric_options() -> Iterator[Refusal]:
    """Each numeric option of the public classes, with every value that is not a number of its kind.

    A name that ends in `?` may be None. Yield what to call, the option's name and the wrong value.
    """

    def options(
        of: Callable[..., Any], *args: Any, whole: str = "", number: str = "", **needed: Any
    ) -> Iterator[Refusal]:
        for names, others in ((whole, (1.5,)), (number, ())):
            for name in names.split():
                option = name.removesuffix("?")
                for value in (*WRONG_NUMBERS, *others, *(() if name.endswith("?") else (None,))):
                    yield functools.partial(of, *args, **needed), option, value

    yield from options(
        ly.Trainer,
        algorithm="baseline",
        whole="n_runners? concurrency? max_rollouts? port? max_algorithm_restarts",
    )
    yield from options(
        ly.LLMProxy,
        whole="port? deterministic_seed? upstream_retries max_body_bytes",
        number="timeout_seconds keep_alive_seconds pause_wait_seconds",
    )
    yield from options(
        ly.PolicyGradient,
        backend(),
        whole="n_steps tasks_per_step rollouts_per_task minibatch_size? epochs warmup_steps max_tokens? max_attempts "
        "val_every_n_steps? seed",
        number="temperature timeout_seconds?",
    )
    for kind in (ly.EmbeddedBackend, ly.IsolatedBackend):
        yield from options(
            kind, "model", whole="max_batch_rows max_length? max_tokens_per_microbatch seed threads? port"
        )
    yield from options(ly.OptimParams, number="learning_rate weight_decay max_grad_norm")
    yield from options(ConnectionLimits, whole="stall_bytes", number="head_seconds stall_seconds")
    yield from options(Sweeper, ly.InMemoryLightningStore(), number="interval_seconds prune_interval_seconds")
    yield from options(AttemptLimits, whole="calls? tokens?", number="cost?")
    yield from options(Assignment, number="canary_percent min_control_percent")
    yield from options(EnqueueRolloutRequest, input=1, whole="priority")
    yield from options(SamplingParams, whole="max_tokens seed?", number="temperature top_p")
    yield from options(ly.PPOLoss, number="clip_low clip_high")
    yield from options(ly.Retention, whole="max_rollouts? max_bytes?", number="max_age_seconds?")
    yield from options(ly.RolloutConfig, whole="max_attempts", number="timeout_seconds? unresponsive_seconds?")
    yield from options(ly.Checkpoint, "folder", whole="every_n_iters? keep?", number="time_interval?")
    yield from options(ly.EarlyStopping, whole="patience", number="min_delta baseline?")
    yield from options(ly.TrainLoop, whole="max_iters? val_every_n_iters?")
    yield from options(ly.ConsoleWriter, whole="log_every_n_episode total_episodes?")
    yield from options(ly.Baseline, whole="n_epochs max_queue_length?", number="train_split polling_interval")
    yield from options(Evaluation, whole="repeats", number="timeout_seconds?")
    yield from options(ly.Monitor, number="interval_seconds")
    yield from options(ly.LitAgentRunner, whole="concurrency max_rollouts?", number="heartbeat_interval")
    yield from options(SharedMemoryExecutionStrategy, whole="n_runners", number="drain_seconds")
    yield from options(
        ly.PostgresLightningStore, "postgresql://host/db", whole="connections", number="patience_seconds"
    )
    yield from options(ly.LightningStoreServer, ly.InMemoryLightningStore(), whole="port max_body_bytes")
    yield from options(ly.LightningStoreClient, "http://127.0.0.1:1", whole="connections", number="retry_seconds")
    space = gymnasium.spaces.Box(-1, 1, (2,))
    yield from options(
        rl.PPO,
        None,
        space,
        gymnasium.spaces.Discrete(2),
        lr=1e-3,
        whole="max_batch_size seed num_threads?",
        number="lr weight_decay discount_factor max_grad_norm? eps_clip vf_coef gae_lambda ent_coef",
    )
    yield from options(
        rl.DQN,
        None,
        space,
        gymnasium.spaces.Discrete(2),
        lr=1e-3,
        whole="estimation_step target_update_freq seed num_threads?",
        number="lr weight_decay discount_factor max_grad_norm?",
    )
    yield from options(rl.Trainer, whole="max_iters? val_every_n_iters? concurrency fast_dev_run?")
    yield from options(
        rl.vectorize_env,
        "CartPole-v1",
        whole="concurrency max_retries workers?",
        number="step_timeout_seconds?",
    )
    yield from options(rl.RandomPolicy, space, space, whole="seed")
    yield from options(rl.SeedPlan, [1], whole="repeat seed")
    yield from options(PAPenaltyReward, number="penalty scale")
    yield from options(PPOReward, max_step=1, whole="start_time_index end_time_index")
    yield from options(
        rl.DataQueue, [1], whole="repeat producer_num_workers queue_maxsize seed", number="timeout_seconds?"
    )


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        pytest.param(make, option, value, id=f"{make.func.__name__}({option}={value!r})")
        for make, option, value in numeric_options()
    ],
)
def test_what_is_no_number_of_its_kind_is_refused_by_its_name(make: Any, option: str, value: Any) -> None:
    given = {"max_iters": 1, option: value} if "max_iters" in inspect.signature(make).parameters else {option: value}
    with pytest.raises((ConfigError, ValidationError), match=rf"\b(server_)?{option}\b"):
        make(**given)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_numpy_are_whole_numbers(value: Any) -> None:
    check_number("size", value, at_least=1, whole=True)
    check_number("share", np.float32(0.5), at_most=1)
    with pytest.raises(ConfigError, match="size is"):
        check_number("size", np.bool_(True), whole=True)
