"""What every `LightningStore` must do. A store passes by giving these tests a `store` fixture:

    from tests.contracts.store import *  # noqa: F403

The tests use the protocol alone. To add a section: a module, and a line here.
"""

import pytest

for section in (
    "basics",
    "faults",
    "outcomes",
    "queue",
    "retention",
    "runs",
    "samples",
    "search",
    "serving",
    "streams",
    "support",
    "tokens",
):
    pytest.register_assert_rewrite(f"{__name__}.{section}")

from tests.contracts.store.basics import *  # noqa: E402, F403
from tests.contracts.store.faults import *  # noqa: E402, F403
from tests.contracts.store.outcomes import *  # noqa: E402, F403
from tests.contracts.store.queue import *  # noqa: E402, F403
from tests.contracts.store.retention import *  # noqa: E402, F403
from tests.contracts.store.runs import *  # noqa: E402, F403
from tests.contracts.store.samples import *  # noqa: E402, F403
from tests.contracts.store.search import *  # noqa: E402, F403
from tests.contracts.store.serving import *  # noqa: E402, F403
from tests.contracts.store.streams import *  # noqa: E402, F403
from tests.contracts.store.tokens import *  # noqa: E402, F403
from tests.contracts.store.versions import *  # noqa: E402, F403
