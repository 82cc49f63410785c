"""LangChain's first agent, which is a LangGraph graph: https://docs.langchain.com/oss/python/langchain/quickstart."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import leyden as ly

MODEL = "gpt-4.1-mini"


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It is always sunny in {city}!"


def weather_agent():
    """Return the agent of the quickstart."""
    return create_agent(ChatOpenAI(model=MODEL), tools=[get_weather], system_prompt="You are a helpful assistant")


def question(task: dict) -> dict:
    """Return the agent's input for a task."""
    return {"messages": [{"role": "user", "content": f"What is the weather in {task['city']}?"}]}


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    answer = await weather_agent().ainvoke(question(task))
    return float(f"sunny in {task['city']}" in answer["messages"][-1].content)


@ly.rollout
def sync_agent(task: dict) -> float:
    """Do what `agent` does without an event loop; Leyden runs it in a thread."""
    answer = weather_agent().invoke(question(task))
    return float(f"sunny in {task['city']}" in answer["messages"][-1].content)
