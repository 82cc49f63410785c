"""The rules of the doctor: one module each, and one line here.

Where two rules could explain the same run, the one that names the root cause lists the other in `explains`.
"""

from leyden.doctor.rule import Rule
from leyden.doctor.rules import collapse, flat_groups, upstream_unreachable

RULES: tuple[Rule, ...] = (
    upstream_unreachable.RULE,
    flat_groups.RULE,
    collapse.RULE,
)
