"""CrewAI's first crew: one agent with a tool, one task: https://docs.crewai.com/quickstart."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import leyden as ly

MODEL = "gpt-4.1-mini"
llm = LLM(model=f"openai/{MODEL}")


@tool("get_weather")
def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


def weather_crew() -> Crew:
    """The crew of the quickstart."""
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
    """What Leyden runs: the agent as it is, and what its answer is worth."""
    result = await weather_crew().akickoff(inputs=task)
    return float(task["city"] in result.raw)


@ly.rollout
def sync_agent(task: dict) -> float:
    """The same in a thread."""
    result = weather_crew().kickoff(inputs=task)
    return float(task["city"] in result.raw)
