# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform, with what its Ray executor asks a platform for. vLLM finds it as a plugin
when the folder above is on PYTHONPATH."""


def register() -> str:
    """The class for `vllm.platforms.current_platform`."""
    return "ray_platform.platform.RayCpuPlatform"
