"""Functions that the tests run in child processes, and a program that starts some and is killed."""

import faulthandler
import os
import signal
import subprocess
import sys
import time

from leyden._lib.host.child import Child, ChildFailure, Command, Parent, end_with_parent


def echo(parent: Parent) -> None:
    """Send every message back, until the parent hangs up."""
    try:
        while True:
            parent.send(parent.receive())
    except EOFError:
        os._exit(0)


def exit_with(parent: Parent, code: int) -> None:
    os._exit(code)


def say_and_die(parent: Parent, number: int) -> None:
    """Send a failure, then be killed by a signal."""
    try:
        raise ValueError("no fuel")
    except ValueError as error:
        parent.send(ChildFailure.of(error))
    faulthandler.disable()  # pytest has enabled it, and its dump of a death that is meant would fill a log
    os.kill(os.getpid(), number)


def ignore_everything(parent: Parent) -> None:
    """Outlive SIGTERM and a parent that hangs up."""
    parent.send("up")
    while True:
        time.sleep(60)


def end_when_orphaned(parent: Parent) -> None:
    end_with_parent(parent.pid)
    parent.send(os.getpid())
    time.sleep(600)


def wait_to_be_stopped(parent: Parent) -> None:
    parent.send(os.getpid())
    try:
        parent.receive()
    except EOFError:
        os._exit(0)


def be_killed_with_children(method: str) -> None:
    """Start children of each kind, print their ids, and wait to be killed."""
    children = [
        Child(function, name="child", start_method=method)  # type: ignore[arg-type]
        for function in (end_when_orphaned, wait_to_be_stopped)
    ]
    pids = [child.receive(20) for child in children]
    # a program that inherits every descriptor keeps this process's ends of the pipes open
    for child in children:
        os.set_inheritable(child.connection.fileno(), True)
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    print(*pids, flush=True)
    print(heir.pid, flush=True)
    time.sleep(600)


def be_killed_with_a_program() -> None:
    """Start a foreign program, with a child of its own, under a guard, and wait to be killed."""
    script = (
        "import os, subprocess, time\np = subprocess.Popen(['sleep', '600'])\n"
        "print(os.getpid(), p.pid, flush=True)\ntime.sleep(600)"
    )
    Command([sys.executable, "-c", script], name="program", relay=lambda line: print(line, flush=True), guard=True)
    time.sleep(600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    be_killed_with_a_program() if sys.argv[1] == "program" else be_killed_with_children(sys.argv[1])
