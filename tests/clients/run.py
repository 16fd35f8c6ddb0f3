# SPDX-License-Identifier: Apache-2.0
"""Runs clients on recorded answers, each in its own environment, and a client's engine in the
server's:

    python run.py with_<client> RECORDS OUT
    python run.py engine_<client> CHECKPOINT RECORDS PACKAGES

The first one calls `replay` of the module: from the turns of a conversation to its samples, each as
tokens and routes. OUT/<behaviour>.npz then has for each sample `tokens<i>`, (T,), and `routes<i>`,
(T, L, K) int64: the experts that the client makes a trainer take, `OWN` where the trainer selects
itself. Where the client fails, OUT/<behaviour>.error has its traceback.

The second one calls `roll_out` of the module, which yields behaviours and their turns, and writes a
record for each, or BEHAVIOUR.error. The packages are the client's, after those of the environment.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from driving import Turn, read_record, try_record, write_error


def replay_records(replay: Callable[[list[Turn]], Any], records: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for error in records.glob("*.error"):
        write_error(out, error.stem, error.read_text())
    for file in sorted(records.glob("*.json")):
        try:
            arrays = {}
            for i, (tokens, routes) in enumerate(replay(read_record(file))):
                arrays[f"tokens{i}"] = np.asarray(tokens, dtype=np.int64)
                arrays[f"routes{i}"] = np.asarray(routes, dtype=np.int64)
            np.savez(out / f"{file.stem}.npz", **arrays)
        except Exception:
            write_error(out, file.stem, traceback.format_exc())


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name.startswith("engine"):
        checkpoint, records, packages = arguments
        sys.path.append(packages)
        for behaviour, turns in importlib.import_module(name).roll_out(checkpoint):
            try_record(Path(records), behaviour, iter(turns))
    else:
        replay_records(importlib.import_module(name).replay, *map(Path, arguments))
