"""Every store keeps the contract of `LightningStore`."""

from tests.contracts.store import *  # noqa: F403
