"""A function is an agent with the parameters of its choice; what it cannot be given is an error at once."""

import asyncio
import functools
import inspect
import logging
import pickle
from typing import Any

import pytest

from leyden.agent import FunctionalLitAgent, LitAgent, check_resources, llm_rollout, prompt_rollout, rollout
from leyden.errors import ConfigError, MissingResource
from leyden.types import LLM, Attempt, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Rollout

ROLLOUT = AttemptedRollout(
    rollout_id="ro-1",
    input="task",
    start_time=0.0,
    mode="train",
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)
MODEL = LLM(endpoint="http://model/v1", model="m")
PROXY = ProxyLLM(endpoint="http://gateway", model="m", sampling_parameters={"temperature": 1.0})
PROMPT = PromptTemplate(template="{x}")
ALL: NamedResources = {"prompt": PROMPT, "main": MODEL}


@rollout
def at_the_top_of_a_module(task: Any) -> float:
    """A documented agent."""
    return float(task)


def plain(task: Any, llm: LLM) -> str:
    return llm.model


wrapped_by_hand = llm_rollout(strip_proxy=False)(plain)


def answer(agent: FunctionalLitAgent, resources: NamedResources = ALL, rollout: Any = ROLLOUT) -> Any:
    if agent.is_async():
        return asyncio.run(agent.run_async("task", resources, rollout))
    return agent.run("task", resources, rollout)


GIVEN = {"resources": ALL, "rollout": ROLLOUT, "llm": MODEL, "prompt_template": PROMPT}


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "llm",
        "prompt_template",
        "resources",
        "rollout",
        "llm, rollout",
        "rollout, llm",
        "prompt_template, rollout",
        "resources, rollout",
        "*, llm, prompt_template",
        "llm, prompt_template, resources, rollout",
        "llm, temperature=0.5",
        "llm=None",
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_every_signature_of_documented_names_is_given_just_those(parameters: str, prefix: str):
    scope: dict[str, Any] = {}
    exec(f"{prefix}def agent(task, {parameters}): return dict(locals())", scope)
    agent = rollout(scope["agent"])
    assert agent.is_async() is (prefix != "")
    names = [name.strip().split("=")[0] for name in parameters.split(",") if name.strip(" *")]
    expected = {"task": "task"} | {name: GIVEN[name] for name in names if name in GIVEN}
    assert {name: value for name, value in answer(agent).items() if name != "temperature"} == expected


@pytest.mark.parametrize("decorate", [llm_rollout, llm_rollout(strip_proxy=True)])
def test_llm_rollout_is_given_the_base_url_of_its_attempt(decorate: Any):
    @decorate
    def agent(task: Any, llm: LLM) -> LLM:
        return llm

    given = answer(agent, {"main": PROXY})
    assert type(given) is LLM
    assert given.endpoint == "http://gateway/rollout/ro-1/attempt/at-1/v1"
    assert given.sampling_parameters == {"temperature": 1.0}
    given.sampling_parameters["temperature"] = 0.0
    assert PROXY.sampling_parameters == {"temperature": 1.0}


def test_llm_rollout_leaves_the_proxy_as_it_is_on_demand():
    @llm_rollout(strip_proxy=False)
    def agent(task: Any, llm: LLM) -> LLM:
        return llm

    assert answer(agent, {"main": PROXY}) is PROXY


def test_a_model_behind_the_gateway_needs_an_attempt():
    @llm_rollout
    def agent(task: Any, llm: LLM) -> LLM:
        return llm

    with pytest.raises(ConfigError, match=r"agent '.*agent' is given a model behind the gateway.*'ro-2' has none"):
        answer(agent, {"main": PROXY}, Rollout(rollout_id="ro-2", input=None, start_time=0.0))


def test_prompt_rollout_is_given_the_first_prompt():
    @prompt_rollout
    async def agent(task: Any, prompt_template: PromptTemplate) -> str:
        return prompt_template.format(x=1)

    assert answer(agent) == "1"


def test_of_several_resources_the_first_is_given_and_said_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)

    @llm_rollout
    def agent(task: Any, llm: LLM) -> LLM:
        return llm

    second = LLM(endpoint="http://second/v1", model="second")
    for _ in range(3):
        assert answer(agent, {"prompt": PROMPT, "judge": second, "main": MODEL}) is second
    assert caplog.text.count("is given the resource 'judge' as 'llm', the first of 'judge', 'main'") == 1


