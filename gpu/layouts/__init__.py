# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout returns the same rows."""
