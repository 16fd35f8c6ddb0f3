# SPDX-License-Identifier: Apache-2.0
"""`make mutants`: break the scheduler-side code in named ways; the property test must notice each.

    python -m tests.property.mutants [WORDS ...]    only mutants whose name has one of these words

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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[2]
MANAGER = "v1/core/routed_experts_manager.py"
STORE = "v1/core/routed_experts_store.py"
SCHEDULER = "v1/core/sched/scheduler.py"


@dataclass(frozen=True)
class Mutant:
    """One line of the code under test, and what it becomes."""

    name: str
    file: str
    before: str
    after: str


MUTANTS = [
    Mutant(
        "finality off by one",
        MANAGER,
        "        num_final = request.num_tokens - 1\n        held =",
        "        num_final = request.num_tokens\n        held =",
    ),
    Mutant(
        "rows of rejected drafts kept",
        MANAGER,
        "        self.truncate(end)\n        if self.end == self.start:",
        "        if self.end == self.start:",
    ),
    Mutant(
        "hash key dropped",
        STORE,
        "return make_block_hash_with_group_id(block_hash, self.group_id)",
        "return make_block_hash_with_group_id(hashes[0], self.group_id)",
    ),
    Mutant(
        "cap removed", MANAGER, "        return num_known\n", "        return request.num_tokens\n"
    ),
    Mutant(
        "epoch ignored",
        MANAGER,
        "if step is not None and step_number > self._reset_step:",
        "if step is not None:",
    ),
    Mutant(
        "pending ignored",
        MANAGER,
        "                num_final = position + len(rows)\n",
        "                continue\n",
    ),
    Mutant(
        "unsent rows survive a reset",
        MANAGER,
        "            held.truncate(held.start)\n",
        "            pass\n",
    ),
    Mutant(
        "store survives a reset",
        MANAGER,
        "            self.store.clear()\n\n    def free(",
        "            pass\n\n    def free(",
    ),
    Mutant(
        "evicted blocks stay in the store",
        STORE,
        "            del self._entries[key]\n\n    def clear",
        "            pass\n\n    def clear",
    ),
    Mutant(
        "view instead of copy",
        MANAGER,
        "self.append(BlockRows(rows.copy()), 0, len(rows))",
        "self.append(BlockRows(rows), 0, len(rows))",
    ),
    Mutant(
        "handed out rows sent again",
        MANAGER,
        "            rows = rows[self.start - position :]\n",
        "            pass\n",
    ),
    Mutant(
        "steps before a resumption count",
        SCHEDULER,
        "if scheduler_output.step < request.resumed_step:",
        "if False:",
    ),
    Mutant(
        "rows of steps before a resumption kept",
        MANAGER,
        "if step.step_number >= request.resumed_step:",
        "if True:",
    ),
    Mutant(
        "finished request not freed",
        SCHEDULER,
        "            self.routed_experts_manager.free(request)\n",
        "            pass\n",
    ),
    Mutant(
        "rows of a failed load kept",
        MANAGER,
        "r for r, last in self._failed_steps.items() if step_number <= last",
        "r for r, last in self._failed_steps.items() if False",
    ),
    Mutant(
        "rows of received blocks expected",
        MANAGER,
        "        if block_index * self.store.block_size < num_received:\n            return\n",
        "",
    ),
    Mutant(
        "external KV taken unasked",
        MANAGER,
        'return isinstance(params, dict) and bool(params.get("do_remote_prefill"))',
        "return True",
    ),
    Mutant(
        "garbage of drafts stored",
        MANAGER,
        "        self._end[slots] = np.minimum(self._end[slots], ends)\n",
        "        pass\n",
    ),
    Mutant(
        "page of a large block lost",
        MANAGER,
        "            self._chunks.setdefault(slot, []).append(self._pages[slot].copy())\n",
        "            pass\n",
    ),
    Mutant(
        "draft rows handed out with the step's",
        MANAGER,
        "            counts[i] = max(0, min(counts[i], num_final - starts[i]))\n",
        "            pass\n",
    ),
    Mutant(
        "rows nobody took are lost",
        MANAGER,
        "                    self._keep(request, step, index)\n",
        "                    pass\n",
    ),
    Mutant(
        "outputs taken for those of the step in order",
        MANAGER,
        "in_order = req_ids == step.req_ids",
        "in_order = len(req_ids) == len(step.req_ids)",
    ),
    Mutant(
        "slot keeps the position of another request",
        MANAGER,
        "            self._next[slot] = start\n",
        "            self._next[slot] = max(start, self._next[slot])\n",
    ),
    Mutant(
        "rows of the block before kept with a new one",
        MANAGER,
        "            self._chunks.pop(slot, None)\n        for slot in slots[~ends_block]",
        "            pass\n        for slot in slots[~ends_block]",
    ),
    Mutant(
        "full block not begun anew",
        MANAGER,
        "        self._begin[slots[ends_block]] = ends[ends_block]\n",
        "",
    ),
    Mutant(
        "rows counted on that a failed load does not bring",
        MANAGER,
        "for req_id, held in self._rows.items() if held.counts_on(lost)",
        "for req_id, held in self._rows.items() if False",
    ),
    Mutant(
        "blocks behind a failed load used",
        SCHEDULER,
        "invalid_block_ids = blocks_to_evict - sync_blocks_to_evict",
        "invalid_block_ids = set()",
    ),
    Mutant(
        "rows of a failed load put where others belong",
        MANAGER,
        "if len(rows) > len(slots) or not applies.all():",
        "if not applies.all():",
    ),
]


def survives(mutant: Mutant, installed: Path) -> bool:
    """Whether the property test passes with the mutant in the vLLM package `installed`."""
    original = (installed / mutant.file).read_text()
    if original.count(mutant.before) != 1:
        raise SystemExit(
            f"mutant '{mutant.name}': {mutant.file} has its line {original.count(mutant.before)} "
            "times, expected once; mend tests/property/mutants.py"
        )
    with tempfile.TemporaryDirectory() as folder:
        # The distribution's metadata tells vLLM its platform and is found beside the original.
        package = Path(folder) / "vllm"
        shutil.copytree(installed, package, copy_function=os.symlink)
        mutated = package / mutant.file
        mutated.unlink()
        mutated.write_text(original.replace(mutant.before, mutant.after))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "--hypothesis-profile=unshrunk",
                "tests/property",
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": folder,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PROPERTY_EXAMPLES": os.environ.get("PROPERTY_EXAMPLES", "1500"),
            },
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1):
        raise SystemExit(f"mutant '{mutant.name}': pytest failed\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: %(default)s)"
    )
    arguments = parser.parse_args()
    words = arguments.words
    mutants = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    if not mutants:
        names = ", ".join(mutant.name for mutant in MUTANTS)
        parser.error(f"no mutant's name has {' or '.join(words)}; there are: {names}")
    console = Console()
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as pool, console.status("") as status:
        running = {pool.submit(survives, mutant, installed): mutant for mutant in mutants}
        for count, future in enumerate(as_completed(running), 1):
            name = running[future].name
            if future.exception():
                pool.shutdown(wait=False, cancel_futures=True)
            survived = future.result()
            console.print(f"{'SURVIVED' if survived else 'noticed ':8}  {name}")
            status.update(f"{count} of {len(mutants)}")
            survivors += [name] if survived else []
    if survivors:
        console.print(
            f"{len(survivors)} of {len(mutants)} mutants survived: {', '.join(survivors)}"
        )
        return 1
    console.print(f"all {len(mutants)} mutants noticed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
