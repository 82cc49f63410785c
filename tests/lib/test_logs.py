"""What a person reads in Leyden's log, in a file and on a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import leyden as ly
from leyden._lib.logs import Preview, configure_logger, line_formatter, notice, relay_line, setup_logging

LONG = " ".join(f"word{number}" for number in range(60))


@pytest.fixture(autouse=True)
def fresh_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The `leyden` logger as a new process has it; put back afterwards."""
    monkeypatch.delenv("LEYDEN_LOG", raising=False)
    logger = logging.getLogger("leyden")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before
    logger.setLevel(before[1])  # forgets what children have cached


def test_off_a_terminal_a_record_is_one_line_with_date_time_level_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging()
    for _ in range(2):
        logging.getLogger("leyden.test").warning("%s", LONG)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d", "9", line[:23]) for line in lines] == ["9999-99-99 99:99:99.999"] * 2
    assert [line[23:] for line in lines] == [f" WARNING {LONG}"] * 2


def test_later_lines_and_the_traceback_are_indented_under_the_first() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(line_formatter())
    logger = logging.Logger("alone")
    logger.addHandler(handler)
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("first\n  second\r\n\nlast ")
    first, *later = stream.getvalue().splitlines()
    assert first.endswith(" ERROR first")
    assert later[:4] == ["      second", "", "    last", "    Traceback (most recent call last):"]
    assert later[-1] == "    ValueError: wrong"
    assert stream.getvalue() == "\n".join(line.rstrip() for line in [first, *later]) + "\n"  # no padding


def test_the_log_follows_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logging.getLogger("leyden").warning("here")
    assert later.getvalue().endswith(" WARNING here\n")


def test_on_a_terminal_every_record_has_its_time_and_brackets_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w", encoding="utf-8") as stream, monkeypatch.context() as replaced:
        replaced.setattr(sys, "stderr", stream)
        setup_logging()
        for word in ("[bold]one[/bold]", "two"):
            logging.getLogger("leyden").warning(word)
        stream.flush()
        shown = ""
        while "two" not in shown:
            shown += os.read(reading, 65_536).decode()
    os.close(reading)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert len(re.findall(r"\d\d:\d\d:\d\d", plain)) == 2
    assert "[bold]one[/bold]" in plain


def test_repeating_it_changes_the_level_and_adds_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("ERROR")
    setup_logging("debug")
    logging.getLogger("leyden.test").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_the_environment_decides_the_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LEYDEN_LOG", "debug")
    setup_logging("WARNING")
    assert configure_logger().level == logging.DEBUG
    logging.getLogger("leyden.test").debug("a detail")
    assert capsys.readouterr().err.endswith(" DEBUG a detail\n")


@pytest.mark.parametrize("wrong", ["debgu", True, None, 1.5])
def test_an_unknown_level_is_refused_with_those_that_there_are(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"level is .*; possible: debug, info, warning, error, critical"):
        setup_logging(wrong)  # pyright: ignore[reportArgumentType] -- what a caller may write


def test_an_unknown_level_in_the_environment_is_reported_and_the_given_one_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_logger: logging.Logger
) -> None:
    monkeypatch.setenv("LEYDEN_LOG", "loud")
    setup_logging("ERROR")
    assert fresh_logger.level == logging.ERROR
    setup_logging()
    assert "WARNING LEYDEN_LOG is 'loud', which is no level; possible: debug" in capsys.readouterr().err


@pytest.mark.parametrize("level", [None, "WARNING", "INFO"])
def test_a_notice_is_shown_once_whether_logging_is_set_up_or_not(
    level: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if level is not None:
        setup_logging(level)
    notice(logging.getLogger("leyden.test"), "waiting for %s", "rollouts")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("waiting for rollouts")


def test_a_program_that_sets_no_logging_up_shows_it_when_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    monkeypatch.setenv("LEYDEN_LOG", "debug")
    ly.Trainer().dev(agent, [1])
    assert re.search(r" DEBUG rollout \S+: attempt \S+ succeeded", capsys.readouterr().err)


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_texts_of_others_do_not_control_the_terminal_that_shows_the_log(
    monkeypatch: pytest.MonkeyPatch, on_a_terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: on_a_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    setup_logging("INFO")
    attack = "\x1b]52;c;clipboard\x07\x9b2J"
    try:
        raise ValueError(f"a reason {attack}")
    except ValueError:
        logging.getLogger("leyden.test").exception("a task %s and %s", attack, Preview(attack))
    shown = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue())  # rich's own
    assert "a task" in shown
    assert "a reason" in shown
    assert not re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert str(Preview(attack)).isprintable()


def test_a_line_of_a_child_keeps_its_level_and_gets_one_prefix(caplog: pytest.LogCaptureFixture) -> None:
    child = "import logging; from leyden._lib.logs import setup_relayed_logging; setup_relayed_logging()\n"
    child += "log = logging.getLogger('leyden.engine'); log.info('serving'); log.warning('hot\\nvery')\n"
    child += "import sys; sys.stderr.write('from a library\\n')"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    logger = logging.getLogger("test_relayed")
    logger.setLevel(logging.INFO)
    for line in done.stderr.splitlines():
        relay_line(logger, "engine process", line)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "engine process: serving"),
        ("WARNING", "engine process: hot"),
        ("INFO", "engine process:     very"),
        ("INFO", "engine process: from a library"),
    ]
