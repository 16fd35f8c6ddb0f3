# SPDX-License-Identifier: Apache-2.0
"""`make mutants`: break the scheduler-side code in named ways; the property test must notice each.

    python -m tests.property.mutants [WORDS ...]    only mutants whose name has one of these words

Each line has a table of mutants (`--on`): the first line's is here, the others are in own modules.
Works on a copy of the installed vLLM's Python files, so that nothing of the environment changes.
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

from tests.property import mutants_v0_33_0
from tests.property.mutant import EXAMPLES, Mutant

ROOT = Path(__file__).parents[2]
MANAGER = "v1/core/routed_experts_manager.py"
STORE = "v1/core/routed_experts_store.py"
ROWS = "v1/core/paged_rows.py"
DECODE = "v1/core/routed_experts_decode.py"
SCHEDULER = "v1/core/sched/scheduler.py"

MUTANTS = [
    Mutant(
        "finality off by one",
        MANAGER,
        "            num_final = request.num_tokens - 1\n",
        "            num_final = request.num_tokens\n",
    ),
    Mutant(
        "rows of rejected drafts handed out",
        MANAGER,
        "            ends[i] = min(ends[i], num_final)\n",
        "",
    ),
    Mutant(
        "hash key dropped",
        STORE,
        "make_block_hash_with_group_id(hashes[index], self.group_id)",
        "make_block_hash_with_group_id(hashes[0], self.group_id)",
    ),
    Mutant(
        "cap removed",
        MANAGER,
        "        return min(start, num_cached_tokens)\n",
        "        return num_cached_tokens\n",
    ),
    Mutant(
        "rows of void steps count",
        MANAGER,
        "        slots[self._void_step[slots] >= self._processed_step] = -1\n",
        "",
    ),
    Mutant(
        "steps in flight count after a failed load",
        MANAGER,
        "        self._rows.truncate(slot, end)\n        self._void_step[slot] = self._step\n",
        "        self._rows.truncate(slot, end)\n",
    ),
    Mutant(
        "rows of a former slot lost",
        MANAGER,
        "                        slots[indices[req_id]] = slot\n",
        "                        pass\n",
    ),
    Mutant(
        "store survives a reset",
        MANAGER,
        "            self.store.clear()\n\n    # Scheduler.update",
        "            pass\n\n    # Scheduler.update",
    ),
    Mutant(
        "evicted blocks stay in the store",
        STORE,
        "            self._remove(key)\n        return True\n",
        "            pass\n        return True\n",
    ),
    Mutant(
        "handed out rows sent again",
        ROWS,
        "        self.start[slots] = starts\n",
        "",
    ),
    Mutant(
        "rows of a preempted request forgotten at once",
        MANAGER,
        "            if last_step <= self._processed_step:\n",
        "            if True:\n",
    ),
    Mutant(
        "rows of a preempted request's steps lost for those that share them",
        MANAGER,
        "        if self._step > self._processed_step and self._get_expected(slot):\n",
        "        if False:\n",
    ),
    Mutant(
        "blocks of a preempted request counted on",
        MANAGER,
        "            self._discard_expected(slot)\n            # A step in flight",
        "            # A step in flight",
    ),
    Mutant(
        "slot kept after a preemption",
        MANAGER,
        "        self._leave(request.request_id)\n        return self._add_slot(request, start)\n",
        "        return self._get_slot(request)\n",
    ),
    Mutant(
        "steps before a resumption count",
        SCHEDULER,
        "if scheduler_output.step < request.first_valid_step:",
        "if False:",
    ),
    Mutant(
        "finished request not freed",
        SCHEDULER,
        "        self.routed_experts_manager.free(request)\n",
        "",
    ),
    Mutant(
        "rows of received blocks expected",
        MANAGER,
        "            and index * self._rows.page_size >= num_received\n",
        "",
    ),
    Mutant(
        "external KV taken unasked",
        MANAGER,
        'return isinstance(params, dict) and bool(params.get("do_remote_prefill"))',
        "return True",
    ),
    Mutant(
        "rows counted on that a failed load does not bring",
        MANAGER,
        "if self._rows.has_any(self._slots.get(req_id), lost)",
        "if False",
    ),
    Mutant(
        "blocks behind a failed load used",
        SCHEDULER,
        "if not (block_id in invalid_block_ids or block_id in blocks_to_evict):",
        "if block_id not in invalid_block_ids:",
        setups="failed",
        examples=(1500, 6000),
    ),
    Mutant(
        "client without rows treated like others",
        MANAGER,
        "        if len(slots) == 0:\n            return\n",
        "",
    ),
    Mutant(
        "positions of a decode run stand still",
        DECODE,
        "                slices=of.slices + self.num_steps * NEXT_SLICES,\n",
        "                slices=of.slices + NEXT_SLICES,\n",
    ),
    Mutant(
        "rows of a decode run in no page",
        DECODE,
        "            rows.write(self._slots, starts, counts, self._waiting.take())\n",
        "            self._waiting.take()\n",
    ),
    Mutant(
        "decode run outlasts a request",
        MANAGER,
        "        self._end_run()\n        if (slot := self._slots.get(req_id)) < 0:\n",
        "        if (slot := self._slots.get(req_id)) < 0:\n",
    ),
    Mutant(
        "rows of others kept in the step",
        MANAGER,
        "            rows = rows[spans(offsets[chosen], counts[chosen])[1]]\n",
        "            rows = rows[: counts[chosen].sum()]\n",
    ),
    Mutant(
        "slot keeps the position of another request",
        ROWS,
        "        self.start[slot] = start\n",
        "        self.start[slot] = max(start, self.start[slot])\n",
    ),
    Mutant(
        "page dropped before its block is stored",
        MANAGER,
        "                self.store.flush()\n            if len(self._slots) > 0 and",
        "                pass\n            if len(self._slots) > 0 and",
    ),
    Mutant(
        "handed out pages never dropped",
        ROWS,
        "        self._first[slots] = lasts\n        self.release(pages[pages != _NO_PAGE])\n",
        "        self._first[slots] = lasts\n",
    ),
    Mutant(
        "shared page not counted",
        ROWS,
        "        table[:] = pages\n        self._references[pages] += 1\n",
        "        table[:] = pages\n",
    ),
    Mutant(
        "page of the store not counted",
        ROWS,
        "        self._references[pages] += 1\n        return pages\n",
        "        return pages\n",
    ),
    Mutant(
        "first rows of a shared page left out",
        ROWS,
        "        np.minimum.at(part_begins, parts, begins)\n",
        "        part_begins[:] = begins[chosen]\n",
    ),
    Mutant(
        "slice goes on in another array",
        ROWS,
        "        follows &= ~np.isin(offsets[1:], cuts)\n",
        "",
    ),
]


# By line: its mutants, and its property test.
LINES = {
    "v0.20.2": (MUTANTS, "tests/property"),
    "v0.33.0": (mutants_v0_33_0.MUTANTS, "tests/v0.33.0/test_connector.py"),
}


def examples_to_notice(mutant: Mutant, installed: Path, test: str) -> int | None:
    """How many examples of each setup the property test needs to fail with the mutant in the vLLM
    package `installed`. None if it passes with all."""
    original = (installed / mutant.file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        # The distribution's metadata tells vLLM its platform and is found beside the original.
        package = Path(folder) / "vllm"
        shutil.copytree(installed, package, copy_function=os.symlink)
        mutated = package / mutant.file
        mutated.unlink()
        mutated.write_text(original.replace(mutant.before, mutant.after))
        return next((n for n in mutant.examples if not passes(mutant, folder, test, n)), None)


def passes(mutant: Mutant, folder: str, test: str, examples: int) -> bool:
    """Whether a property test passes with the package in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--hypothesis-profile=unshrunk", "-k", mutant.setups, test],
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


