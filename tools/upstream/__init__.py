# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests, on the pristine and on the patched wheel."""
