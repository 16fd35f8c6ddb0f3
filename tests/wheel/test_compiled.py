# SPDX-License-Identifier: Apache-2.0
"""What compiled files expect of the Python around them."""

import pytest

from tools.wheel.compiled import compare_calls, missing_modules

CALL = b"import torch\ntorch.ops._C.rms_norm(1, 2, epsilon=3)\n"


@pytest.mark.parametrize(
    "changed",
    [
        CALL.replace(b"1, 2", b"1, 2, 4"),
        CALL.replace(b"epsilon", b"eps"),
        CALL.replace(b"rms_norm", b"other_norm"),
    ],
)
def test_another_call_of_a_compiled_operator_is_found(changed: bytes) -> None:
    (problem,) = compare_calls({"vllm/a.py": CALL}, {"vllm/a.py": changed})
    assert "operator" in problem.what


def test_calls_that_the_release_makes_elsewhere_are_known() -> None:
    operators = CALL + b"torch.ops.vllm.mine(1, 2)\n"
    assert not [*compare_calls({"vllm/a.py": CALL}, {"vllm/b.py": operators})]


def test_a_removed_module_that_a_compiled_file_names_is_found() -> None:
    before = {"vllm/cli/main.py": b"", "vllm/other.py": b""}
    (problem,) = missing_modules("vllm/vllm-rs", b"\0-m vllm.cli.main\0", before, {})
    assert problem.where == "vllm/cli/main.py"
