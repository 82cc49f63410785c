"""Print: the one way from every command to the terminal, to a pipe or to a file.

Texts of models, agents, tasks and stores may hold characters that a terminal obeys, and any of them may be in any line.
So everything that is printed goes through here: a terminal gets it without such characters, and a pipe or a file gets
it as it is. A character that the stream's encoding lacks is printed as `?`. Output that cannot be written ends the
command (`OutputLost`).
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from leyden._lib.atomic import open_aside
from leyden._lib.formatting import is_on_terminal, one_line, printable_on
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_LINE_BREAK = re.compile(r"\r\n|[\r\n\v\f\x85\u2028\u2029]")
_PIPE_WIDTH = 250
"""Columns of a table that goes to a pipe or a file: enough that no row is wrapped."""
_SHORT_NAME, _LEAST_TAIL = 28, 20
"""Columns that a table leaves for its first cells, if it can, and that a long text needs at the end of a row."""
_OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT}
_BROKEN_PIPE_STATUS = 141
"""What a shell reports for a program that SIGPIPE has ended."""
_json_stream: Any = None
"""Standard output, while only `echo_json` may write to it."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
"""The option `--json`, which every command has that prints more than the address on which it listens."""


class OutputLost(Exception):
    """Standard output takes no more text."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}")
        self.is_closed_pipe = isinstance(error, BrokenPipeError)


class Coloured(NamedTuple):
    """A piece of a line that has a colour on a terminal."""

    text: str
    colour: str


def echo(*pieces: object, err: bool = False) -> None:
    """Print a line of pieces, without space between them. A line break in a piece becomes a space, so that a name or a
    reason that others wrote does not begin a new line.

    err: print to standard error. An error of that stream is ignored, as no one could read it.
    """
    _write(pieces, _LINE_BREAK.sub, err=err)


def echo_text(text: str | Coloured, *, err: bool = False) -> None:
    """Print a text of one or several lines.

    err: as in `echo`.
    """
    _write([text], lambda _, each: each, err=err)


def echo_data(as_json: bool, data: Any, *lines: object) -> None:
    """Print data as JSON if `as_json`, and otherwise lines that say the same."""
    if as_json:
        echo_json(data)
    for line in () if as_json else lines:
        echo(line)


def cell(text: str) -> str:
    """Return a text as a cell of a table of `terminal`: in one line, and without markup."""
    from rich.markup import escape

    return escape(one_line(text))


def _write(pieces: Iterable[object], shape: Callable[[str, str], str], *, err: bool, stream: Any = None) -> None:
    """Print pieces, each shaped by `shape(" ", piece)`, and a line break."""
    stream = stream if stream is not None else sys.stderr if err else sys.stdout
    has_colours = is_on_terminal(stream) and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    shown = list[str]()
    for each in pieces:
        text = printable_on(stream, shape(" ", each.text if isinstance(each, Coloured) else str(each)))
        shown.append(typer.style(text, fg=each.colour) if isinstance(each, Coloured) and has_colours else text)
    try:
        stream.write("".join([*shown, "\n"]))
        stream.flush()
    except OSError as error:
        if not err:
            raise OutputLost(error) from error


def echo_json(data: Any, *, indent: int | None = 2) -> None:
    """Print data as JSON. Characters that a terminal obeys, or that the stream's encoding lacks, are escaped, so that a
    program reads exactly the data. A number that is not finite is null.
    """
    stream = _json_stream or sys.stdout
    data = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    if printable_on(stream, text) != text:
        text = json.dumps(data, indent=indent)
    _write([text], lambda _, each: each, err=False, stream=stream)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    cells: Sequence[str | Coloured]
    rank: int = 0
    """Columns of the highest rank are left out first where the terminal is too narrow; 0: always shown."""
    right: bool = False
    """Align the cells on the right."""


def echo_table(columns: Sequence[Column], *, tail: Column | None = None, full: bool = False) -> None:
    """Print a table. No cell is cut. Columns with a rank are left out until the table fits the terminal. Where it still
    does not fit, a long first cell has a line of its own, and as a last resort all cells are listed below the first.

    tail: a last column of long texts, each cut where the line ends. It has a line of its own where there is no room.
    full: fold the long texts instead of cutting them.
    """
    from rich.cells import cell_len
    from rich.text import Text

    width = shutil.get_terminal_size().columns if is_on_terminal(sys.stdout) else _PIPE_WIDTH
    columns = [of._replace(name=one_line(of.name)) for of in columns]
    texts = [[one_line(each.text if isinstance(each, Coloured) else each) for each in of.cells] for of in columns]
    widths = [max(map(cell_len, (of.name, *own))) for of, own in zip(columns, texts, strict=True)]
    shown = list(range(len(columns)))

    def rest() -> int:
        return sum(widths[i] + 2 for i in shown[1:])

    if widths[0] + rest() > width:
        while (
            min(widths[0], _SHORT_NAME) + rest() > width
            and columns[out := max(shown, key=lambda i: columns[i].rank)].rank
        ):
            shown.remove(out)
        fitting = [each for each in map(cell_len, texts[0]) if each <= width - rest()]
        widths[0] = max(cell_len(columns[0].name), *fitting, 0)
    stacked, indent = widths[0] + rest() > width, widths[0] + rest() + 2
    if stacked or width - indent < _LEAST_TAIL:
        indent = 2  # of the long texts, which have lines of their own
    if not stacked:
        names = [f"{columns[i].name:{'>' if columns[i].right else '<'}{widths[i]}}" for i in shown]
        echo("  ".join([*names, tail.name if tail is not None and indent > 2 else ""]).rstrip())
    for row, name in enumerate(texts[0]):
        line = list[str | Coloured]()
        if cell_len(name) > widths[0] or stacked:
            echo(name)
        for i in shown if not stacked else ():
            padding = " " * (widths[i] - cell_len(texts[i][row]))
            text = "" if i == 0 and cell_len(name) > widths[0] else columns[i].cells[row]
            text = text._replace(text=texts[i][row]) if isinstance(text, Coloured) else text and texts[i][row]
            line += [padding, text, "  "] if columns[i].right else [text, padding if text else " " * widths[i], "  "]
        if stacked:
            facts = ", ".join(
                f"{columns[i].name} {text}".replace(" ", "\xa0") for i in shown[1:] if (text := texts[i][row])
            )
            for each in textwrap.wrap(facts, max(1, width - 2)):  # at plain spaces only
                echo("  ", each.replace("\xa0", " "))
        lines = list[str]()
        if tail is not None and tail.cells[row]:
            text = Text(str(tail.cells[row]) if full else one_line(str(tail.cells[row])))
            if not full:
                text.truncate(max(1, width - indent), overflow="ellipsis")
            lines = [each.plain.rstrip() for each in text.wrap(terminal(), max(1, width - indent), overflow="fold")]
        if not stacked:
            line += [lines.pop(0)] if lines and indent > 2 else []
            while line and not str(line[-1] if isinstance(line[-1], str) else line[-1].text).strip():
                line.pop()
            echo(*line)
        for each in lines:
            echo(" " * indent, each)


def terminal(*, err: bool = False) -> Console:
    """Return a console of rich for tables, as wide as the terminal; in a pipe, 250 columns wide."""
    is_wide = not is_on_terminal(sys.stderr if err else sys.stdout)
    width = _PIPE_WIDTH if is_wide else shutil.get_terminal_size().columns
    return _console_class()(highlight=False, stderr=err, width=width)


@functools.cache
def _console_class() -> type[Console]:
    """Return a console that prints like `echo`. It is made here because `--help` needs no rich."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintingConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for each in super().render(renderable, options):
                yield each if each.control else Segment(printable_on(self.file, each.text), each.style)

        def print(self, *objects: Any, **options: Any) -> None:
            try:
                super().print(*objects, **options)
            except OSError as error:
                raise OutputLost(error) from error

    return PrintingConsole


@contextmanager
def counting(what: str) -> Generator[Callable[..., None]]:
    """Show on a terminal how many of `what` are done. Yield the function that takes the number, and the total if it is
    known.
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = terminal(err=True)
    columns = TextColumn(what), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task("", total=None)

        def show(done: int, total: int | None = None) -> None:
            shown.update(bar, completed=done, total=total)

        yield show


def write_output(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file that the user asked for, and make its folder if it is missing. Raise ConfigError if it cannot be
    written.

    private: only this user can read the file, because it holds what agents did.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if private:
            with open_aside(path) as file:
                file.write(text)
        else:
            path.write_text(text, "utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another path") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path} cannot be written: half of a surrogate pair is no text: {error}") from error


# ---- standard streams ----------------------------------------------------------------------------


@contextmanager
def json_only() -> Generator[None]:
    """Keep standard output for `echo_json`. All other text goes to standard error, also what agents and their child
    processes print.
    """
    global _json_stream
    _json_stream, saved = sys.stdout, None
    with suppress(OSError, ValueError):  # a stream that a program put there may have no descriptor
        if sys.stdout.fileno() == 1:
            saved = os.dup(1)
            _json_stream = open(saved, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115, PTH123
            os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            _json_stream.close()
        _json_stream = None


def open_standard_streams() -> str | None:
    """Put the null device in the place of a standard input or error that is closed, so that no file takes its number.
    Return why the command cannot run: its output is closed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- until the process ends
    return "standard output is closed; to run without it, add >/dev/null" if sys.stdout is None else None


def lost_output(error: OutputLost | OSError) -> int | None:
    """Report that standard output was lost, and return the exit status of the command; None for an error of something
    else. Nothing is reported if the reader of a pipe has ended.
    """
    if not isinstance(error, OutputLost):
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return None
        error = OutputLost(error)
    with suppress(OSError, ValueError):  # what is buffered cannot be written, and must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), (_json_stream or sys.stdout).fileno())
    if error.is_closed_pipe:
        return _BROKEN_PIPE_STATUS
    echo(Coloured(f"leyden: {error}", "red"), err=True)
    return 1
