"""`python -m leyden`: the command `leyden`, for environments whose scripts are not on the path."""

from leyden.cli import main

if __name__ == "__main__":
    main()
