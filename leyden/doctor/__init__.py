"""The doctor: names what is wrong with a run, from its data alone.

`diagnose` reads a run that is running, finished or crashed and returns findings, each with its cause, the evidence and
a remedy. It knows the run's folder, its store and its configuration, and no algorithm, engine or trainer.

To add a rule, write a module in `rules/` with a `Rule`, and add a line to `RULES` there. A rule reads `Evidence`, which
reads each file and the store once, and returns a `Finding` or None.
"""

from leyden.doctor.diagnosis import Diagnosis as Diagnosis
from leyden.doctor.diagnosis import diagnose as diagnose
from leyden.doctor.evidence import Evidence as Evidence
from leyden.doctor.rule import Finding as Finding
from leyden.doctor.rule import Rule as Rule
from leyden.doctor.watch import FitWatch as FitWatch
