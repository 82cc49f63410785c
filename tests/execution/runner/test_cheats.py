"""Planted cheats: what a program in a sandbox tries in order to see the answer, to change its reward or to stay. Each
prints the secret, or makes a mark, where it works.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.execution.runner.process import ProcessOutput, take_work
from leyden.execution.sandbox import Sandbox
from leyden.store import InMemoryLightningStore
from tests.execution.runner.test_process_agent import run_one
from tests.execution.runner.test_sandbox import works

pytestmark = pytest.mark.skipif(not works(), reason="this machine makes no namespaces")

SECRET = "the-answer-is-42"


def bare(command: list[str], **options: Any) -> str:
    """Return what a program prints outside of a sandbox."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options).stdout


@dataclass
class Machine:
    """What lies and runs outside of the sandbox, beside the program's folder."""

    outside: Path
    work: Path
    address: str
    udp: str
    abstract: str
    disk: str
    neighbour: int


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    for name in ("repo/work", "repo/tests", "repo/solution"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("tests/test.py", "solution/answer"):
        (tmp_path / "repo" / name).write_text(SECRET)
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0leyden-{os.getpid()}")
        abstract.listen()
        disk = stack.enter_context(socket.socket(socket.AF_UNIX))
        disk.bind(str(tmp_path / "s"))
        disk.listen()
        neighbour = stack.enter_context(subprocess.Popen(["sleep", "600"], env={"ANSWER": SECRET}))
        stack.callback(neighbour.kill)
        yield Machine(
            tmp_path / "repo", tmp_path / "repo/work", *(f"127.0.0.1:{each.getsockname()[1]}" for each in (tcp, udp)),
            f"leyden-{os.getpid()}", str(tmp_path / "s"), neighbour.pid,
        )  # fmt: skip
        assert neighbour.poll() is None
        with pytest.raises(BlockingIOError):
            udp.recv(1)


async def boxed(line: str, machine: Machine, sandbox: Sandbox | None = None, **options: Any) -> ProcessOutput:
    """Run a line of shell in the program's folder, in a sandbox."""
    return await (sandbox or Sandbox()).run(["sh", "-c", line], cwd=machine.work, timeout_seconds=60, **options)


async def python(source: str, machine: Machine, sandbox: Sandbox | None = None, **options: Any) -> ProcessOutput:
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(source)]
    return await (sandbox or Sandbox()).run(command, cwd=machine.work, timeout_seconds=60, **options)


# ---- to see the answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "cat ../tests/test.py ../solution/answer",
        "cat {outside}/tests/test.py",
        "cat /proc/*/root/{outside}/tests/test.py /proc/*/cwd/../tests/test.py /proc/self/fd/*/../tests/test.py",
        "ln -s {outside}/tests/test.py t; cat t; ln {outside}/solution/answer u; cat u",
        "grep -rs the-answer-is- / --include=test.py --include=answer --exclude-dir=usr --exclude-dir=proc",
        "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n' | grep ANSWER",
        "env",
        "cat /proc/{neighbour}/environ",
        "cat /dev/mem /dev/kmem /dev/kmsg /proc/kcore /dev/sda /dev/vda /dev/nvme0n1 | head -c 1000",
        "cd /; for i in 1 2 3 4 5 6 7 8; do cd ..; done; cat ./{outside}/tests/test.py",
        "mkdir r; chroot r; mount --bind {outside} . && cat tests/test.py",
        "unshare -Urm sh -c 'mount --bind {outside} .; cat tests/test.py'; nsenter -t 1 -a cat {outside}/tests/test.py",
    ],
)
async def test_no_file_and_no_process_tells_the_answer(
    machine: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSWER", SECRET)
    output = await boxed(line.format(**vars(machine)) + "; echo; echo end", machine)
    assert output.stdout.endswith("end\n"), output
    assert SECRET not in output.stdout + output.stderr.replace(line, "")


@pytest.mark.parametrize("below", [True, False])
async def test_git_history_is_not_there(machine: Machine, below: bool) -> None:
    """The repository holds the folder, or is in it and hidden."""
    repository = machine.outside if below else machine.work
    (repository / "solution.txt").write_text(SECRET)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
    for each in (["init", "-q"], ["add", "-A"], ["commit", "-qm", SECRET], ["rm", "-qr", "--cached", "."]):
        bare([*git, *each])
    (repository / "solution.txt").unlink()
    line = (
        "git log -p --all; git stash list; git fsck --lost-found; find . -name '*.pack'; cat .git/logs/HEAD; echo end"
    )
    assert SECRET in bare(["sh", "-c", line], cwd=machine.work)
    output = await boxed(line, machine, Sandbox(hide=[".git"]), env={"GIT_CONFIG_COUNT": "0"})
    assert output.stdout == "end\n", output


async def test_keys_of_the_user_are_not_there(machine: Machine) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}
    add_key, keyctl = numbers[os.uname().machine]
    key = libc.syscall(add_key, b"user", b"leyden-test", SECRET.encode(), len(SECRET), -4)  # the user's keyring
    if key < 0:
        pytest.skip("this machine has no keyrings")
    try:
        libc.syscall(keyctl, 5, key, 0x3F3F3F3F)  # every right for everybody
        read = f"""
        import ctypes
        libc, text = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(100)
        print(libc.syscall({keyctl}, 11, {key}, text, 100), text.value, ctypes.get_errno())
        """
        assert SECRET in bare([sys.executable, "-c", textwrap.dedent(read)])
        assert (await python(read, machine)).stdout == "-1 b'' 1\n"
    finally:
        libc.syscall(keyctl, 3, key)


async def test_shared_memory_is_private(machine: Machine) -> None:
    with tempfile.NamedTemporaryFile("w", dir="/dev/shm") as shared:
        shared.write(SECRET)
        shared.flush()
        output = await boxed(f"cat {shared.name}; ls -A /dev/shm | wc -l; ipcs -m | grep -c 0x; echo end", machine)
    assert output.stdout == "0\n0\nend\n"


# ---- to reach another address --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to",
    ["tcp", "udp", "abstract", "disk", "vsock", "packet", "dns", "ipv6", "other", "host"],
)
async def test_no_other_address_is_reached(machine: Machine, to: str) -> None:
    port = int(machine.address.split(":")[1])
    udp = int(machine.udp.split(":")[1])
    lines = {
        "tcp": f"socket.create_connection(('127.0.0.1', {port}), 5)",
        "udp": f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp})); raise OSError('not sent')",
        "abstract": f"socket.socket(socket.AF_UNIX).connect('\\0{machine.abstract}')",
        "disk": f"socket.socket(socket.AF_UNIX).connect({machine.disk!r})",
        "vsock": "socket.socket(40, socket.SOCK_STREAM).connect((2, 1024))",
        "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "dns": "socket.getaddrinfo('example.org', 80)",
        "ipv6": f"socket.create_connection(('::1', {port}), 5)",
        "other": "socket.create_connection(('192.0.2.1', 80), 5)",
        "host": f"socket.create_connection(('{_own_address()}', {port}), 5)",
    }
    output = await python(
        f"import socket\ntry:\n {lines[to]}\n print('reached')\nexcept OSError:\n print('no')", machine
    )
    assert output.stdout == "no\n", output


def _own_address() -> str:
    found = [each.address for all_ in psutil.net_if_addrs().values() for each in all_ if each.family == socket.AF_INET]
    return found[-1]


# ---- to stay, or to harm others ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "setsid nohup sh -c 'sleep 1; touch late' >/dev/null 2>&1 &",
        '(setsid sh -c \'(setsid sh -c "trap \\"\\" TERM HUP INT; sleep 1; touch late" &) &\') &',
        "systemd-run --user touch $PWD/late; systemd-run touch $PWD/late",
        "echo 'touch late' | at now; echo \"* * * * * touch $PWD/late\" | crontab -",
        "kill -STOP 1; sh -c 'sleep 1; touch late' &",
    ],
)
async def test_nothing_outlives_the_attempt(machine: Machine, line: str) -> None:
    before = time.monotonic()
    await boxed(f"{line}\nsleep 0.2; exit 0", machine)
    there = [each for each in psutil.process_iter(["cmdline"]) if "touch late" in " ".join(each.info["cmdline"] or [])]
    assert not there
    await asyncio.sleep(max(0.0, 1.5 - (time.monotonic() - before)))
    assert not (machine.work / "late").exists()


async def test_no_other_process_can_be_ended_or_traced(machine: Machine) -> None:
    source = f"""
    import ctypes, os, signal
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in ({machine.neighbour}, {os.getpid()}, 1):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
            try:
                os.kill(pid, number)
            except OSError:
                pass
        if libc.ptrace(16, pid, 0, 0) == 0:
            print("traced", pid)
        try:
            print("read", os.readlink(f"/proc/{{pid}}/exe"), open(f"/proc/{{pid}}/mem"))
        except OSError:
            pass
    print("end")
    """
    output = await python(source, machine)
    assert (output.stdout, output.exit_code) == ("end\n", 0)


