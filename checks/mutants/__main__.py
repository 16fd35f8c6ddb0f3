# SPDX-License-Identifier: Apache-2.0
"""`make mutants`: break the scheduler-side code in named ways; the property test must notice each.

    python -m checks.mutants [WORDS ...]    only mutants whose name has one of these words

Each line has a table of mutants (`--on`).
Works on a copy of the Python files of the vLLM that is installed, or of another one (`--package`).
Nothing of the environment changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from checks.mutants import EXAMPLES, Mutant, v0_20_2, v0_33_0
from harness.lines import installed as line_of_vllm
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series

ROOT = Path(__file__).parents[2]

# By line: its mutants, and its property tests.
LINES = {
    "v0.20.2": (v0_20_2.MUTANTS, ["tests/v0_20_2"]),
    "v0.33.0": (
        v0_33_0.MUTANTS,
        [
            "tests/v0_33_0/test_connector.py",
            "tests/v0_33_0/test_forced_scheduling.py",
            "tests/v0_33_0/test_expert_weights.py",
        ],
    ),
}


def examples_to_notice(mutant: Mutant, installed: Path, tests: list[str]) -> int | None:
    """How many examples of each setup the property tests need to fail with the mutant in the vLLM
    package `installed`. None if it passes with all."""
    original = (installed / mutant.file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        # The distribution's metadata tells vLLM its platform and is found beside the original.
        package = Path(folder) / "vllm"
        shutil.copytree(installed, package, copy_function=os.symlink)
        mutated = package / mutant.file
        mutated.unlink()
        mutated.write_text(original.replace(mutant.before, mutant.after))
        return next((n for n in mutant.examples if not passes(mutant, folder, tests, n)), None)


def passes(mutant: Mutant, folder: str, tests: list[str], examples: int) -> bool:
    """Whether the tests that should notice the mutant pass with the package in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # Slow tests would take hours. Those of engines are marked as slow too.
    command += ["-m", "" if mutant.engines else "not slow"]
    if mutant.engines:
        tests = [mutant.engines]
    done = subprocess.run(
        [*command, "--hypothesis-profile=unshrunk", "-k", mutant.setups, *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PROPERTY_EXAMPLES": str(examples),
        },
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"mutant '{mutant.name}': pytest failed\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def record(line: str, mutants: list[Mutant], found: dict[str, int | None]) -> str:
    """A table of how many examples noticed each mutant, as Markdown."""
    project = Project(ROOT, line)
    of = fingerprint(read_series(project.series_file), project.pin)[:16]
    noticed = sum(examples is not None for examples in found.values())
    lines = [
        "# Mutants of the scheduler-side code",
        "",
        f"Series: {line} `{of}`.",
        "",
        f"The property test notices {noticed} of {len(mutants)}. Each is tried with {EXAMPLES[0]} "
        f"examples of every setup. If that does not notice it, {EXAMPLES[1]} are tried, or the "
        "number of the last column. `make mutants` writes this file.",
        "",
        "| Mutant | File | Examples |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {m.name} | `{m.file}` | {found[m.name] or 'survived'} |" for m in mutants]
    return "\n".join([*lines, ""])


def find_installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these")
    parser.add_argument(
        "--on", choices=LINES, default=line_of_vllm(), help="the line (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a table, as Markdown")
    parser.add_argument(
        "--package",
        type=Path,
        metavar="FOLDER",
        help="a folder `vllm` of Python and compiled files (default: the installed one)",
    )
    arguments = parser.parse_args()
    words = arguments.words
    of_line, tests = LINES[arguments.on]
    mutants = [m for m in of_line if not words or any(word in m.name for word in words)]
    if not mutants:
        names = ", ".join(mutant.name for mutant in of_line)
        parser.error(f"no mutant's name has {' or '.join(words)}; there are: {names}")
    console = Console()
    installed = arguments.package.absolute() if arguments.package else find_installed()
    for mutant in mutants:
        if (count := (installed / mutant.file).read_text().count(mutant.before)) != 1:
            raise SystemExit(
                f"mutant '{mutant.name}': {mutant.file} has its line {count} times, expected "
                f"once; mend the table of {arguments.on}"
            )
    if not passes(Mutant("none", "", "", ""), str(installed.parent), tests, EXAMPLES[0]):
        raise SystemExit("the property test fails without a mutant; mend that first")
    found: dict[str, int | None] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool, console.status("") as status:
        running = {
            pool.submit(examples_to_notice, mutant, installed, tests): mutant for mutant in mutants
        }
        for count, future in enumerate(as_completed(running), 1):
            name = running[future].name
            if future.exception():
                pool.shutdown(wait=False, cancel_futures=True)
            found[name] = future.result()
            console.print(f"{'noticed ' if found[name] else 'SURVIVED':8}  {name}")
            status.update(f"{count} of {len(mutants)}")
    if arguments.out:
        arguments.out.write_text(record(arguments.on, mutants, found))
    survivors = [name for name, examples in found.items() if examples is None]
    if survivors:
        console.print(
            f"{len(survivors)} of {len(mutants)} mutants survived: {', '.join(survivors)}"
        )
        return 1
    console.print(f"all {len(mutants)} mutants noticed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
