"""A program in a sandbox: what it sees, what it reaches, what it may use, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

import leyden as ly
from leyden.errors import ConfigError, ProcessFailed
from leyden.execution.sandbox import Sandbox, namespaces, sandbox
from leyden.gateway import UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from tests.execution.runner.test_process_agent import Ran, processes_of, run_all, run_one

ROOT = Path(__file__).parents[3]


def works() -> bool:
    try:
        sandbox.check_namespaces()
    except ConfigError:
        return False
    return True


pytestmark = pytest.mark.skipif(not works(), reason="this machine makes no namespaces")


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


@pytest.fixture
def other_server() -> Iterator[str]:
    """An address of this machine that no program in a sandbox may reach."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def boxed(store: InMemoryLightningStore, line: str, **options: Any) -> Ran:
    """Run a line of shell in a sandbox."""
    return await run_one(store, ["sh", "-c", line], **{"sandbox": "namespace", **options})


async def test_a_program_has_its_task_its_model_and_its_reports_as_without_a_sandbox(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    program = """
import json, os, sys, urllib.request
def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
task = json.load(open(os.environ["LEYDEN_TASK_FILE"]))
assert task == json.load(sys.stdin)
body = {"model": os.environ["LEYDEN_MODEL"], "messages": [{"role": "user", "content": task}]}
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
open("made", "w").write(answer["choices"][0]["message"]["content"])
open(os.environ["LEYDEN_DIRECTORY"] + "/seen", "w").close()
post(os.environ["LEYDEN_REWARD_URL"], {"reward": 0.5})
"""
    async with FakeUpstream() as upstream:
        proxy = ly.LLMProxy(model_list=[UpstreamModel("fake", upstream.endpoint)], store=store)
        await proxy.start()
        try:
            await store.add_resources({"main_llm": proxy.as_resource()})
            agent = ly.ProcessAgent(
                [sys.executable, "-I", "-c", program], reward="event", cwd=tmp_path, sandbox="namespace"
            )
            (ran,) = await run_all(store, agent, ["hello"], recorders=[proxy])
        finally:
            await proxy.stop()
    assert ran.attempt.status == "succeeded", ran.attempt.metadata
    assert ran.reward == 0.5
    assert (tmp_path / "made").read_text() == upstream.calls[0].text
    assert [span.name for span in ran.spans if span.tokens is not None]


async def test_it_sees_neither_the_machines_files_nor_its_processes_nor_the_runners_variables(
    store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    (tests := tmp_path / "tests").mkdir()
    (tests / "answer").write_text("42")
    monkeypatch.setenv("ANSWER", "42")
    looks = f"""
cat ../tests/answer {tests}/answer && echo read
cat /etc/shadow && echo shadow
ls {ROOT} && echo repository
ls /proc/*/root/{str(tests)[1:]} && echo by_proc
cat /proc/1/environ | grep -q . && echo environ
ls /proc/1/cwd/ && echo cwd
env | grep ANSWER
test $(ls -d /proc/[0-9]* | wc -l) -le 5 && echo few processes, $(ls -A ~ | wc -l) files
"""
    ran = await boxed(store, looks, cwd=work)
    assert ran.reward == 1.0, ran.process.attributes
    assert ran.stdout == "few processes, 0 files\n"  # its shells, process 1, ls and wc


async def test_it_cannot_change_the_machine(store: InMemoryLightningStore, tmp_path: Path) -> None:
    tries = """
touch /usr/bin/x && echo usr
touch /etc/x && echo etc
echo x > /proc/sys/kernel/core_pattern && echo core
echo b > /proc/sysrq-trigger && echo sysrq
date -s 2001-01-01 >/dev/null && echo clock
mount -t tmpfs x /mnt || umount /proc/sys && echo mount
unshare -Ur true && echo nested
mknod d b 1 1 && echo device
hostname other && echo host
kill -9 1; sleep 0.1; echo alive
"""
    before = time.time()
    ran = await boxed(store, tries, cwd=tmp_path)
    assert ran.stdout.split() == ["alive"], ran.stdout
    assert time.time() >= before


async def test_it_reaches_no_other_address(store: InMemoryLightningStore, other_server: str, tmp_path: Path) -> None:
    program = f"""
import os, socket
for address in [("127.0.0.1", {other_server.split(":")[1]}), ("192.0.2.1", 80), ("::1", {other_server.split(":")[1]})]:
    try:
        socket.create_connection(address, timeout=5)
        print("reached", address)
    except OSError as error:
        print("refused")
host, port = os.environ["LEYDEN_REWARD_URL"].split("/")[2].split(":")
socket.create_connection((host, int(port)), timeout=5)
print("reports", [name for _, name in socket.if_nameindex()])
"""
    ran = await run_one(store, [sys.executable, "-I", "-c", program], sandbox="namespace")
    assert ran.stdout.splitlines() == ["refused"] * 3 + ["reports ['lo']"], ran.process.attributes


async def test_addresses_by_name_and_by_number_lead_outside(tmp_path: Path, other_server: str) -> None:
    """A gateway on another machine has such an address."""
    port = other_server.split(":")[1]
    program = "import sys, urllib.request; print(*[urllib.request.urlopen(url).status for url in sys.argv[1:]])"
    urls = [f"http://localhost:{port}", f"http://127.0.0.2:{port}/tests"]
    server = http.server.ThreadingHTTPServer(("127.0.0.2", int(port)), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = Sandbox().wrap(
        [sys.executable, "-I", "-c", program, *urls], directory=str(tmp_path), cwd=None, env={}, urls=urls
    )
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    server.shutdown()
    server.server_close()
    assert (done.stdout, done.returncode) == ("200 200\n", 0), done.stderr


@pytest.mark.parametrize(
    ("line", "limits", "says"),
    [
        ("for i in $(seq 200); do sleep 60 & done; wait", {"max_processes": 50}, "Resource temporarily|processes|fork"),
        ("head -c 100M /dev/zero > big", {"disk_bytes": 2**20}, "SIGXFSZ|File size|disk_bytes"),
        ("i=0; while :; do head -c 500K /dev/zero > f$i; i=$((i+1)); sleep 0.01; done", {"disk_bytes": 2**20}, "disk_bytes=1,048,576"),
        ("head -c 900K /dev/zero > ~/a && head -c 900K /dev/zero > /tmp/b", {"disk_bytes": 2**20}, "No space left"),
        ("while :; do :; done", {"cpu_seconds": 1}, "SIGKILL|SIGXCPU"),
    ],
)  # fmt: skip
async def test_its_limits_hold(
    store: InMemoryLightningStore, tmp_path: Path, line: str, limits: dict[str, Any], says: str
) -> None:
    ran = await boxed(store, f"{line} || exit 3", cwd=tmp_path, sandbox=Sandbox(**limits), timeout_seconds=60)
    end = f"{ran.attempt.metadata.get('reason')} {ran.process.attributes}"
    assert ran.reward != 1.0, end
    assert any(word in end for word in says.split("|")), end


async def test_memory_is_limited_for_all_that_is_inside(store: InMemoryLightningStore) -> None:
    program = "import os, time\nos.fork()\nx = b'x' * 2**26\ntime.sleep(60)"
    ran = await run_one(store, [sys.executable, "-I", "-c", program], sandbox="namespace", memory_bytes=100 * 2**20)
    assert "memory_bytes=104,857,600" in ran.reason


async def test_what_outlives_the_program_ends_with_it(store: InMemoryLightningStore, tmp_path: Path) -> None:
    ran = await boxed(store, "setsid nohup sh -c 'sleep 600; touch late' >/dev/null 2>&1 & sleep 0.2", cwd=tmp_path)
    assert ran.reward == 1.0
    assert processes_of(ran.attempt.rollout_id) == []


async def test_a_folder_may_be_larger_than_its_limit_at_the_start(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    (tmp_path / "there").write_bytes(b"x" * 2**21)
    ran = await boxed(store, "sleep 1.5; touch new", cwd=tmp_path, sandbox=Sandbox(disk_bytes=2**20))
    assert ran.reward == 1.0, ran.attempt.metadata


async def test_a_server_that_does_not_answer_holds_up_no_other_connection(tmp_path: Path, other_server: str) -> None:
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address: tuple[str, int] = deaf.getsockname()
        for _ in range(4):  # until the queue of connections is full, and the system answers no more
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        program = """
import socket, sys, urllib.request
host, port = sys.argv[1].split(":")
with socket.create_connection((host, int(port))) as waiting:
    waiting.sendall(b"x")
    print(urllib.request.urlopen("http://" + sys.argv[2]).status)
"""
        known = [f"127.0.0.1:{address[1]}", other_server]
        command = Sandbox().wrap(
            [sys.executable, "-I", "-c", program, *known],
            directory=str(tmp_path), cwd=None, env={}, urls=[f"http://{each}" for each in known],
        )  # fmt: skip
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "200\n", done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV"])
async def test_the_signal_that_ended_a_program_is_told(store: InMemoryLightningStore, name: str) -> None:
    ran = await boxed(store, f"kill -{name[3:]} $$")
    assert name in ran.reason


async def test_exit_codes_output_and_a_cancelled_attempt_are_as_without_a_sandbox(
    store: InMemoryLightningStore,
) -> None:
    ran = await boxed(store, "echo out; echo err >&2; exit 7", reward=lambda output: float(output.exit_code))
    assert (ran.reward, ran.stdout) == (7.0, "out\n")
    slow = await boxed(store, "trap 'echo stopped; exit 0' TERM; sleep 60 & wait", timeout_seconds=0.5)
    assert slow.attempt.status == "timeout"
    assert slow.stdout == "stopped\n"
    assert processes_of(slow.attempt.rollout_id) == []


async def test_a_program_that_is_not_there_is_named(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, ["no-such-program"], sandbox="namespace")
    assert "no-such-program" in ran.reason
    assert "not found inside the sandbox" in ran.reason


@pytest.mark.parametrize("code", [124, 125, 128 + 9, 128 + 15, 255])
async def test_every_exit_code_is_the_programs_own(store: InMemoryLightningStore, code: int) -> None:
    ran = await boxed(store, f"exit {code}", reward=lambda output: float(output.exit_code))
    assert ran.reward == code, ran.attempt.metadata


async def test_a_program_cannot_look_like_a_sandbox_that_failed() -> None:
    for number in (namespaces.REFUSED, namespaces.LIMITED):
        output = await Sandbox().run(["sh", "-c", f"kill -{number} $$"])
        assert (output.exit_code, output.signal) == (128 + number, None)


async def test_tests_run_on_what_an_agent_left_where_it_has_never_been(tmp_path: Path) -> None:
    for name, text in {"tests/test.sh": "cat answer; echo 1 > /logs/reward.txt; exit 3", "app/answer": "42\n"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "logs").mkdir()
    box = Sandbox(
        read={"/tests": str(tmp_path / "tests")},
        write={"/app": str(tmp_path / "app"), "/logs": str(tmp_path / "logs")},
    )
    output = await box.run(["sh", "/tests/test.sh"], cwd="/app")
    assert (output.exit_code, output.stdout) == (3, "42\n"), output.stderr
    assert (tmp_path / "logs/reward.txt").read_text() == "1\n"
    output = await box.run(["sh", "-c", "echo $X; sleep 60"], cwd="/app", env={"X": "y"}, timeout_seconds=1)
    assert (output.stdout, output.cause) == ("y\n", "request")
    output = await box.run(["true"], cwd="/app/nothing-here")
    assert output.exit_code == 127
    assert "/app/nothing-here" in output.stderr


async def test_a_link_left_in_a_folder_leads_no_mount_out_of_the_sandbox(tmp_path: Path) -> None:
    (app := tmp_path / "app").mkdir()
    (app / "logs").symlink_to(f"../../../../../../old{tmp_path}/made")
    (app / "git").symlink_to(f"/old{tmp_path}")
    for options in (
        {"write": {"/app": str(app), "/app/logs/x": str(tmp_path)}},
        {"write": {"/app": str(app)}, "hide": ["git"]},
    ):
        with pytest.raises(ProcessFailed, match="is a link"):
            await Sandbox(**cast(Any, options)).run(["true"], cwd="/app")
    assert not (tmp_path / "made").exists()


async def test_hidden_files_and_folders_are_empty(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref")
    (tmp_path / "key").write_text("secret")
    line = "cat key .git/*; mv .git g; rm -rf .git; touch .git/new; ls .git | wc -l; mv key other"
    box = Sandbox(hide=[".git", str(tmp_path / "key"), "not-there"])
    output = await box.run(["sh", "-c", line], cwd=tmp_path)
    assert output.stdout == "0\n"
    assert (tmp_path / ".git/HEAD").read_text() == "ref"
    assert (tmp_path / "key").read_text() == "secret"


async def test_what_is_hidden_is_hidden_wherever_its_folder_is_shown(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    (work := tmp_path / "work").mkdir()
    (work / ".git").mkdir()
    (work / ".git/HEAD").write_text("ref")
    box = Sandbox(hide=[".git"], read={"/again": str(work), "/above": str(tmp_path)})
    line = "find / -name HEAD -not -path '/proc/*' 2>/dev/null | grep git/HEAD; echo end"
    agent = ly.ProcessAgent(["sh", "-c", line], folder=work, cwd="/app", sandbox=Sandbox(hide=[".git"]))
    (ran,) = await run_all(store, agent)
    assert ran.stdout == "end\n"
    output = await box.run(["sh", "-c", line], cwd=work)
    assert output.stdout == "end\n"


def has_groups(limits: dict[str, int | None]) -> bool:
    """Whether this user makes control groups here. A failed one is removed by the next."""
    made = namespaces._groups(limits)
    return bool(made) and all(namespaces._removed(folder) for folder in made)


def doors_of_groups(folder: str) -> list[int]:
    return [int(each.name.removeprefix("leyden-")) for each in Path(folder).parent.glob("leyden-*")]


@pytest.mark.skipif(not has_groups({"memory": 2**30}), reason="this user makes no control groups here")
async def test_the_kernel_limits_memory_with_files_in_memory_where_it_may() -> None:
    for line in "head -c 300M /dev/zero > /tmp/x; sleep 60", "head -c 300M /dev/zero | tail -n 1; sleep 60":
        output = await Sandbox().run(["sh", "-c", line], memory_bytes=100 * 2**20, timeout_seconds=60)
        ended = "memory" if output.cause == "memory" else output.stderr
        assert ended == "memory" or "memory_bytes=104,857,600" in ended, output
    output = await Sandbox().run(["sh", "-c", "kill -9 $$"], memory_bytes=100 * 2**20)
    assert (output.signal, output.stderr) == ("SIGKILL", "")
    (folder,) = namespaces._groups({"memory": 2**20})  # it removes what was left of those that were killed
    assert namespaces._removed(folder)
    assert all(psutil.pid_exists(pid) for pid in doors_of_groups(folder))


@pytest.mark.skipif(not has_groups({"pids": 100}), reason="this user makes no control groups here")
def test_the_kernel_limits_processes_where_it_may() -> None:
    (folder,) = namespaces._groups({"pids": 20})
    try:
        line = f"echo $$ > {folder}/cgroup.procs; for i in $(seq 40); do sleep 0.2 & done; wait"
        ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        assert "fork" in ended.stderr
    finally:
        deadline = time.monotonic() + 20
        while not namespaces._removed(folder):  # the last of them sleep
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_control_groups_of_version_2_are_made_beside_the_runners_own(tmp_path: Path) -> None:
    """A folder stands for the file system, which this machine may not have."""
    (own := tmp_path / "own").write_text("0::/app.slice/runner.service\n")
    (slice_ := tmp_path / "root/app.slice").mkdir(parents=True)
    (slice_ / "cgroup.procs").touch()
    (slice_ / "leyden-4194305").mkdir()  # its door has ended
    limits: dict[str, int | None] = {"memory": 2**30, "pids": 100}
    root = str(tmp_path / "root")
    (slice_ / "cgroup.subtree_control").write_text("cpu\n")
    assert namespaces._groups(limits, root, str(own)) == []
    (slice_ / "cgroup.subtree_control").write_text("cpu memory pids\n")
    with pytest.MonkeyPatch.context() as patch:  # the kernel makes the files with the folder
        patch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc/"))
        patch.setattr(namespaces, "_write", _made)
        (folder,) = namespaces._groups(limits, root, str(own))
    assert folder == str(slice_ / f"leyden-{os.getpid()}")
    assert {path.name: path.read_text() for path in Path(folder).iterdir()} == {
        "memory.max": "1073741824", "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "100",
    }  # fmt: skip
    assert not (slice_ / "leyden-4194305").exists()


def _made(path: str, text: str) -> None:
    Path(path).write_text(text)


async def test_a_working_directory_behind_a_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "real")
    output = await Sandbox().run(["sh", "-c", "touch made; pwd"], cwd=tmp_path / "current")
    assert output.stdout == f"{tmp_path}/current\n"
    assert (tmp_path / "real/made").exists()


KILLED = """
import asyncio, sys
import leyden as ly
from leyden.store import InMemoryLightningStore
from tests.execution.runner.test_process_agent import run_one
async def main():
    async with InMemoryLightningStore() as store:
        await run_one(store, ["sh", "-c", "sleep 600 & touch up; wait"], cwd=sys.argv[1], sandbox="namespace")
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["runner", "supervisor", "door", "first"])
def test_nothing_is_left_whoever_is_killed(tmp_path: Path, victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL) as runner:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "up").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            chain = psutil.Process(runner.pid).children(recursive=True)
            assert len(chain) >= 5, chain  # supervisor, door, process 1, shell, sleep
            index = {"supervisor": 0, "door": 1, "first": 2}
            (psutil.Process(runner.pid) if victim == "runner" else chain[index[victim]]).kill()
            deadline = time.monotonic() + 40
            while left := [each for each in chain if runs(each)]:
                assert time.monotonic() < deadline, left
                time.sleep(0.02)
        finally:
            runner.kill()


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to be someone else")
def test_an_unprivileged_user_has_the_same_sandbox() -> None:
    """It runs the system's Python, because a user without rights may not read this one."""
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("the system has no Python")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shutil.copy(Path(sandbox.__file__).parent / "namespaces.py", folder)
        line = "id -u; touch /usr/x || echo no; touch mine"
        *command, spec = Sandbox().wrap(["sh", "-c", line], directory=folder, cwd=None, env={}, urls=[])
        for path in Path(folder), *Path(folder).iterdir():
            path.chmod(0o777)
        someone = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
        command = [*someone, python, "-I", "-S", "-c", sandbox._ENTER, folder, spec]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.split()[:2] == ["65534", "no"], ended.stderr


async def test_sixty_four_at_a_time(store: InMemoryLightningStore) -> None:
    agent = ly.ProcessAgent(["sh", "-c", "echo $LEYDEN_ROLLOUT_ID"], sandbox="namespace")
    ran = await run_all(store, agent, range(64))
    assert [each.stdout.strip() for each in ran] == [each.attempt.rollout_id for each in ran]


def test_docker_gets_the_same_limits_on_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is not run here."""
    (program := tmp_path / "docker").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://d:1")
    (work := tmp_path / "a, b").mkdir()
    (work / ".git").mkdir()
    box = Sandbox(image="python:3.12", read={"/tests": str(tmp_path)}, hide=[".git"], max_processes=9, disk_bytes=2**20)
    line = box.wrap(
        ["pytest", "-q"], directory=str(tmp_path), cwd=str(work), env={"KEY": "secret", "PATH": "/x"},
        urls=["http://127.0.0.1:80"], memory_bytes=2**30,
    )  # fmt: skip
    assert not [each for each in line if "secret" in each]
    assert (tmp_path / "sandbox").read_text() == "KEY=secret\n"
    assert (tmp_path / "sandbox").stat().st_mode & 0o777 == 0o600
    assert line[-3:] == ["python:3.12", "pytest", "-q"]
    assert {
        "DOCKER_HOST=tcp://d:1", str(program), "--cap-drop=ALL", "--read-only", "--network=host", f"--workdir={work}",
        f'--mount=type=bind,"source={work}","target={work}"', f"--mount=type=bind,source={tmp_path},target=/tests,readonly",
        f'--mount=type=tmpfs,"target={work}/.git",tmpfs-size=4096,tmpfs-mode=0555', "--pids-limit=9", "--memory=1073741824",
        "--memory-swap=1073741824", "--ulimit=fsize=1048576", f"--user={os.getuid()}:{os.getgid()}",
    } <= set(line)  # fmt: skip
    assert "--network=none" in box.wrap(["true"], directory=str(tmp_path), cwd=None, env={}, urls=[])
    with pytest.raises(ConfigError, match="KEY has more than one line"):
        box.wrap(["true"], directory=str(tmp_path), cwd=None, env={"KEY": "a\nb"}, urls=[])


def test_without_docker_and_without_namespaces_the_error_names_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"docker, which is not in PATH.*'namespace'.*'none'"):
        ly.ProcessAgent(["true"], sandbox="docker")
    line = (
        "import leyden as ly, resource, ctypes\n"
        "assert not ctypes.CDLL(None).unshare(0x10000000)\n"  # in a user namespace without an identity nothing is allowed
        "ly.ProcessAgent(['true'], sandbox='namespace')"
    )
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "ConfigError" in ended.stderr
    for word in ("'namespace' does not work", "the kernel refuses|Operation not permitted", "'docker'", "'none'"):
        assert any(each in ended.stderr for each in word.split("|")), ended.stderr


def test_paths_and_kinds_are_checked() -> None:
    with pytest.raises(ConfigError, match="'none', 'namespace', 'docker'"):
        ly.ProcessAgent(["true"], sandbox=cast(Any, "chroot"))
    with pytest.raises(ConfigError, match="does not exist"):
        Sandbox(read=["/no/such/folder"])
    with pytest.raises(ConfigError, match="absolute"):
        Sandbox(write={"work": "/tmp"})
    for place in ("/", "/dev/shm", "/proc"):
        with pytest.raises(ConfigError, match="/proc, /sys, /dev"):
            Sandbox().wrap(["true"], directory="/tmp", cwd=place, env={}, urls=[])
        with pytest.raises(ConfigError, match="/proc, /sys, /dev"):
            Sandbox(write={place: "/tmp"})
    with pytest.raises(ConfigError, match="IPv4"):
        Sandbox().wrap(["true"], directory="/tmp", cwd=None, env={}, urls=["http://[2001:db8::1]:80"])
