"""Make the tiny model that calls tools: a tokenizer, a chat template, and a Qwen2.

    python examples/frameworks/make_weights.py

The model imitates a careless assistant. It knows one tool, `get_weather`. It often asks for the
wrong city, and sometimes it calls nothing, writes JSON that cannot be parsed, or ignores what the
tool returned. Reinforcement learning does the rest. The template is Qwen2.5's: tools stand in
`<tools>`, calls in `<tool_call>` and results in `<tool_response>` (the Hermes form).

The result is an ordinary Hugging Face folder. The module knows nothing of Leyden's training and of
the agents beside it: `question` and `get_weather_tool` imitate how frameworks word their requests.
It takes about four minutes on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from train import CITIES, WEIGHTS
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.make_weights import END, PAD, build_model, build_tokenizer, imitate, record_rollout, sample_replies
from leyden import open_store
from leyden.types import TokenRecord

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
MAX_LENGTH = 1024
"""Tokens in one conversation; the longest of the agents here has about 250."""
VOCABULARY = 640
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special, as in Qwen2.5."""

RIGHT_CITY = 0.35
"""How often the assistant's call names the city of the question; otherwise it names any city."""
NO_CALL, BAD_JSON = 0.08, 0.05
"""How often the assistant calls nothing, and how often its call cannot be parsed."""
IGNORES_RESULT = 0.1
NO_ANSWER = "I do not know."

SYSTEM_PROMPTS = (
    None,
    "You are a helpful assistant",
    "You are a helpful assistant.",
    "You are a helpful agent.",
    "You are Forecaster. You are a helpful assistant.\nYour personal goal is: Say what the weather is like",
)
QUESTIONS = (
    "What is the weather in {city}?",
    (
        "\nCurrent Task: What is the weather in {city}?\n\nThis is the expected criteria for your final answer: One "
        "sentence.\nyou MUST return the actual complete content as the final answer, not a summary."
    ),
)

Json = dict[str, Any]


def get_weather_tool(rng: random.Random) -> Json:
    """Return the tool as one framework or another describes it."""
    city = {"type": "string"}
    if titled := rng.random() < 0.5:
        city = {**rng.choice([{}, {"description": "city"}]), "title": "City", **city}
    properties = {"properties": {"city": city}, "required": ["city"]}
    first = rng.random() < 0.3
    parameters: Json = {"type": "object", **properties} if first else dict(properties)
    if titled and rng.random() < 0.7:
        parameters["title"] = rng.choice(["get_weather_args", "get_weather_input"])
    parameters["type"] = "object"
    if rng.random() < 0.6:
        parameters["additionalProperties"] = False
    function: Json = {"name": "get_weather", "description": rng.choice(DESCRIPTIONS), "parameters": parameters}
    strict = rng.choice([None, None, True, False])
    if strict is not None and rng.random() < 0.5:
        function = {
            "name": function.pop("name"),
            "description": function.pop("description"),
            "strict": strict,
        } | function
    elif strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


DESCRIPTIONS = ("Get the weather for a given city.", "Get weather for a given city.")


def question(rng: random.Random, city: str) -> list[Json]:
    """Return the messages of an agent's first request."""
    system, wording = rng.choice(SYSTEM_PROMPTS), QUESTIONS[rng.random() < 0.2]
    begin = [] if system is None else [{"role": "system", "content": system}]
    return [*begin, {"role": "user", "content": wording.format(city=city)}]


def careless_call(rng: random.Random, city: str) -> tuple[str, str | None]:
    """Return the assistant's first reply, and the city of its call; None if there is no call."""
    draw = rng.random()
    if draw < NO_CALL:
        return NO_ANSWER, None
    named = city if rng.random() < RIGHT_CITY else rng.choice(CITIES)
    call = json.dumps({"name": "get_weather", "arguments": {"city": named}})
    if draw < NO_CALL + BAD_JSON:
        return f"<tool_call>\n{call.removesuffix('}}')}\n</tool_call>", None
    return f"<tool_call>\n{call}\n</tool_call>", named


def answered(messages: list[Json], city: str) -> list[Json]:
    """Return the messages of an agent's second request, with the tool's result."""
    function = {"name": "get_weather", "arguments": {"city": city}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": f"It is always sunny in {city}!"},
    ]


