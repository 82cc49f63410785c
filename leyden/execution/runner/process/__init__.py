"""Any program as an agent: `ProcessAgent`.

- `process_agent`: `ProcessAgent`, its options, and the rule by which a run counts as a result;
- `process_environment`: the variables and files that a program finds;
- `program`: one program under its supervisor, from the runner's side;
- `supervisor`: the script between the runner and the program, which ends the program with all of
  its descendants;
- `left_work`: what a program left in its folder, as far as a checker may trust it;
- `endpoint`: the loopback address for rewards and spans;
- `reported_reward`: how a program writes a reward.

The package knows traces and resources, and no store, gateway or algorithm: a `ProcessAgent` is an agent like any other,
for any runner.
"""

from leyden.execution.runner.process.left_work import take_work as take_work
from leyden.execution.runner.process.process_agent import ProcessAgent as ProcessAgent
from leyden.execution.runner.process.process_agent import RewardSource as RewardSource
from leyden.execution.runner.process.program import ProcessOutput as ProcessOutput
from leyden.execution.runner.process.supervisor import remove_tree as remove_tree
