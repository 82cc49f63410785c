"""The store cannot be reached, or was away for a while."""

from leyden.doctor.evidence import Evidence
from leyden.doctor.messages import Kind, rule_of_messages
from leyden.doctor.rule import Finding, Rule

_BY_MESSAGES = rule_of_messages(
    "store-away",
    Kind(
        pattern=r"StoreAway|does not answer(?: yet)? \(|cannot reach its store|store_unavailable|took nothing for|spans of .* wait"
        r"|could not be delivered to|lost the connection that listens|the store does not take|records of model calls wait"
        r"|the monitor cannot reach|^(?:interrupted|exception)?:? ?StoreError",
        cause="the store cannot be reached, or was away for a while",
        remedy="See that the store's server (or PostgreSQL) runs and can be reached from each machine, then resume the "
        "run. Nothing that it acknowledged is lost.",
        command="leyden workers URL",
    ),
    explains=("slow-store", "worker-silent", "upstream-unreachable", "upstream-refuses"),
)


def _find(run: Evidence) -> Finding | None:
    if run.run.state == "running" and run.counts is None and run.store_trouble is not None:
        return Finding(
            cause="the store of the running run does not answer",
            evidence=(run.store_trouble,),
            remedy="See that its server (or PostgreSQL) runs and can be reached from here. Nothing that it acknowledged is "
            "lost, and the run waits for it for a minute.",
            severity="critical",
        )
    return _BY_MESSAGES.find(run)


RULE = Rule("store-away", _find, explains=_BY_MESSAGES.explains, during_fit=True)
