# SPDX-License-Identifier: Apache-2.0
"""Source, patch series and wheels of the project; run as ``python -m tools``."""
