"""Sandboxes for programs. `sandbox.py` says what a program may see and use; `namespaces.py` builds that."""

from leyden.execution.sandbox.sandbox import Sandbox as Sandbox
from leyden.execution.sandbox.sandbox import harmless_variables as harmless_variables
