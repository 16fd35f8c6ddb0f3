# SPDX-License-Identifier: Apache-2.0
"""The compiler of a backend that compiles nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """Takes no target; refuses to compile."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend compiles nothing")

    def add_stages(self, stages: dict[str, Any], options: object, *args: object) -> NoReturn:
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend compiles nothing")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
