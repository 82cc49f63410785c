"""Each part of the protocol of Agent Lightning 0.1 says what new code uses."""

import warnings

import pytest

from leyden.agent import rollout
from leyden.legacy import AgentLightningClient, AgentLightningServer, DevTaskLoader, LegacyAgentRunner


@rollout
async def agent(task: int) -> float:
    return float(task)


def dev_loader() -> DevTaskLoader:
    with warnings.catch_warnings(action="ignore"):
        return DevTaskLoader([1], {})


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: AgentLightningServer(port=0), "LightningStoreServer"),
        (lambda: AgentLightningClient("http://127.0.0.1:1"), "LightningStoreClient"),
        (lambda: DevTaskLoader([1], {}), r"Trainer\(initial_resources=\.\.\.\)\.dev"),
        (lambda: LegacyAgentRunner(agent, dev_loader()), "LitAgentRunner"),
    ],
)
def test_a_use_warns_once_at_the_callers_line_and_names_what_to_write(make, instead):
    with pytest.warns(DeprecationWarning, match=instead) as caught:
        make()
    assert [warning.filename for warning in caught] == [__file__]
