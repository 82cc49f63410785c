"""An agent on OpenAI's SDK alone: the tool loop of its guide to function calling."""

import json

from openai import AsyncOpenAI, OpenAI

import leyden as ly

MODEL = "gpt-4.1-mini"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather for a given city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


def tool_answers(message) -> list[dict]:
    """Run the tools that the model called; return their results as messages."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
        for call in message.tool_calls
    ]


def ask(question: str) -> str:
    """Return the model's answer, after as many tool calls as it wants; sync client."""
    messages = [{"role": "user", "content": question}]
    with OpenAI() as client:
        while True:
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages += [message, *tool_answers(message)]


async def ask_async(question: str) -> str:
    """Return the model's answer, after as many tool calls as it wants; async client."""
    messages = [{"role": "user", "content": question}]
    async with AsyncOpenAI() as client:
        while True:
            answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages += [message, *tool_answers(message)]


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    answer = await ask_async(f"What is the weather in {task['city']}?")
    return float(f"sunny in {task['city']}" in answer)


@ly.rollout
def sync_agent(task: dict) -> float:
    """Do what `agent` does without an event loop; Leyden runs it in a thread."""
    return float(f"sunny in {task['city']}" in ask(f"What is the weather in {task['city']}?"))
