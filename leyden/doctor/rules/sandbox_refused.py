"""A sandbox could not be built, or ended its program at a limit."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "sandbox-refused",
    Kind(
        pattern=r"sandbox could not be built|does not work on this machine|needs the program docker|Docker failed"
        r"|the kernel refuses|cannot be shown or hidden",
        cause="this machine refuses the agent's sandbox",
        remedy="Let users make namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0), "
        "use sandbox='docker', or sandbox='none' for programs that you trust.",
    ),
    Kind(
        pattern=r"exceeded a limit of its sandbox|\[Errno 27\] File too large",
        cause="the agent's program exceeds a limit of its sandbox",
        remedy="Raise disk_bytes, max_processes, cpu_seconds or memory_bytes of the Sandbox, or let the program need less.",
    ),
    explains=("missing-package", "harness"),
)
