"""Microsoft Agent Framework's agent with a function tool: https://learn.microsoft.com/agent-framework/get-started/."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient

import leyden as ly

MODEL = "gpt-4.1-mini"


def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    weather_agent = Agent(
        client=OpenAIChatClient(model=MODEL),
        name="weather",
        instructions="You are a helpful agent.",
        tools=[get_weather],
    )
    result = await weather_agent.run(f"What is the weather in {task['city']}?")
    return float(f"sunny in {task['city']}" in result.text)
