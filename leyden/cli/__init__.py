"""The command `leyden`: a thin layer over the library.

Lives here: one module for each sub-command, which parses options and prints results; the work is done by the packages
below. To add a sub-command, write `cli/<name>.py` with one typer function and name it in `app.py`. Import anything but
typer inside the function, so that `leyden --help` is quick.
"""


def main() -> None:
    """Run the command line, and exit."""
    from leyden.cli.app import main

    main()