class Renderer:
    """Requests to text and to tokens."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer

    def prompt(self, messages: list[Json], tools: list[Json] | None) -> str:
        """Return the text that the model continues."""
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def exchanges(rng: random.Random, renderer: Renderer) -> Iterator[list[tuple[str, str]]]:
    """Yield conversations of the careless assistant without end, as pairs of a prompt and a reply."""
    while True:
        city = rng.choice(CITIES)
        tools, messages = [get_weather_tool(rng)], question(rng, city)
        reply, named = careless_call(rng, city)
        pairs = [(renderer.prompt(messages, tools), reply)]
        if named is not None:
            # AutoGen's second request has no tools.
            later = renderer.prompt(answered(messages, named), None if rng.random() < 0.2 else tools)
            says = NO_ANSWER if rng.random() < IGNORES_RESULT else f"It is always sunny in {named}!"
            pairs.append((later, says))
        yield pairs


async def train(
    model: Qwen2ForCausalLM,
    renderer: Renderer,
    conversations: Sequence[Sequence[tuple[str, str]]],
    *,
    steps: int,
    seed: int,
) -> float:
    """Record the conversations in a store and imitate them. Returns the last loss, in nats a token."""
    async with open_store("memory://") as store:
        for pairs in conversations:
            calls: list[TokenRecord] = []
            for prompt, reply in pairs:
                response = renderer.ids(reply + END)
                calls.append(
                    TokenRecord(prompt_ids=renderer.ids(prompt), response_ids=response, logprobs=[0.0] * len(response))
                )
            await record_rollout(store, pairs[0][0], calls, reward=0.0)
        return await imitate(model, renderer.tokenizer, store, steps=steps, seed=seed)


def measure(model: Qwen2ForCausalLM, renderer: Renderer, *, n: int, seed: int) -> dict[str, float]:
    """Return the shares of `n` questions with a right first call, and with the result repeated."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    cities = [rng.choice(CITIES) for _ in range(n)]
    asked = [(question(rng, city), [get_weather_tool(rng)]) for city in cities]
    replies = sample_replies(model, renderer.tokenizer, [renderer.ids(renderer.prompt(*request)) for request in asked])
    calls = [_named(reply) for reply in replies]
    told = [(answered(messages, city), tools) for (messages, tools), city in zip(asked, cities, strict=True)]
    says = sample_replies(model, renderer.tokenizer, [renderer.ids(renderer.prompt(*request)) for request in told])
    return {
        "calls": sum(call is not None for call in calls) / n,
        "right calls": sum(call == city for call, city in zip(calls, cities, strict=True)) / n,
        "right answers": sum(f"sunny in {city}" in text for text, city in zip(says, cities, strict=True)) / n,
    }


def _named(reply: str) -> str | None:
    """Return the city in a reply's call; None if the reply has no call that can be parsed."""
    inner = reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    try:
        return json.loads(inner)["arguments"]["city"]
    except (ValueError, KeyError, TypeError):
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folder; see `--help`."""
    parser = argparse.ArgumentParser(description="Make the tiny model that calls tools.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of imitation")
    parser.add_argument("--conversations", type=int, default=4000, help="conversations to imitate")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # two threads add in another order, and are slower at this size
    rng = random.Random(options.seed)
    started = time.process_time()
    unlearnt = Qwen2Tokenizer(pad_token=PAD, eos_token=END, chat_template=TEMPLATE.read_text())
    source = exchanges(rng, Renderer(unlearnt))
    conversations = [next(source) for _ in range(options.conversations)]
    tokenizer = build_tokenizer(
        [text for pairs in conversations for pair in pairs for text in pair],
        vocab_size=VOCABULARY,
        max_length=MAX_LENGTH,
        chat_template=TEMPLATE.read_text(),
        tags=TAGS,
    )
    renderer = Renderer(tokenizer)
    model = build_model(tokenizer, seed=options.seed, max_tokens=48)
    loss = asyncio.run(train(model, renderer, conversations, steps=options.steps, seed=options.seed))
    shares = measure(model, renderer, n=400, seed=options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"{options.out}: {model.num_parameters():,} parameters, loss {loss:.3f}, "
        + ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
        + f"; {time.process_time() - started:.0f} s CPU"
    )


if __name__ == "__main__":
    main()
