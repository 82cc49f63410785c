"""Run one program in Linux namespaces: private files, processes and network. Nothing of it is left at its end.

It is a program, started by the command that `Sandbox.wrap` returns. It imports only the standard library, and little of
that, because each attempt pays for its start. There are three processes: the *door*, outside, which relays connections
and watches limits; process 1, inside, which builds the root, starts the program and collects orphans; and the program.
The kernel ends all that is inside when process 1 ends, and process 1 ends with the door: whichever process of this
chain is killed, none is left.

Network: process 1 listens inside on the addresses that are allowed, and passes these sockets to the door. A socket
stays in the network where it was made: the door accepts connections from inside, and relays each to the real address
outside. No process inside is needed for it, so the program cannot stop or change it.

It needs Linux 5.12 (`mount_setattr`) with user namespaces. Where the kernel refuses something, it ends with `REFUSED`
and a line that says what.
"""

# ruff: noqa: PTH101, PTH106, PTH108, PTH114, PTH102, PTH103, PTH110, PTH112, PTH115, PTH116, PTH120, PTH123, PTH208, PTH211 -- as in supervisor.py

from __future__ import annotations

import _socket as socket
import ctypes
import errno
import fcntl
import marshal
import os
import resource
import select
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time it would add to the time of its start
    import signal
    from typing import Any, NoReturn
else:  # `signal` and `socket` make enums of their numbers, which takes longer than to build the sandbox
    import _signal as signal

REFUSED, LIMITED = 62, 63
"""The signals by which the door ends if the sandbox could not be built, and after a limit was exceeded; standard error
says why. No exit code is free for it, because a program may end with any."""
REASON = "leyden sandbox: "
"""How the line on standard error begins that says why the sandbox was not built, or the program was ended."""

_NOT_BUILT = 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_DETACH = 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
_AT_RECURSIVE = 0x8000
_READ_ONLY, _ATTR_NO_SUID, _ATTR_NO_DEVICES = 0x1, 0x2, 0x4
_PARENT_DEATH_SIGNAL, _DUMPABLE, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES = 1, 4, 24, 38  # PR_SET_PDEATHSIG, ...
_SECCOMP = 22
_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS = 0x8913, 0x8914, 0x8916  # SIOCGIFFLAGS, ...

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives", "bash.bashrc", "group", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias",
    "localtime", "login.defs", "magic", "mime.types", "nsswitch.conf", "os-release", "passwd", "pki", "profile", "protocols",
    "python3", "services", "shells", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""What the program sees of /etc: nothing that holds a secret."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PROC = ("cgroups", "cpuinfo", "devices", "filesystems", "loadavg", "meminfo", "stat", "swaps", "sysvipc", "uptime", "version",
         "vmstat")  # fmt: skip
"""What the program sees of /proc beside its processes and, read-only, /proc/sys. The rest tells of the machine or
changes it: root may read and write much there without a capability."""
_X86 = os.uname().machine == "x86_64"
_SYSTEM_CALLS = {
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),  # keys of this user, outside too
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    "syslog": (103, 116), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),  # opens sockets unseen
}  # fmt: skip
"""The system calls that the program does not have: their numbers on x86-64 and on AArch64."""
_SOCKET, _IOCTL, _ARCHITECTURE = (41, 16, 0xC000003E) if _X86 else (198, 29, 0xC00000B7)
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
"""The kinds of socket that the program has. Others, as of a virtual machine's host, are in no network namespace."""
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SMALLEST_FILE = 4096
"""The bytes that each file counts at least, because a file system may also run out of files."""
_TOO_DEEP = 2**62
"""The size of a folder in which paths are longer than the system reads."""
_WATCH_SECONDS = 0.5
"""Seconds between two checks of processes, CPU time and the size of the writable folders."""


class _Refused(Exception):
    """The kernel refuses a part of the sandbox."""


