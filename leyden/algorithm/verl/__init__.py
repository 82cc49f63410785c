"""verl as an algorithm: Leyden's agents, store and gateway before verl's trainer, on one or many
GPUs.

Lives here: `VERL` (`algorithm.py`) and its configuration (`config.py`, `defaults.yaml`); the batch,
as five pure functions (`rows.py`); `AgentModeDaemon`, which runs prompts as rollouts (`daemon.py`);
the data sets (`dataset.py`); and what plugs into verl: its trainer (`trainer.py`), a whole run
(`running.py`), an engine for small models (`replica.py`) and a platform for CPUs (`cpu.py`), which
`plugin.py` registers.

The package knows verl's plug points. It does not import verl, torch or Ray before they are needed.
To support another version of verl, look at `trainer.py`, `replica.py` and `cpu.py`: no other
module touches it.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
