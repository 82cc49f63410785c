"""Imported as `qlib` by child processes of a program under `leyden.compat`. It replaces itself by the module that
Leyden serves under that name.
"""

from leyden_compat.finder import take_over

take_over("qlib")