def main(spec_path: str) -> NoReturn:
    """Run the program that the file describes (`Sandbox.wrap`), and end as it ends."""
    with open(spec_path, "rb") as file:
        spec: dict[str, Any] = marshal.load(file)
    os.unlink(spec_path)
    supervisor = os.getppid()
    ours, theirs = socket.socketpair()
    uid, gid = os.geteuid(), os.getegid()
    limits = {"memory": spec["memory_bytes"], "pids": None if uid or _own_process_limit() else spec["max_processes"]}
    groups = _groups(limits) if any(limits.values()) else []
    entries = [os.open(f"{folder}/cgroup.procs", os.O_WRONLY) for folder in groups]  # this user namespace may open them
    if groups:
        _remove_later(groups)
    try:
        _check(_LIBC.unshare(_NEW_USER | _NEW_PROCESSES), "user and process namespaces")
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            _write(f"/proc/self/{name}", text)
        _die_with(supervisor)
        first = os.fork()
    except (_Refused, OSError) as error:
        _explain(error)
        _end_by(REFUSED)
    if not first:
        ours.close()
        try:
            _be_first(spec, theirs)
        except (_Refused, OSError) as error:
            _explain(error)
        finally:
            os._exit(_NOT_BUILT)
    theirs.close()
    try:
        for entry in entries:
            os.write(entry, str(first).encode())
    except OSError as error:
        os.kill(first, signal.SIGKILL)
        _explain(f"the kernel refuses to limit memory or processes: {error}")
        _end_by(REFUSED)
    status = _run_door(spec, first, ours, groups)
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    _end_by(os.WTERMSIG(status))


# ---- outside: the door -------------------------------------------------------------------------------------------