def test_a_missing_resource_is_named_before_the_run_and_in_it():
    @rollout
    def agent(task: Any, llm: LLM) -> None: ...

    expected = (
        r"agent '.*agent' has a parameter 'llm' and needs a resource of kind LLM; there are: 'prompt' \(PromptTemplate\)\. "
        r"Give one with Trainer\(initial_resources=\{\.\.\.: LLM\(\.\.\.\)\}\)"
    )
    with pytest.raises(MissingResource, match=expected):
        check_resources(agent, {"prompt": PROMPT})
    with pytest.raises(MissingResource, match=expected):
        answer(agent, {"prompt": PROMPT})
    with pytest.raises(LookupError, match="there are: none"):
        check_resources(agent, {})
    check_resources(agent, {"main": PROXY})


def test_a_resource_with_a_default_may_be_missing():
    @rollout
    def agent(task: Any, prompt_template: PromptTemplate | None = None) -> Any:
        return prompt_template

    check_resources(agent, {})
    assert answer(agent, {}) is None
    assert answer(agent) is PROMPT


@pytest.mark.parametrize(
    ("decorate", "parameters", "message"),
    [
        (rollout, "", "the first parameter of agent wrong.* must be `task`"),
        (rollout, "llm, task", "the first parameter"),
        (
            rollout,
            "task, tools",
            "has a parameter 'tools' that nothing can be given to; possible: task, resources, rollout, llm",
        ),
        (rollout, "task, *args", r"has '\*args'"),
        (rollout, "task, **kwargs", r"has '\*\*kwargs'"),
        (rollout, "task, llm, /", "has 'task'"),
        (llm_rollout, "task, resources", "has no parameter 'llm'; add it, or decorate with @rollout"),
        (prompt_rollout, "task, llm", "has no parameter 'prompt_template'"),
    ],
)
def test_a_signature_that_nothing_can_be_bound_to_is_refused_when_it_is_decorated(
    decorate: Any, parameters: str, message: str
):
    scope: dict[str, Any] = {}
    exec(f"def wrong({parameters}): pass", scope)
    with pytest.raises(ConfigError, match=message):
        decorate(scope["wrong"])


def test_a_generator_is_refused():
    with pytest.raises(ConfigError, match="is a generator; an agent returns its result"):

        @rollout
        def agent(task: Any) -> Any:
            yield 1


def test_it_stays_the_function_that_it_is():
    assert at_the_top_of_a_module(3) == 3.0
    assert at_the_top_of_a_module(task="4") == 4.0
    assert at_the_top_of_a_module.__name__ == "at_the_top_of_a_module"
    assert at_the_top_of_a_module.__doc__ == "A documented agent."
    assert list(inspect.signature(at_the_top_of_a_module).parameters) == ["task"]
    assert isinstance(at_the_top_of_a_module, LitAgent)


async def test_an_async_agent_is_awaited_like_its_function():
    @rollout
    async def agent(task: Any) -> Any:
        return task

    assert await agent(5) == 5


def test_callables_that_are_no_plain_functions_are_agents_too():
    class Player:
        def __init__(self, skill: int) -> None:
            self.skill = skill

        async def __call__(self, task: Any) -> int:
            return self.skill

        def play(self, task: Any, llm: LLM) -> tuple[int, LLM]:
            return self.skill, llm

    async def with_option(task: Any, option: int = 0) -> int:
        return option

    assert answer(rollout(Player(3))) == 3
    assert answer(rollout(Player(4).play)) == (4, MODEL)
    assert answer(rollout(functools.partial(with_option, option=7))) == 7


def test_a_decorated_function_is_pickled_by_its_name():
    text = pickle.dumps(at_the_top_of_a_module)
    assert b"at_the_top_of_a_module" in text
    assert pickle.loads(text) is at_the_top_of_a_module
    assert len(text) < 200


def test_an_agent_made_of_a_plain_function_is_pickled_with_its_options():
    again = pickle.loads(pickle.dumps(wrapped_by_hand))
    assert again is not wrapped_by_hand
    assert answer(again, {"main": PROXY}) == "m"
    assert again._options == {"needs": "llm", "strip_proxy": False}


def test_an_agent_that_cannot_be_found_by_name_cannot_be_pickled():
    @rollout
    def local(task: Any) -> None: ...

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(local)
