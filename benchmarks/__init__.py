# SPDX-License-Identifier: Apache-2.0
"""Programs that measure what the series costs."""
