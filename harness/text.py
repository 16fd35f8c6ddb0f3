# SPDX-License-Identifier: Apache-2.0
"""The text of the demo: the tokenizer is trained on it and the prompts are cut from it.

It mixes registers (prose, dialogue, code, numbers, other scripts) so that tokens differ
in kind, and it is written for this project, so nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PASSAGES: dict[str, str] = {
    "harbour": (
        "The harbour woke before the town did. A ferry came in without its lights, and the "
        "gulls rose from the wall as if one hand had thrown them. On the quay an old man was "
        "sorting rope by touch: this one for the anchor, this one for the sail, this one too "
        "worn for anything but memory. He never looked down. When the ferry's ramp fell on the "
        "stones he said the hour aloud, to nobody, and he was right to the minute. The baker "
        "crossed with a tray of warm loaves, the post van followed, and after them a child who "
        "carried one red boot and wore the other. Nobody asked her why. In that town people "
        "waited for a reason to arrive by itself, the way they waited for the tide, and most "
        "days both of them came in on time. By noon the fog had gone back to sea. The old man "
        "folded his knife, counted the coils twice and wrote a single word into his book."
    ),
    "sorting": (
        "Think of a sorting office with sixteen clerks. Every letter that comes in is read by a "
        "router, which does not open it: it looks at the envelope and names the four clerks who "
        "know most about such letters. Those four work, the other twelve rest, and their answers "
        "are added up. On the next floor there are sixteen other clerks and another router, and "
        "the letter has changed a little on the stairs. A letter that climbs four floors has "
        "therefore been sorted four times. If you want to know how an answer came about, it is "
        "not enough to keep the letter: you have to keep the list of clerks, floor by floor, for "
        "every letter. A list that is wrong in one place is worse than no list at all, because "
        "whoever learns from it will praise and blame the wrong people. So the list is checked "
        "against a second office, built by somebody else, which is handed the same letters."
    ),
    "code": (
        "def route(logits, k):\n"
        '    """Return the k largest logits of every row, as a set of columns."""\n'
        "    rows = []\n"
        "    for row in logits:\n"
        "        order = sorted(range(len(row)), key=lambda e: row[e], reverse=True)\n"
        "        rows.append(sorted(order[:k]))\n"
        "    return rows\n"
        "\n"
        "class Counter:\n"
        "    def __init__(self, experts):\n"
        "        self.used = [0] * experts\n"
        "\n"
        "    def add(self, rows):\n"
        "        for row in rows:\n"
        "            for expert in row:\n"
        "                self.used[expert] += 1\n"
        "\n"
        "    def share(self):\n"
        "        return sum(n > 0 for n in self.used) / len(self.used)\n"
        "\n"
        "if __name__ == '__main__':\n"
        "    print(route([[0.5, -1.25, 3.0, 2.75], [9.0, 8.5, -7.0, 0.125]], k=2))\n"
    ),
    "ledger": (
        "Ledger, week 31. Mon 412 crates in, 398 out, 14 held; Tue 377 in, 391 out, 0 held; "
        "Wed 520 in, 455 out, 65 held (two lorries late, see note 7); Thu 463 in, 528 out, 0 "
        "held; Fri 601 in, 601 out. Sum 2,373 in and 2,373 out. Price per crate 3.85, less 2.5 % "
        "for more than 500 a day: 1,586.20 + 1,451.45 + 1,951.95 + 1,782.55 + 2,256.00. Note 7: "
        "road B 91 closed from 04:30 to 11:15 because of water, 12 cm at km 8.4."
    ),
    "kitchen": (
        '"How much salt?" asked the apprentice. "Until it tastes of itself," said the cook. '
        '"That is not a number." "No. A number is what you write down afterwards, so that '
        'tomorrow you can be wrong by less." She pushed the pan over. "Again. Small fire, wide '
        'pan, and do not talk to it." The apprentice tasted, frowned, tasted. "Eleven," he said. '
        '"Eleven what?" "I do not know yet."'
    ),
    "scripts": (
        "Ein Brief geht durch vier Stockwerke, und in jedem wird er neu verteilt. Une lettre "
        "monte quatre étages, et à chaque étage on la trie de nouveau. Una carta sube cuatro "
        "pisos. Письмо идёт через четыре этажа. 一封信经过四层楼，每一层都要重新分拣。 "
        "手紙は四つの階を通る。 Το γράμμα ανεβαίνει τέσσερις ορόφους."
    ),
}


@dataclass(frozen=True)
class Prompt:
    """One request of the demo."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int
    wave: int  # sent at once; the next wave after its answers


def prompts(encode: Callable[[str], list[int]], chunk: int) -> list[Prompt]:
    """The demo's prompts: of one token to several chunks (of `chunk` tokens, the most that the
    server takes per step), alone, together, and repeated."""
    ids = {name: encode(passage) for name, passage in PASSAGES.items()}

    def cut(name: str, start: int, stop: int) -> tuple[int, ...]:
        part = tuple(ids[name][start:stop])
        assert len(part) == stop - start, f"the passage {name!r} is too short"
        return part

    # Alone in the engine, so that chunks depend on its length only: the picture shows it.
    first = Prompt("harbour", cut("harbour", 0, 3 * chunk - 12), 48, wave=0)
    together = [
        Prompt("sorting", cut("sorting", 0, 240), 24, wave=1),
        Prompt("code", cut("code", 0, 200), 24, wave=1),
        Prompt("ledger", cut("ledger", 0, 150), 24, wave=1),
        Prompt("scripts", cut("scripts", 0, 140), 16, wave=1),
        Prompt("exactly one chunk", cut("kitchen", 0, chunk), 16, wave=1),
        Prompt("one chunk and a token", cut("scripts", 140, 141 + chunk), 16, wave=1),
        Prompt("less than a chunk", cut("kitchen", 70, 110), 16, wave=1),
        Prompt("one token", cut("ledger", 160, 161), 32, wave=1),
    ]
    # After the others, to hit the prefix cache.
    repeats = [
        Prompt("harbour's prefix", first.token_ids[:160] + cut("kitchen", 30, 90), 24, wave=2),
        Prompt("sorting again", together[0].token_ids, 24, wave=2),
    ]
    return [first, *together, *repeats]


def corpus() -> list[str]:
    """All passages, whole and by sentence: what the tokenizer is trained on."""
    parts = list(PASSAGES.values())
    return parts + [s for text in parts for s in text.replace("\n", ". ").split(". ")]
