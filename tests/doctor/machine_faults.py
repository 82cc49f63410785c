"""Faults of machines and connections."""

from __future__ import annotations

from tests.doctor.faults import Case

FAULTS: tuple[Case, ...] = ()
