# SPDX-License-Identifier: Apache-2.0
"""What the compiled files of a base wheel expect of the Python around them."""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tools.common.cli import Problems, ToolError, add_path
from tools.common.pin import Project
from tools.source.fetch import fetch
from tools.wheel.plan import PACKAGE, base_of

FRONT_END = f"{PACKAGE}/vllm-rs"
MESSAGES = Path(__file__).with_name("messages.py")
_COMPILED = re.compile(r"\.so(\.|$)|/vllm-rs$")
_MODULE = re.compile(rb"\bvllm(?:\.[a-z_][a-z_0-9]*)+")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    add_path(parser, "--checkpoint", "of a model, for its tokenizer", required=True)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Compare wheels with their base wheels, from the view of the compiled files that both have.
    Calls of compiled operators have the shapes that the release's calls have. Modules that compiled
    files name are there. Messages to and from the compiled front end are the same bytes, and it
    gives the same answers. This Python must have what vLLM's messages need."""
    for path in arguments.wheels:
        base = base_of(project.pin, path.name, project.release)
        print(f"checked: {check_wheel(fetch(base.file, project), path, arguments.checkpoint)}")


def check_wheel(base: Path, path: Path, checkpoint: Path) -> str:
    """Compare a wheel with its base wheel; what was checked."""
    with ZipFile(base) as old, ZipFile(path) as new, tempfile.TemporaryDirectory() as folder:
        compiled = [name for name in old.namelist() if _COMPILED.search(name)]
        before, after = (
            {n: wheel.read(n) for n in wheel.namelist() if n.endswith(".py")}
            for wheel in (old, new)
        )
        problems = [*compare_calls(before, after)]
        for name in compiled:
            problems += missing_modules(name, old.read(name), before, after)
        what = f"{len(compiled)} compiled files"
        if FRONT_END in compiled:
            places = [Path(folder) / name for name in ("release", "patched")]
            for wheel, place in zip((old, new), places, strict=True):
                names = [name for name in wheel.namelist() if not name.endswith(".so")]
                wheel.extractall(place, names)
            program = places[0] / FRONT_END
            program.chmod(0o755)
            problems += compare_messages(*places)
            given = "serve", str(program), str(checkpoint.resolve())
            answers = [json.loads(speak(place, *given)) for place in places]
            if answers[0] != answers[1]:
                problems.append(ToolError("answers differ", FRONT_END, *answers))
            what += "; vllm-rs answers as with the release"
    if problems:
        raise Problems(f"{path.name} does not fit its compiled files", problems=problems)
    return f"{path.name}: {what}"


def speak(place: Path, *arguments: str, given: str = "") -> str:
    """Run `messages.py` with the vLLM in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(place), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    command = [sys.executable, "-P", str(MESSAGES), *arguments]
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ToolError("messages cannot be made", place, found=done.stderr[-2000:])
    return done.stdout


def compare_messages(release: Path, patched: Path) -> Iterator[ToolError]:
    """How messages without rows change if the patched Python decodes and encodes them."""
    written = speak(release, "write")
    expected, found = json.loads(written), json.loads(speak(patched, "read", given=written))
    for name, frames in expected.items():
        if found[name] != frames:
            old, new = ("".join(digits)[:200] for digits in (frames, found[name]))
            yield ToolError("a message has other bytes", name, old, new)


def missing_modules(
    name: str, data: bytes, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[ToolError]:
    """Modules of the release that a compiled file names, and that are no longer there."""
    for module in sorted(set(_MODULE.findall(data))):
        path = module.decode().replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in before and file not in after:
                yield ToolError("a compiled file names a module", file, "this module", "nothing")


def compare_calls(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[ToolError]:
    """Calls of compiled operators that no file of the release makes in this way."""
    known = {call for data in before.values() for call in operator_calls(data)}
    for name, data in after.items():
        for call in operator_calls(data) - known if data != before.get(name) else ():
            what = "a call of an operator that the release does not make"
            yield ToolError(what, name, found=call)


def operator_calls(source: bytes) -> set[tuple[str, int, tuple[str | None, ...]]]:
    """Operators of compiled files: name, count of positional arguments, names of the others."""
    if b"torch.ops." not in source:
        return set()
    return {
        (found[1], len(node.args), tuple(keyword.arg for keyword in node.keywords))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        # Python registers the operators in torch.ops.vllm.
        if (found := re.fullmatch(r"torch\.ops\.((?!vllm\.)\w+\.\w+).*", ast.unparse(node.func)))
    }
