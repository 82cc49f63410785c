"""An agent on Anthropic's SDK alone: the tool loop of its guide to tool use."""

from anthropic import Anthropic, AsyncAnthropic

import leyden as ly

MODEL = "claude-sonnet-4-5"
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the weather for a given city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


def tool_results(message) -> list[dict]:
    """Run the tools that the model called; return their results as content blocks."""
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]


def ask(question: str) -> str:
    """Return the model's answer, after as many tool calls as it wants; sync client."""
    messages = [{"role": "user", "content": question}]
    with Anthropic() as client:
        while True:
            message = client.messages.create(model=MODEL, max_tokens=1024, messages=messages, tools=TOOLS)
            if message.stop_reason != "tool_use":
                return message.content[0].text
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": tool_results(message)},
            ]


async def ask_async(question: str) -> str:
    """Return the model's answer, after as many tool calls as it wants; async client."""
    messages = [{"role": "user", "content": question}]
    async with AsyncAnthropic() as client:
        while True:
            message = await client.messages.create(model=MODEL, max_tokens=1024, messages=messages, tools=TOOLS)
            if message.stop_reason != "tool_use":
                return message.content[0].text
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": tool_results(message)},
            ]


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    answer = await ask_async(f"What is the weather in {task['city']}?")
    return float(f"sunny in {task['city']}" in answer)


@ly.rollout
def sync_agent(task: dict) -> float:
    """Do what `agent` does without an event loop; Leyden runs it in a thread."""
    return float(f"sunny in {task['city']}" in ask(f"What is the weather in {task['city']}?"))
