"""The task protocol of Agent Lightning 0.1, over a store: programs written for it run on Leyden.

Lives here: `AgentLightningServer` (four routes over a store), `AgentLightningClient` and `DevTaskLoader` (its clients),
`LegacyAgentRunner` (a worker that runs an agent on a client's tasks), and the messages (`Task`, `TaskIfAny`,
`RolloutLegacy`, `GenericResponse`). The protocol has tasks, resources and reports; `tasks.py` maps them to a store.
Each use gives a DeprecationWarning that names what to write in new code.

`TrainerLegacy` has the methods and names of the old Trainer, which each `Trainer` has beside its own. The package knows
stores, agents and runners, and no algorithm. The protocol is complete, so nothing is added to it. New features belong
to the store and its own protocol.
"""

from leyden.legacy.reports import LegacyAgent, report_of
from leyden.legacy.runner import LegacyAgentRunner
from leyden.legacy.server import AgentLightningServer
from leyden.legacy.task_client import AgentLightningClient, DevTaskLoader
from leyden.legacy.types import GenericResponse, RolloutLegacy, Task, TaskIfAny, TripletLegacy

__all__ = [
    "AgentLightningClient",
    "AgentLightningServer",
    "DevTaskLoader",
    "GenericResponse",
    "LegacyAgent",
    "LegacyAgentRunner",
    "RolloutLegacy",
    "Task",
    "TaskIfAny",
    "TripletLegacy",
    "report_of",
]