@pytest.mark.parametrize(
    "line",
    [
        "date -s 2001-01-01; hwclock -w",
        "mount -t proc p /mnt; mount -t tmpfs t /tmp; umount -l /proc; mount -o remount,rw /usr",
        "mknod d b 8 0; mknod k c 1 1; ls d k",
        "sysctl -w kernel.core_pattern=x; echo 1 > /proc/sys/vm/drop_caches; echo c > /proc/sysrq-trigger",
        "echo 1 > /sys/fs/cgroup/cgroup.procs; mkdir /sys/fs/cgroup/x; echo x > /proc/dynamic_debug/control",
        "touch /usr/bin/x /etc/x /x /lib/x /root/x",
        "reboot -f; halt -f; insmod x; dmesg -n 1; ip link set lo down; ip link add d type dummy",
        "cp /bin/sh s; chmod 4755 s; touch u; chown 1 u",
    ],
)  # fmt: skip
async def test_the_machine_stays_as_it_is(machine: Machine, line: str) -> None:
    steps = "".join(f"({step}) && echo worked: '{step}'\n" for step in line.split("; "))
    before = time.time()
    output = await boxed(f"{steps}echo end", machine)
    allowed = [each for each in output.stdout.splitlines() if each.startswith("worked: ")]
    assert output.stdout.endswith("end\n"), output
    assert [each for each in allowed if not each.startswith(("worked: cp", "worked: chmod", "worked: touch u"))] == []
    assert time.time() >= before


async def test_a_setuid_program_gives_no_rights(machine: Machine) -> None:
    output = await boxed(
        "grep -E 'CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; su -c id; id -u", machine
    )
    values = dict(each.split(":\t") for each in output.stdout.splitlines() if ":\t" in each)
    assert (int(values["CapEff"], 16), int(values["CapPrm"], 16)) == (0, 0)
    assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
    assert output.stdout.splitlines()[-1] == str(os.getuid())


async def test_nothing_is_typed_into_a_terminal(machine: Machine) -> None:
    leader, follower = os.openpty()
    try:
        source = "import fcntl, sys, termios\nfor c in b'id\\n': fcntl.ioctl(0, termios.TIOCSTI, bytes([c]))"
        box = Sandbox()
        command = box.wrap(
            [sys.executable, "-I", "-S", "-c", source],
            directory=str(machine.work), cwd=None, env={}, urls=[],
        )  # fmt: skip
        done = await asyncio.to_thread(
            subprocess.run, command, stdin=follower, capture_output=True, text=True, check=False
        )
        assert "not permitted" in done.stderr
        os.set_blocking(leader, False)
        with pytest.raises(BlockingIOError):
            os.read(leader, 10)
    finally:
        os.close(leader)
        os.close(follower)


# ---- to use what others need ---------------------------------------------------------------------------------------


OPEN = "fd = [os.open(f'f{i}', os.O_CREAT | os.O_RDWR) for i in range(50)]"
WRITE = "os.write(each, bytes(2**19))"
WAIT = "import time; time.sleep(60)"
GROWN = "has grown by"
HELD = "bytes in deleted files; disk_bytes=8,388,608"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"import os\n{OPEN}\nfor i, each in enumerate(fd): os.unlink(f'f{{i}}'); {WRITE}\n{WAIT}", HELD),
        (f"import os\nfd = [os.memfd_create('m') for _ in range(50)]\nfor each in fd: {WRITE}\n{WAIT}", HELD),
        (f"for i in range(5000): open(f'f{{i}}', 'w').close()\n{WAIT}", GROWN),
        (f"import os\nfor _ in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)\n{WAIT}", "longer than the system reads"),
        (f"import os; os.mkdir('c'); [open(f'c/{{i}}', 'wb').write(b'.' * 2**20) for i in range(20)]\nos.chmod('c', 0)\n{WAIT}", GROWN),
        ("for i in range(20): open(f'/tmp/{i}', 'wb').write(bytes(2**20))", "No space left"),
        ("for i in range(20000): open(f'/dev/shm/{i}', 'w').close()", "No space left"),
        ("import os\nos.truncate(open('f', 'w').name, 2**40)", "File too large|SIGXFSZ"),
        ("import os\nfor _ in range(4):\n    if not os.fork(): break\nwhile True: pass", "seconds of CPU time; cpu_seconds=2"),
    ],
)  # fmt: skip
async def test_a_way_around_a_limit_ends_the_program(machine: Machine, source: str, says: str) -> None:
    output = await python(source, machine, Sandbox(disk_bytes=2**23, cpu_seconds=2))
    assert output.exit_code != 0
    assert any(each in f"{output.stderr} {output.signal}" for each in says.split("|")), output


async def test_a_gigabyte_of_output_is_counted_and_not_kept(machine: Machine) -> None:
    output = await boxed("head -c 1G /dev/zero; echo; echo end", machine, output_bytes=4096)
    assert output.stdout_bytes == 2**30 + 5
    assert len(output.stdout) < 5000
    assert output.stdout.endswith("end\n")