def record(mutants: list[Mutant], found: dict[str, int | None]) -> str:
    """A table of how many examples noticed each mutant, as Markdown."""
    noticed = sum(examples is not None for examples in found.values())
    lines = [
        "# Mutants of the scheduler-side code",
        "",
        f"The property test notices {noticed} of {len(mutants)}. Each is tried with {EXAMPLES[0]} "
        f"examples of every setup, then with {EXAMPLES[1]}, or as many as its line says. "
        "`make mutants` writes this file.",
        "",
        "| Mutant | File | Examples |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {m.name} | `{m.file}` | {found[m.name] or 'survived'} |" for m in mutants]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these")
    parser.add_argument(
        "--on", choices=LINES, default="v0.20.2", help="the line (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a table, as Markdown")
    arguments = parser.parse_args()
    words = arguments.words
    of_line, test = LINES[arguments.on]
    mutants = [m for m in of_line if not words or any(word in m.name for word in words)]
    if not mutants:
        names = ", ".join(mutant.name for mutant in of_line)
        parser.error(f"no mutant's name has {' or '.join(words)}; there are: {names}")
    console = Console()
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    for mutant in mutants:
        if (count := (installed / mutant.file).read_text().count(mutant.before)) != 1:
            raise SystemExit(
                f"mutant '{mutant.name}': {mutant.file} has its line {count} times, expected "
                f"once; mend the table of {arguments.on}"
            )
    if not passes(Mutant("none", "", "", ""), str(installed.parent), test, EXAMPLES[0]):
        raise SystemExit("the property test fails without a mutant; mend that first")
    found: dict[str, int | None] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool, console.status("") as status:
        running = {
            pool.submit(examples_to_notice, mutant, installed, test): mutant for mutant in mutants
        }
        for count, future in enumerate(as_completed(running), 1):
            name = running[future].name
            if future.exception():
                pool.shutdown(wait=False, cancel_futures=True)
            found[name] = future.result()
            console.print(f"{'noticed ' if found[name] else 'SURVIVED':8}  {name}")
            status.update(f"{count} of {len(mutants)}")
    if arguments.out:
        arguments.out.write_text(record(mutants, found))
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
