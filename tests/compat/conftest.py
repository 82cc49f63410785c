"""The peers' commands set the log up in this process, too."""

from tests.cli.conftest import logging_as_it_was  # noqa: F401
