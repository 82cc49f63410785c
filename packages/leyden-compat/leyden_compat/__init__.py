"""Run programs that were written for `agentlightning` or `qlib.rl` on Leyden, under their own imports.

    python -m leyden.compat script.py        # run an unchanged program
    import leyden.compat                     # or: one line above the program's imports

Either way `import agentlightning` and its submodules find Leyden's objects. A name of the other package stands for
Leyden's own object where the two agree, and for a thin wrapper in this package where they differ. Any other name raises
an error that says what to write instead. Leyden's own names keep their behaviour.

`finder` serves foreign modules from tables and knows no foreign package. `agentlightning/` and `qlib/` hold one table
and the wrappers of one package each. To serve another package, write a module with a `MODULES` table, name it in
`finder.TABLES`, and add a folder for it in `shadow/`, so that child processes find it.
"""

from leyden_compat.finder import ForeignModule, ForeignNameError, MissingName, install

__all__ = ["ForeignModule", "ForeignNameError", "MissingName", "install"]

install()
