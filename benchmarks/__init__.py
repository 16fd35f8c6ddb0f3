# SPDX-License-Identifier: Apache-2.0
"""What the series costs, measured: programs that need the carried tree alone."""
