"""The serving benchmark: requests and calls that are not in the store are no result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gateway import PEERS
from benchmarks.serving import BEHAVIOUR, Application, LiveGateway, StoreServer
from benchmarks.sides import Side


@pytest.mark.slow
@pytest.mark.merge
def test_what_is_measured_is_in_the_store() -> None:
    with Side("upstream", Path(sys.executable), PEERS / "gateway_upstream.py") as upstream, StoreServer() as store:
        model = f"http://127.0.0.1:{upstream.ask('open')['port']}/{BEHAVIOUR}/v1"
        gateway = LiveGateway(model, store)
        with gateway, Application(store.url, gateway) as served, Application(None, gateway) as alone:
            whole = served.requests(3, calls=True, helpers=[gateway, store])
            assert len(whole.ms) == 3
            assert whole.cpu_s > 0
            assert len(alone.requests(4).ms) == 4
            alone.fill(5)
            for one in (served, alone):
                one.check()
                one.n_requests += 1
                with pytest.raises(RuntimeError, match="requests were served"):
                    one.check()
            gateway.check()
            gateway.calls += 1
            with pytest.raises(RuntimeError, match="5 calls were answered, 4 are recorded"):
                gateway.check()
            gateway.calls -= 1
