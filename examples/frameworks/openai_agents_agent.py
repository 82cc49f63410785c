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
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    result = await Runner.run(weather_agent, f"What is the weather in {task['city']}?")
    return float(f"sunny in {task['city']}" in result.final_output)


@ly.rollout
def sync_agent(task: dict) -> float:
    """Do what `agent` does without an event loop; Leyden runs it in a thread."""
    result = Runner.run_sync(weather_agent, f"What is the weather in {task['city']}?")
    return float(f"sunny in {task['city']}" in result.final_output)