def _run_door(spec: dict[str, Any], first: int, inside: socket.socket, groups: list[str]) -> int:
    """Relay connections and watch limits until process 1 ends. Return the program's status, as `wait` gives it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the program decides what it does about them
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    relay = _Relay()
    before = {path: _size(path) for path in spec["write"].values() if spec["disk_bytes"] is not None}
    if spec["addresses"]:
        _, passed, _, _ = inside.recvmsg(1, socket.CMSG_LEN(4 * len(spec["addresses"])))
        fds = [fd for _, _, data in passed for (fd,) in struct.iter_unpack("i", data)]
        for fd, address in zip(fds, spec["addresses"], strict=False):  # none if process 1 was not built
            relay.listen(socket.socket(fileno=fd), address)
    try:
        inside.send(b"x")
    except OSError:  # process 1 has ended already
        pass
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _noted)
    relay.poll.register(ended, select.POLLIN)
    check_at = time.monotonic() + _WATCH_SECONDS
    while True:
        pid, status = os.waitpid(first, os.WNOHANG)
        if pid:
            break
        relay.run(max(0.0, check_at - time.monotonic()))
        if time.monotonic() >= check_at:
            began = time.monotonic()
            exceeded = _exceeded(spec, first, before, groups)
            check_at = time.monotonic() + max(_WATCH_SECONDS, 20 * (time.monotonic() - began))
            if exceeded:
                _explain(exceeded)
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
                return LIMITED
    if exceeded := _out_of_memory(spec, groups):
        _explain(exceeded)
        return LIMITED
    try:
        told = inside.recv(4, socket.MSG_DONTWAIT)
    except OSError:  # process 1 ended before it took what was sent, or somebody killed it
        told = b""
    if not told:
        return REFUSED if os.WIFEXITED(status) else status
    (ended_with,) = struct.unpack("=i", told)
    if os.WIFSIGNALED(ended_with) and os.WTERMSIG(ended_with) in (REFUSED, LIMITED):
        return 128 + os.WTERMSIG(ended_with) << 8  # as a shell tells it
    return ended_with


class _Relay:
    """Connections from inside, each joined with one to the address outside. One thread, because a process that made a
    process namespace can start no other.
    """

    def __init__(self) -> None:
        self.poll = select.poll()
        self._sockets: dict[int, Any] = {}
        self._outside: dict[int, tuple[int, Any]] = {}
        """The family and the address, outside, of each listening socket's server."""
        self._peers: dict[int, int] = {}
        self._unsent: dict[int, bytes] = {}
        """What each connection's peer has sent it and it has not yet taken. A peer is not read before it has."""
        self._at_end: set[int] = set()
        """Connections that have sent all they will."""

    def listen(self, listener: socket.socket, address: tuple[str, int]) -> None:
        try:
            family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        except OSError:
            return  # nothing answers inside, either
        self._sockets[listener.fileno()], self._outside[listener.fileno()] = listener, (family, resolved)
        self.poll.register(listener, select.POLLIN)

    def run(self, seconds: float) -> None:
        """Wait for events, at most `seconds`, and handle them."""
        for fd, event in self.poll.poll(seconds * 1000):
            if fd in self._outside:
                try:
                    self._connect(socket.socket(fileno=self._sockets[fd]._accept()[0]), *self._outside[fd])
                except OSError:  # too many connections; it waits until one ends
                    time.sleep(0.01)
            elif fd in self._peers:
                try:
                    if event & (select.POLLOUT | select.POLLERR):
                        self._send(fd)
                    if (
                        event & (select.POLLIN | select.POLLHUP)
                        and fd in self._peers
                        and not self._unsent[self._peers[fd]]
                    ):
                        self._receive(fd)
                except OSError:
                    self._close(fd)

    def _connect(self, inner: socket.socket, family: int, address: Any) -> None:
        outer = socket.socket(family, socket.SOCK_STREAM)
        outer.setblocking(False)  # a server that does not answer holds up no other connection
        if outer.connect_ex(address) not in (0, errno.EINPROGRESS):
            outer.close()
            inner.close()  # as if nothing listened
            return
        for each, peer in (inner, outer), (outer, inner):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
            self._sockets[each.fileno()], self._peers[each.fileno()], self._unsent[each.fileno()] = (
                each,
                peer.fileno(),
                b"",
            )
            self.poll.register(each, select.POLLIN)

    def _receive(self, fd: int) -> None:
        peer = self._peers[fd]
        data = self._sockets[fd].recv(2**16)
        self._unsent[peer] = data
        if not data:
            self._at_end.add(fd)
            if peer in self._at_end:
                self._close(fd)
                return
            self._sockets[peer].shutdown(socket.SHUT_WR)
            self._watch(fd)
        self._send(peer)

    def _send(self, fd: int) -> None:
        """Send what a connection has not taken. Read from its peer again once nothing is left."""
        data = self._unsent[fd]
        if data:
            try:
                self._unsent[fd] = data[self._sockets[fd].send(data) :]
            except BlockingIOError:
                pass
        self._watch(fd)
        self._watch(self._peers[fd])

    def _watch(self, fd: int) -> None:
        """Wait for what a connection can do next."""
        reads = fd not in self._at_end and not self._unsent[self._peers[fd]]
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if self._unsent[fd] else 0)
        if events:
            self.poll.register(fd, events)
        else:  # a connection that is ended would wake this process again and again
            try:
                self.poll.unregister(fd)
            except KeyError:
                pass

    def _close(self, fd: int) -> None:
        for each in fd, self._peers[fd]:
            try:
                self.poll.unregister(each)
            except KeyError:
                pass
            self._sockets.pop(each).close()
            del self._peers[each], self._unsent[each]
            self._at_end.discard(each)


def _noted(number: int, frame: object) -> None:
    """Handle SIGCHLD by doing nothing: the pipe reports it."""


def _own_process_limit() -> bool:
    """Return whether the kernel has `pid_max` in each process namespace, which holds for root too."""
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14)


