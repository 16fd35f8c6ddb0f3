# SPDX-License-Identifier: Apache-2.0
"""The driver of a backend that compiles nothing: never active."""

from __future__ import annotations

from typing import NoReturn

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Triton takes the first active driver, so this one is never asked for a device."""

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError

    def get_current_target(self) -> NoReturn:
        raise NotImplementedError

    def get_active_torch_device(self) -> NoReturn:
        raise NotImplementedError

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError
