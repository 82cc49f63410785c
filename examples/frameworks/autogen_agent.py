"""AutoGen's first agent: https://microsoft.github.io/autogen/stable/user-guide/agentchat-user-guide/quickstart.html."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

import leyden as ly

MODEL = "gpt-4.1-mini"


async def get_weather(city: str) -> str:
    """Get the weather for a given city."""
    return f"It is always sunny in {city}!"


@ly.rollout
async def agent(task: dict) -> float:
    """Ask the agent about the task's city; return 1 if its answer has that city's weather."""
    model_client = OpenAIChatCompletionClient(model=MODEL)
    weather_agent = AssistantAgent(
        name="weather_agent",
        model_client=model_client,
        tools=[get_weather],
        system_message="You are a helpful assistant.",
        reflect_on_tool_use=True,
    )
    result = await weather_agent.run(task=f"What is the weather in {task['city']}?")
    await model_client.close()
    return float(f"sunny in {task['city']}" in result.messages[-1].content)
