"""Tasks as folders, in Harbor's format: an instruction, an environment, hidden tests, and a reference solution.

- `folder`: one task's files, read and judged;
- `image`: its Dockerfile, as far as this machine can take its place without Docker;
- `harbor`: `HarborTasks`, the tasks of a folder and the agent that works on them;
- `check`: what `leyden tasks check` finds out.
"""

from leyden.execution.task_folders.harbor import HarborTasks as HarborTasks
