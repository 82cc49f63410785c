"""The agents of the frameworks: their pages show them as they are, and the tiny model learns to call their tool.

Here is what needs no framework. `tests/frameworks` and `tests/crewai` train the other agents.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import ROOT, train

EXAMPLE = ROOT / "examples" / "frameworks"
PAGES = ROOT / "docs" / "frameworks"
MODEL = ROOT / "leyden" / "cli" / "project" / "model"
MODULES = {path.stem.removesuffix("_agent") for path in EXAMPLE.glob("*_agent.py")}
CITY_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n</tool_call>'
CITY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a given city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def agent_pages() -> dict[str, str]:
    """The text of each framework's page, by the name that its command has for the framework."""
    pages = [path.read_text() for path in PAGES.glob("*.md") if path.name != "README.md"]
    return {re.findall(r"^\$ python examples/frameworks/train\.py (\w+)$", page, re.M)[0]: page for page in pages}


def test_every_agent_has_a_page_that_names_its_command() -> None:
    assert set(agent_pages()) == MODULES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_agent_that_a_page_shows_is_the_agent_that_its_command_trains(name: str) -> None:
    shown = re.findall(r"```python\n(.*?)```", agent_pages()[name], re.S)[0]
    trained = {ast.unparse(statement) for statement in ast.parse((EXAMPLE / f"{name}_agent.py").read_text()).body}
    shown_statements = [
        statement
        for statement in ast.parse(shown).body
        if not (isinstance(statement, ast.ImportFrom) and statement.module in ("openai", "anthropic"))
    ]
    assert "agent" in {getattr(statement, "name", None) for statement in shown_statements}
    assert [text for statement in shown_statements if (text := ast.unparse(statement)) not in trained] == []


def test_the_model_that_calls_tools_is_small() -> None:
    assert sum(file.stat().st_size for file in (MODEL).iterdir()) < 700_000


def test_a_tools_result_continues_the_tokens_of_the_call() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)

    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tools=[CITY_TOOL], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    asked = [{"role": "user", "content": "What is the weather in Lima?"}]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Lima"}}}
    told = [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "It is always sunny in Lima!"},
    ]
    exchange = prompt(asked) + tokenizer.encode(f"{CITY_CALL}<|im_end|>", add_special_tokens=False)
    assert prompt(told)[: len(exchange)] == exchange
    assert len(exchange) < 200


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_agent_on_openais_sdk_learns_to_call_its_tool_with_the_right_city(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "openai"):
        pytest.importorskip(name)
    rewards, right_calls = train("openai", tmp_path, steps=6)
    assert rewards[0] < 0.5
    assert rewards[1] > 0.75
    assert right_calls[1] - right_calls[0] > 0.25
