"""The OpenAI Agents SDK's agent with a function tool: https://openai.github.io/openai-agents-python/."""

from agents import Agent, Runner, function_tool

import leyden as ly

MODEL = "gpt-4.1-mini"


@function_tool
def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


weather_agent = Agent(name="Weather", instructions="You are a helpful agent.", model=MODEL, tools=[get_weather])


@ly.rollout
async def agent(task: dict) -> float:
    """What Leyden runs: the agent as it is, and what its answer is worth."""
    result = await Runner.run(weather_agent, f"What is the weather in {task['city']}?")
    return float(task["city"] in result.final_output)


@ly.rollout
def sync_agent(task: dict) -> float:
    """The same in a thread."""
    result = Runner.run_sync(weather_agent, f"What is the weather in {task['city']}?")
    return float(task["city"] in result.final_output)
