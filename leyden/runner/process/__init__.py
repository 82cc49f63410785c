"""Any program as an agent: `ProcessAgent`.

What lives here:

- `agent`: `ProcessAgent`, its options, and what counts as a result;
- `environment`: the variables and files that a program finds;
- `program`: one program under its supervisor, from the runner's side;
- `supervisor`: the script between the runner and the program, which ends the program with all that came from it;
- `endpoint`: the loopback address for rewards and spans;
- `reward`: how a program writes a reward.

It knows traces and resources, and no store, gateway or algorithm: it is an agent like any other, for any runner.
"""

from leyden.runner.process.agent import ProcessAgent, RewardSource
from leyden.runner.process.program import ProcessOutput

__all__ = ["ProcessAgent", "ProcessOutput", "RewardSource"]
