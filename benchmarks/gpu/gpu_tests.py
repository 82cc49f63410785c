"""Run the tests of the group `gpu` and count what came of them: `failures` has the names of those that did not pass."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from common import ROOT, Measurement, main


def measure(measurement: Measurement) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = measurement.out("gpu_tests.xml") or Path(folder) / "gpu_tests.xml"
        some = (
            ["tests/gpu/test_engine_on_cuda.py", "-k", "checkpoint or deterministic"]
            if measurement.cpu
            else ["tests/gpu"]
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *some,
        ]
        paths = [str(ROOT), str(ROOT / "packages" / "leyden-compat"), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "LEYDEN_TEST_DEVICE": measurement.device, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, check=False)
        print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr, flush=True)
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    measurement.figures |= {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    measurement.figures["seconds"] = float(suite.get("time", 0))
    measurement.figures["not_passed"] = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


if __name__ == "__main__":
    main(__file__, __doc__, measure)
