# SPDX-License-Identifier: Apache-2.0
"""Runs one file of vLLM's tests in a process of its own, and reads the result of each test."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.process import KEEPER
from tools.upstream.hubcache import make_hub

LIMIT_S = 600
# Stands for the tests of a file that gave no results.
WHOLE_FILE = "(the whole file)"

# vLLM collects garbage after each test. The collector skips objects from before the first test:
# on a CPU, the search through them takes most of the time of vLLM's tests.
_PYTEST = """
import gc, pytest, sys
class KeepWhatWasImported:
    def pytest_collection_finish(self):
        gc.freeze()
        gc.unfreeze = lambda: None
sys.exit(pytest.main(sys.argv[1:], [KeepWhatWasImported()]))
"""
PASSED = "passed"
FAILED = "failed"
ERROR = "error"
SKIPPED = "skipped"

# What a test says that cannot pass on a machine without a GPU, or without a network.
CANNOT_RUN = re.compile(
    r"LocalEntryNotFound|OfflineModeIsEnabled|offline mode|outgoing traffic has been disabled"
    r"|couldn't connect to|Invalid repository ID"
    r"|NVIDIA driver|CUDA-capable|not compiled with CUDA|CUDA error|CUDA is not available"
    r"|No CUDA GPUs|num_compute_units|ProcessGroupNCCL"
)


class Outcome(NamedTuple):
    """Result of one test: a status, and the message of a failure or a skip."""

    status: str
    message: str = ""

    @property
    def bad(self) -> bool:
        return self.status in (FAILED, ERROR)

    @property
    def reason(self) -> str:
        """How the message begins, without what differs from run to run."""
        text = " ".join(line.strip() for line in self.message.strip().splitlines()[:3])
        text = re.sub(r"0x[0-9a-f]+", "0x…", text)
        # Which of several ended processes was seen first.
        text = re.sub(r"(core proc\(s\)): \{.*?\}", r"\1: …", text)
        text = re.sub(r"(/[\w.@+-]+){2,}", "…", text)
        return re.sub(r"\d+", "#", text)[:200].strip()

    @property
    def cannot_run(self) -> bool:
        """Whether the test failed because this machine lacks something."""
        return self.bad and bool(CANNOT_RUN.search(self.message))

    def is_like(self, other: "Outcome | None") -> bool:
        """Whether another run of the test ended in the same way."""
        return other is not None and (self.status, self.reason) == (other.status, other.reason)


Results = dict[str, Outcome]


def is_test_file(path: str) -> bool:
    return Path(path).match("test_*.py")


def test_environment(build: Path, **more: str) -> dict[str, str]:
    """The environment of vLLM's tests: the stand-ins are the hub, and nothing goes out."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    programs = Path(sys.executable).parent  # `vllm serve`
    return kept | {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HF_HOME": str(make_hub(build / "hub")),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; its default is half of the memory
        **more,
    }


def run_file(file: str, tree: Path, environment: Mapping[str, str], results: Path) -> Results:
    """Run one test file of ``tree``, or read what an earlier run left at ``results``.

    The results are JUnit XML; the output goes beside it, as ``.log``. An interrupted run leaves no
    results. After ``LIMIT_S`` seconds the process and all it started are ended. Where ``tree``
    holds a ``vllm/``, that is the package that is tested.
    """
    if results.is_file():
        return read_results(results)
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".run-", dir=results.parent) as scratch:
        report = Path(scratch) / "junit.xml"
        pytest = [sys.executable, "-c", _PYTEST, file, "-q", "--rootdir=."]
        pytest += ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        pytest += [f"--timeout={LIMIT_S // 2}", "--timeout-method=signal"]
        with results.with_suffix(".log").open("wb") as log:
            end = _run_kept(pytest, cwd=tree, env=environment, stdout=log, stderr=log)
        if end not in (0, 1) or not report.is_file():  # crashed, hung, or could not be collected
            how = f"after {LIMIT_S} s, the limit" if end is None else f"with status {end}"
            message = f"ended {how}"
            if report.is_file():  # pytest's own words for what it could not collect
                bad = [outcome.message for outcome in read_results(report).values() if outcome.bad]
                message = "\n".join([*bad, message])
            case = ET.Element("testcase", classname=file, name=WHOLE_FILE)
            ET.SubElement(case, "error", message=message)
            ET.ElementTree(case).write(report, encoding="utf-8", xml_declaration=True)
        report.replace(results)
    return read_results(results)


def _run_kept(command: list[str], **options: Any) -> int | None:
    """The exit status of a command; None if it ran into its limit."""
    kept = [sys.executable, str(KEEPER), *command]
    # Leaving this block closes the keeper's input: it ends what is left.
    with subprocess.Popen(kept, stdin=subprocess.PIPE, **options) as run:
        try:
            return run.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None


def read_results(path: Path) -> Results:
    """What a JUnit XML file says of each test, by ``class::name``."""
    results: Results = {}
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = Outcome(PASSED)
        for status, tag in ((SKIPPED, "skipped"), (FAILED, "failure"), (ERROR, "error")):
            for told in case.iter(tag):
                message = told.get("message") or ""
                if message == "collection failure":
                    message = (told.text or "").strip().rpartition("\nE   ")[2]
                outcome = Outcome(status, message)
        if name not in results or not results[name].bad:
            # A test that failed and whose teardown failed too stands there twice.
            results[name] = outcome
    return results
