"""The agent for `leyden eval`: harness.py on the tasks of the folder that TASKS names, `tasks` by default.

    leyden eval examples/coding_agent/agent.py:agent --tasks line.jsonl --model policy=smollm2 --max-tokens 80

`python agent.py 'boltons-line-*' > line.jsonl` writes tasks with such names for --tasks.
"""

import json
import os
import sys
from pathlib import Path

import leyden as ly

HARNESS = str(Path(__file__).with_name("harness.py").resolve())


def on_tasks(tasks: ly.HarborTasks) -> ly.LitAgent[dict[str, str]]:
    """Return the agent that corrects code with harness.py, in a sandbox that shows it nothing else."""
    return tasks.agent(ly.ProcessAgent([sys.executable, HARNESS], sandbox=ly.Sandbox(read=[HARNESS])))


if __name__ == "__main__":
    for task in ly.HarborTasks(os.environ.get("TASKS", "tasks"), only=sys.argv[1]):
        print(json.dumps(task))
else:
    agent = on_tasks(ly.HarborTasks(os.environ.get("TASKS", "tasks")))
