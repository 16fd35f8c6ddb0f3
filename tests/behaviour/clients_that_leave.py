# SPDX-License-Identifier: Apache-2.0
"""Clients of a prefill and a decode engine that ask, leave, or send wrong rows."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import numpy as np

from examples import proxy
from examples.client import PATH, RoutedExpertsError, generate
from harness import disaggregated
from harness.server import ServerError

CLIENTS = 6


class Load:
    """Clients of a prefill and a decode engine behind the proxy, and what became of their requests.

    They ask for random prompts, half of them with a prefix of another. Answers are whole or
    streamed, with or without rows. One client in four leaves, in the middle of its stream or after
    a random time. One in twelve sends the decode engine wrong rows, which it must refuse.
    """

    def __init__(self, pair: disaggregated.Pair, seconds: float) -> None:
        self.pair = pair
        self.url = pair.url
        self.end = time.monotonic() + seconds
        self.rng = np.random.default_rng(0)
        self.prefixes = [self._tokens(self.rng, 96) for _ in range(8)]
        self.finished = self.left = self.refused = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Ask until the time is over and every kind of request has been answered."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for client in [pool.submit(self._client, number) for number in range(CLIENTS)]:
                client.result()

    def _client(self, number: int) -> None:
        rng = np.random.default_rng([1, number])
        for request in itertools.count(number):
            has_all_kinds = self.finished and self.left and self.refused
            is_over = time.monotonic() > self.end and has_all_kinds
            if is_over or len(self.faults) > 20:
                return
            try:
                if request % 12 == 6:
                    self._bring_wrong_rows(rng)
                else:
                    self._ask(rng, leaves=request % 4 == 0)
            except (RoutedExpertsError, ServerError, httpx.HTTPError, KeyError, ValueError) as e:
                with self._lock:
                    self.faults.append(f"{type(e).__name__}: {e}")

    def _ask(self, rng: np.random.Generator, leaves: bool) -> None:
        prompt = self._tokens(rng, int(rng.integers(1, 150)))
        if rng.random() < 0.5:
            prefix = self.prefixes[rng.integers(len(self.prefixes))]
            prompt = [*prefix[: rng.integers(1, len(prefix))], *prompt]
        sampling: dict[str, Any] = {
            "temperature": float(rng.integers(2)),
            "max_tokens": int(rng.integers(1, 60)),
            "ignore_eos": True,
        }
        stream = bool(rng.random() < 0.5)
        if leaves:
            self._leave(rng, {"token_ids": prompt, "sampling_params": sampling, "stream": stream})
            with self._lock:
                self.left += 1
        elif rng.random() < 0.2:
            sampling["extra_args"] = {"return_routed_experts": False}
            body = {"token_ids": prompt, "sampling_params": sampling}
            reply = httpx.post(self.url + PATH, json=body, trust_env=False, timeout=600)
            (choice,) = reply.raise_for_status().json()["choices"]
            if len(choice["token_ids"]) != sampling["max_tokens"] or choice.get("routed_experts"):
                raise ValueError(f"a silent answer has {sorted(choice)}")
        else:
            # It has checked that no row is missing.
            (completion,) = generate(self.url, prompt, sampling, stream=stream)
            if completion.start or len(completion.token_ids) != sampling["max_tokens"]:
                raise ValueError(f"rows begin at {completion.start}, or tokens are missing")
            with self._lock:
                self.finished += 1

    def _bring_wrong_rows(self, rng: np.random.Generator) -> None:
        """Send the decode engine rows that do not end with the prompt. It never fetches the KV."""
        prompt = self._tokens(rng, int(rng.integers(1, 150)))
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": {"max_tokens": 5}}
        prefilled = self.pair.prefill.post(PATH, proxy.prefill_body(PATH, body))
        body = proxy.decode_body(body, prefilled)
        body["kv_transfer_params"][proxy.PROMPT_ROWS]["routed_experts_start"] += 1
        reply = httpx.post(self.pair.decode.url + PATH, json=body, trust_env=False, timeout=600)
        if reply.status_code != 400 or proxy.PROMPT_ROWS not in reply.text:
            raise ValueError(f"wrong rows got status {reply.status_code}: {reply.text[:200]}")
        with self._lock:
            self.refused += 1

    def _leave(self, rng: np.random.Generator, body: dict[str, Any]) -> None:
        """Close the connection in the middle of a long answer, or before it."""
        body["sampling_params"]["max_tokens"] = 200
        timeout = 600 if body["stream"] else float(rng.uniform(0.02, 1))
        request: dict[str, Any] = {"json": body, "trust_env": False, "timeout": timeout}
        with suppress(httpx.ReadTimeout), httpx.stream("POST", self.url + PATH, **request) as reply:
            reply.raise_for_status()
            for _, _ in zip(reply.iter_lines(), range(rng.integers(1, 60)), strict=False):
                pass

    def _tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(4, 700, count)]