def _groups(limits: dict[str, int | None], root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> list[str]:
    """Make control groups for limits (`memory`, `pids`) where this user may: in version 1 in this process's own group,
    in version 2 beside it, because there only a group without processes has groups. Return their folders.
    """
    made: list[str] = []
    with open(own) as lines:
        paths = {
            name: line.rstrip("\n").split(":", 2)[2] for line in lines for name in line.split(":", 2)[1].split(",")
        }
    for kind, most in limits.items():
        if most is None:
            continue
        parent, values = f"{root}/{kind}{paths.get(kind, '')}", {f"{kind}.max": str(most)}
        if kind not in paths:
            parent = os.path.dirname(f"{root}{paths.get('', '/')}".rstrip("/"))
            values |= {"memory.swap.max": "0", "memory.oom.group": "1"} if kind == "memory" else {}
        elif kind == "memory":
            values = {"memory.limit_in_bytes": str(most)}
        folder = f"{parent}/leyden-{os.getpid()}"
        try:
            if kind not in paths:
                with open(f"{parent}/cgroup.subtree_control") as file:
                    if kind not in file.read().split() or not os.access(f"{parent}/cgroup.procs", os.W_OK):
                        continue
            for name in os.listdir(parent):  # what was left where all processes of a sandbox were killed
                if name.startswith("leyden-") and not os.path.exists(f"/proc/{name[7:]}"):
                    _removed(f"{parent}/{name}")
            if folder not in made:
                os.mkdir(folder)
                made.append(folder)
            for name, value in values.items():
                if os.path.exists(f"{folder}/{name}"):  # without swap there is no limit of it
                    _write(f"{folder}/{name}", value)
        except OSError:  # it is another user's, or read-only: the limit is sampled
            continue
    return made


def _remove_later(groups: list[str]) -> None:
    """Start a process that removes groups when this one has ended, however it ends. It has the rights to, which this
    process is about to lose.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return
    try:
        os.close(write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, read)  # who reads the output waits for its end
        os.closerange(read + 1, 256)
        os.read(read, 1)
        for _ in range(1000):  # until the kernel has ended what is in them
            groups = [folder for folder in groups if os.path.isdir(folder) and not _removed(folder)]
            if not groups:
                break
            time.sleep(0.005)
    finally:
        os._exit(0)


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def _out_of_memory(spec: dict[str, Any], groups: list[str]) -> str | None:
    for folder in groups:
        for name in ("memory.events", "memory.oom_control"):
            try:
                with open(f"{folder}/{name}") as file:
                    if any(line.startswith("oom_kill ") and int(line.split()[1]) for line in file):
                        return f"the program was ended: it needed more than memory_bytes={spec['memory_bytes']:,}"
            except OSError:
                continue
    return None


def _exceeded(spec: dict[str, Any], first: int, before: dict[str, int], groups: list[str]) -> str | None:
    """Return which limit is exceeded; None if none is.

    before: the sizes of the writable folders at the start.
    """
    if why := _out_of_memory(spec, groups):
        return why
    pids = _descendants(first)
    if (most := spec["max_processes"]) is not None and len(pids) > most:
        return f"the program was ended: it had {len(pids)} processes; max_processes={most}"
    if (most := spec["cpu_seconds"]) is not None and (used := sum(map(_cpu_seconds, (first, *pids)))) > most:
        return f"the program was ended: its processes used {used:.1f} seconds of CPU time; cpu_seconds={most}"
    if (most := spec["disk_bytes"]) is not None:
        for path, size in before.items():
            if (grown := _size(path) - size) > _TOO_DEEP // 2:
                return f"the program was ended: {path} holds a path that is longer than the system reads"
            elif grown > most:
                return f"the program was ended: {path} has grown by {grown:,} bytes; disk_bytes={most:,}"
        if (held := _deleted_bytes(pids)) > most:
            return f"the program was ended: it held {held:,} bytes in deleted files; disk_bytes={most:,}"
    return None


def _descendants(pid: int) -> list[int]:
    unread, found = [pid], list[int]()
    while unread:
        parent = unread.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as children:
                    unread += (each := list(map(int, children.read().split())))
                    found += each
        except OSError:  # it has just ended
            continue
    return found


def _cpu_seconds(pid: int) -> float:
    """Return what a process and its ended descendants have used."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _deleted_bytes(pids: list[int]) -> int:
    """Return the size of the files that processes hold open and that no folder has, as those in memory (memfd)."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                each = os.stat(f"/proc/{pid}/fd/{name}")
                if not each.st_nlink:
                    sizes[each.st_dev, each.st_ino] = each.st_blocks * 512
        except OSError:
            continue
    return sum(sizes.values())


def _size(path: str) -> int:
    """Return the bytes on disk of what a folder holds."""
    total, folders = 0, [path]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _SMALLEST_FILE)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return _TOO_DEEP
            continue  # deleted meanwhile
    return total


# ---- inside: process 1 -------------------------------------------------------------------------------------------


def _be_first(spec: dict[str, Any], door: socket.socket) -> None:
    """Build the sandbox, run the program in it, and end as it ends."""
    _die_with(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python would end at it
    _check(_LIBC.unshare(_NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME), "mount and network namespaces")
    _LIBC.sethostname(b"sandbox", 7)
    listeners = _network(spec["addresses"])
    if listeners:
        fds = struct.pack(f"{len(listeners)}i", *(each.fileno() for each in listeners))
        door.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    for each in listeners:
        each.close()
    _root(spec)
    _check(_LIBC.prctl(_DUMPABLE, 0, 0, 0, 0), "a process that cannot be read")
    if not door.recv(1):  # it comes when all limits hold, and not if the door ended before it could end this process
        return
    program = os.fork()
    if not program:
        _become(spec)
    while True:
        pid, status = os.wait()
        if pid == program:
            door.send(struct.pack("=i", status))
            os._exit(0)


def _network(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """Start the loopback interface and listen there on the addresses, whose hosts are names or IPv4 addresses."""
    any_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    flags = fcntl.ioctl(any_socket.fileno(), _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
    up = struct.unpack("16sh14x", flags)[1] | 1
    fcntl.ioctl(any_socket.fileno(), _SET_FLAGS, struct.pack("16sh14x", b"lo", up))
    listeners: list[socket.socket] = []
    for index, (host, port) in enumerate(addresses):
        inside = _inside(host)
        if not inside.startswith("127."):
            sockaddr = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(inside))
            fcntl.ioctl(any_socket.fileno(), _SET_ADDRESS, struct.pack("16s16s", b"lo:%d" % index, sockaddr))
        listeners.append(listener := socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind((inside, port))
        listener.listen(128)
    any_socket.close()
    return listeners


def _inside(host: str) -> str:
    """Return where a host is inside: at its own IPv4 address, or at loopback, to which its name leads there."""
    try:
        socket.inet_aton(host)
    except OSError:
        return "127.0.0.1"
    return host


def _root(spec: dict[str, Any]) -> None:
    """Build the root from the machine's own files and make it this process's root."""
    pages = None if spec["disk_bytes"] is None else spec["disk_bytes"] // 4096 + 1
    size = "" if pages is None else f"size={spec['disk_bytes']},nr_inodes={pages + 100}"
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")
    for name in ("old", "new", "scratch"):
        os.mkdir(f"/tmp/{name}")
    os.chdir("/tmp")
    _pivot(".", "old")
    _mount("tmpfs", "/new", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")
    _mount("tmpfs", "/scratch", "tmpfs", _NO_SUID | _NO_DEVICES, f"mode=755,{size}")
    for path in SYSTEM:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), f"/new{path}")
        elif os.path.isdir(f"/old{path}"):
            _bind(path, path, read_only=True)
    for name in _ETC:
        _bind(f"/etc/{name}", f"/etc/{name}", read_only=True)
    names = " ".join(host for host, _ in spec["addresses"] if _inside(host) != host)
    _write("/new/etc/hosts", f"127.0.0.1 localhost sandbox {names}\n::1 localhost\n", new=True)
    _write("/new/etc/resolv.conf", "", new=True)
    os.mkdir("/new/proc")
    for index, path in enumerate(("/tmp", "/var/tmp", "/dev/shm", "/run", spec["home"])):
        os.mkdir(f"/scratch/{index}")
        os.chmod(f"/scratch/{index}", 0o1777 if index < 3 else 0o755)
        os.makedirs(f"/new{path}")
        _mount(f"/scratch/{index}", f"/new{path}", None, _BIND)
    os.mkdir("/new/dev/pts")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"/dev/{name}", read_only=False)
    _mount("devpts", "/new/dev/pts", "devpts", _NO_SUID, "newinstance,ptmxmode=0666,mode=620")
    for name, target in ("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"), (
        "stderr", "/proc/self/fd/2",
    ):  # fmt: skip
        os.symlink(target, f"/new/dev/{name}")
    for inside, path in spec["read"].items():
        _bind(path, inside, read_only=True)
    for inside, path in spec["write"].items():
        _bind(path, inside, read_only=False)
    os.mkdir("/scratch/hidden", 0o555)
    for inside in spec["hide"]:
        target = _target(inside)
        if os.path.isdir(target):
            _mount("/scratch/hidden", target, None, _BIND)
            _set_attributes(target, _READ_ONLY)
        elif os.path.exists(target):
            _mount("/old/dev/null", target, None, _BIND)
    _mount("proc", "/new/proc", "proc", _NO_SUID | _NO_DEVICES)
    _write("/new/proc/sys/user/max_user_namespaces", "0")
    limits = {"kernel/pid_max": 301 + spec["max_processes"] if spec["max_processes"] else None, "kernel/shmall": pages}
    for path, most in limits.items():
        try:
            if most is not None:
                _write(f"/new/proc/sys/{path}", str(min(2**22, most)))
        except OSError:  # an older kernel; the door watches the number of processes
            pass
    for name in os.listdir("/new/proc"):
        place = f"/new/proc/{name}"
        if name == "sys":
            _mount(place, place, None, _BIND | _RECURSIVE)
            _set_attributes(place, _READ_ONLY)
        elif not (name in _PROC or name.isdigit() or os.path.islink(place)):
            _mount("/scratch/hidden" if os.path.isdir(place) else "/old/dev/null", place, None, _BIND)
    _set_attributes("/new", _READ_ONLY, deep=False)
    os.chdir("/new")
    _pivot(".", ".")
    _check(_LIBC.umount2(b".", _DETACH), "to leave the old root")
    os.chdir("/")


def _bind(path: str, inside: str, *, read_only: bool) -> None:
    """Show the machine's file or folder `path` as `inside`; nothing if there is none."""
    source, target = f"/old{path}", _target(inside)
    if os.path.islink(source) and os.readlink(source).startswith(SYSTEM):  # as /etc/localtime
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "", new=True)
    _mount(source, target, None, _BIND | _RECURSIVE)
    if not inside.startswith("/dev/"):
        _set_attributes(target, _ATTR_NO_SUID | _ATTR_NO_DEVICES | (_READ_ONLY if read_only else 0))


