"""The roles of a real harness's calls, beside the model's own log: titles, subagents, summaries, retries, cut streams."""

from __future__ import annotations

import json

import pytest

from tests.harness.roles import HABITS
from tests.harness.test_programs import RESULTS, ROLLOUTS, SECONDS, ready, run_alone

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", HABITS)
def test_the_roles_of_a_harness_are_right_in_99_of_100_calls(name: str) -> None:
    found = run_alone("roles.py", name, str(ready(name)), ROLLOUTS, SECONDS)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.roles.json").write_text(json.dumps(found))
    right, calls = sum(found["right"].values()), sum(found["kinds"].values())
    print(f"{name}: {right} of {calls} right in {found['rollouts']} rollouts, {found['kinds']}")
    assert found["recorded"] == found["requests"] and not found["lost"] and not found["failed"], found
    assert right >= 0.99 * calls, found["wrong"]
    if name == "hermes":  # it asks for a title in a thread, which its own end may overtake
        found["kinds"].setdefault("title", 0)
    wanted = {"title": HABITS[name].title, "subagent": HABITS[name].subagent, "summary": HABITS[name].summary}
    assert {"agent", *(kind for kind, has in wanted.items() if has)} <= found["kinds"].keys(), found["kinds"]
