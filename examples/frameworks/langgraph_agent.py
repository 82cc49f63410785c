"""LangChain's first agent, which is a LangGraph graph: https://docs.langchain.com/oss/python/langchain/quickstart."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import leyden as ly

MODEL = "gpt-4.1-mini"


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It is always sunny in {city}!"


def weather_agent():
    """The agent of the quickstart."""
    return create_agent(ChatOpenAI(model=MODEL), tools=[get_weather], system_prompt="You are a helpful assistant")


def question(task: dict) -> dict:
    """What the agent is asked."""
    return {"messages": [{"role": "user", "content": f"What is the weather in {task['city']}?"}]}


@ly.rollout
async def agent(task: dict) -> float:
    """What Leyden runs: the agent as it is, and what its answer is worth."""
    answer = await weather_agent().ainvoke(question(task))
    return float(task["city"] in answer["messages"][-1].content)


@ly.rollout
def sync_agent(task: dict) -> float:
    """The same in a thread."""
    answer = weather_agent().invoke(question(task))
    return float(task["city"] in answer["messages"][-1].content)
