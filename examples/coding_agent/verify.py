"""Run the tests beside this file, and write the reward: 1 if as many tests pass as pass on the original.

The number decides, not the exit code, because code under test can end the process with 0 before a test has run. pytest is
not looked for in the package's folder, where the agent could have written another one.
"""

import argparse
import contextlib
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--app", type=Path, default=Path("/app"), help="the folder of the package")
    parser.add_argument("--report", type=Path, help="write pytest's report here, and no reward")
    parser.add_argument("--seconds", type=float, default=5.0, help="how many CPU seconds the tests may take")
    given = parser.parse_args()
    report = given.report or Path("/tmp/report.xml")
    # the folder is appended, so that none of its modules hides one of Python's
    start = (
        "import resource, sys, pytest; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); "
        f"resource.setrlimit(resource.RLIMIT_CPU, ({math.ceil(given.seconds)},) * 2); "
        f"sys.path.append({str(given.app)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-c", os.devnull, "--rootdir", HERE, "-p", "no:cacheprovider", f"--junitxml={report}", HERE]
    if given.report:
        options.append("--maxfail=3")
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-P", "-B", "-c", start, *map(str, options)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=HERE, env=env, timeout=60 * given.seconds, check=False)
    if given.report:
        return
    suite = next(ElementTree.parse(report).iter("testsuite")).attrib if report.exists() else {}
    counts = [int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")]
    passed = counts[0] - sum(counts[1:])
    right = passed == int((HERE / "expected").read_text()) and counts[1] == counts[2] == 0
    Path("/logs/verifier/reward.txt").write_text(str(int(right)))


if __name__ == "__main__":
    main()