async def test_a_fork_bomb_ends(machine: Machine) -> None:
    output = await boxed("b() { b | b & }; b; sleep 3", machine, Sandbox(max_processes=60))
    assert psutil.pid_exists(machine.neighbour)
    assert "fork" in output.stderr.lower() or "max_processes=60" in output.stderr


# ---- to change the check -------------------------------------------------------------------------------------------


async def test_an_answer_cannot_be_installed_for_the_checker(machine: Machine) -> None:
    """Into the interpreter, the user's packages, the search path, the programs, or the tests' own folder."""
    cheat = """
    import os, site, subprocess, sys, sysconfig
    folders = [*sys.path, *map(os.path.expanduser, ("~", "~/.local/bin", "~/.config/pip", "/tmp", "."))]
    folders += [sysconfig.get_path("purelib"), sysconfig.get_path("scripts"), site.getusersitepackages(), "/usr/local/bin"]
    for folder in folders:
        try:
            os.makedirs(folder, exist_ok=True)
            for name in ("pytest.py", "helper.py", "sitecustomize.py", "usercustomize.py", "x.pth", "conftest.py"):
                with open(os.path.join(folder, name), "w") as file:
                    file.write("import sys; print('cheated'); sys.exit(0)")
        except OSError:
            pass
    for line in ("npm config set prefix .", "git config --global core.fsmonitor 'echo cheated'", "pip config set global.index-url x"):
        subprocess.run(line, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open("answer.py", "w") as file:
        file.write("value = 41")
    """
    await python(cheat, machine)
    (machine.outside / "tests/test.py").write_text("import helper, answer; assert answer.value == helper.right")
    (machine.outside / "tests/helper.py").write_text("right = 42")
    assert (machine.work / "sitecustomize.py").exists()
    take_work(machine.work, fresh := machine.outside / "fresh", only=["answer.py"])
    box = Sandbox(read={"/tests": str(machine.outside / "tests")})
    output = await box.run([sys.executable, "/tests/test.py"], cwd=fresh, env={"PYTHONPATH": str(fresh)})
    assert "cheated" not in output.stdout
    assert "AssertionError" in output.stderr
    assert output.exit_code == 1


async def test_links_left_for_the_checker_lead_nowhere(machine: Machine) -> None:
    """The answer is read where the tests will be, and the report is written to a file of the machine."""
    target = machine.outside / "precious"
    target.write_text("precious")
    await boxed(f"ln -s /tests/answer answer.txt; ln -s {target} report.txt; ln -s /tests logs; ln -s . deep", machine)
    (machine.outside / "tests/answer").write_text(SECRET)
    left_out = take_work(machine.work, fresh := machine.outside / "fresh")
    assert [each.split(":")[0] for each in left_out] == ["answer.txt", "deep", "logs", "report.txt"]
    box = Sandbox(read={"/tests": str(machine.outside / "tests")})
    output = await box.run(["sh", "-c", "cmp answer.txt /tests/answer || echo differs > report.txt"], cwd=fresh)
    assert "No such file" in output.stderr
    assert (fresh / "report.txt").read_text() == "differs\n"
    assert target.read_text() == "precious"


async def test_a_deleted_working_directory_is_a_result(machine: Machine, tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        line = 'rm -rf "$PWD" "$LEYDEN_DIRECTORY" ~ /tmp 2>/dev/null; ls; exit 3'
        ran = await run_one(store, ["sh", "-c", line], cwd=machine.work, sandbox="namespace")
    assert (ran.attempt.status, ran.reward) == ("succeeded", 0.0), ran.attempt.metadata
    assert take_work(machine.work, tmp_path / "fresh") == []


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def test_a_posted_reward_does_not_replace_the_exit_code(store: InMemoryLightningStore) -> None:
    program = """
import json, os, urllib.request
body = json.dumps({"reward": 1.0}).encode()
for _ in range(3):
    urllib.request.urlopen(urllib.request.Request(os.environ["LEYDEN_REWARD_URL"], body, {"content-type": "application/json"}))
raise SystemExit(1)
"""
    ran = await run_one(store, [sys.executable, "-I", "-c", program], sandbox="namespace")
    assert ran.reward == 0.0


async def test_a_tree_too_deep_to_delete_costs_no_result(store: InMemoryLightningStore) -> None:
    program = "import os\nos.chdir(os.environ['LEYDEN_DIRECTORY'])\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    ran = await run_one(store, [sys.executable, "-I", "-c", program], sandbox="namespace")
    assert ran.reward == 1.0, ran.attempt.metadata
    assert "d" not in bare(["sh", "-c", "ls -d /tmp/leyden-*/d/d/d/d/d 2>/dev/null"])
