"""CrewAI's first crew: one agent with a tool, one task: https://docs.crewai.com/quickstart."""

import logging

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import leyden as ly

logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)  # it warns thrice a call of an estimated token count
MODEL = "gpt-4.1-mini"
llm = LLM(model=f"openai/{MODEL}")


@tool("get_weather")
def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


def weather_crew() -> Crew:
    """Return the crew of the quickstart."""
    forecaster = Agent(
        role="Forecaster",
        goal="Say what the weather is like",
        backstory="You are a helpful assistant.",
        tools=[get_weather],
        llm=llm,
    )
    say = Task(description="What is the weather in {city}?", expected_output="One sentence.", agent=forecaster)
    return Crew(agents=[forecaster], tasks=[say])


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    result = await weather_crew().akickoff(inputs=task)
    return float(f"sunny in {task['city']}" in result.raw)


@ly.rollout
def sync_agent(task: dict) -> float:
    """Do what `agent` does without an event loop; Leyden runs it in a thread."""
    result = weather_crew().kickoff(inputs=task)
    return float(f"sunny in {task['city']}" in result.raw)