def _rules() -> bytes:
    """Return the filter of system calls, as the kernel's small machine reads it (seccomp, classic BPF)."""

    def load(offset: int) -> bytes:
        return struct.pack("=HBBI", 0x20, 0, 0, offset)

    def answer(error: int | None) -> bytes:
        return struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000 if error is None else 0x50000 | error)

    def if_equal(value: int, then: bytes) -> bytes:
        return struct.pack("=HBBI", 0x15, 0, len(then) // 8, value) + then

    # the number of the call stands at 0, the architecture at 4, the arguments at 16, 24, ...
    foreign = struct.pack("=HBBI", 0x15, 1, 0, _ARCHITECTURE) + answer(errno.ENOSYS)
    foreign += load(0) + struct.pack("=HBBI", 0x35, 0, 1, 0x40000000) + answer(errno.ENOSYS)  # x32
    refused = b"".join(if_equal(each[not _X86], answer(errno.EPERM)) for each in _SYSTEM_CALLS.values())
    families = b"".join(if_equal(each, answer(None)) for each in _FAMILIES) + answer(errno.EAFNOSUPPORT)
    terminal = b"".join(if_equal(each, answer(errno.EPERM)) for each in _TERMINAL_INPUT) + answer(None)
    sockets = if_equal(_SOCKET, load(16) + families) + if_equal(_IOCTL, load(24) + terminal)
    return load(4) + foreign + refused + sockets + answer(None)


def _target(inside: str) -> str:
    """Return where a path of the sandbox is while it is built. A link, left by a program, would lead out of it."""
    target = "/new"
    for part in inside.strip("/").split("/"):
        target += f"/{part}"
        if os.path.islink(target):
            raise _Refused(f"{inside} cannot be shown or hidden: {target[4:]} is a link")
    return target


def _become(spec: dict[str, Any]) -> NoReturn:
    """Execute the program, without capabilities, in this process."""
    command: list[str] = spec["command"]
    try:
        if os.geteuid() == 0:  # another user's program loses all capabilities by being executed
            for capability in range(64):
                _LIBC.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
        _check(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
        rules = ctypes.create_string_buffer(_rules())
        program = struct.pack("@HP", len(rules) // 8, ctypes.addressof(rules))
        _check(_LIBC.prctl(_SECCOMP, 2, program, 0, 0), "a filter of system calls")
        os.setsid()  # no terminal
        limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, spec["max_processes"]), (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
                  (resource.RLIMIT_CPU, spec["cpu_seconds"])]  # fmt: skip
        for kind, most in limits:
            if most is not None:
                resource.setrlimit(kind, (most, most))
        os.chdir(spec["cwd"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        places = (
            [""] if "/" in command[0] else [f"{place}/" for place in spec["env"].get("PATH", os.defpath).split(":")]
        )
        for place in places:
            if os.path.exists(f"{place}{command[0]}"):
                os.execve(f"{place}{command[0]}", command, spec["env"])
        raise FileNotFoundError(f"not found inside the sandbox, in {':'.join(places)}")
    except (_Refused, OSError, ValueError) as error:
        _explain(f"{command[0]!r} in {spec['cwd']!r}: {error}")
    finally:
        os._exit(127)


# ---- system calls --------------------------------------------------------------------------------------------


def _check(result: int, what: str) -> None:
    if result < 0:
        raise _Refused(f"the kernel refuses {what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if each is None else each.encode() for each in (source, target, kind)]
    _check(_LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"the mount of {source or ''} on {target}")


def _set_attributes(path: str, attributes: int, *, deep: bool = True) -> None:
    """Add attributes to a mount and, with `deep`, to all below it."""
    given = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if deep else 0
    result = _LIBC.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, given, ctypes.c_size_t(len(given)))
    _check(result, f"attributes of {path}")


def _pivot(root: str, old: str) -> None:
    _check(_LIBC.syscall(_PIVOT_ROOT, root.encode(), old.encode()), "another root")


def _die_with(parent: int) -> None:
    """Ask for SIGKILL when the parent ends; end at once if it has."""
    _LIBC.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_NOT_BUILT)


def _write(path: str, text: str, *, new: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | (os.O_CREAT if new else 0), 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _explain(why: object) -> None:
    os.write(2, f"{REASON}{why}\n".encode())


def _end_by(number: int) -> NoReturn:
    """End this process by a signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
