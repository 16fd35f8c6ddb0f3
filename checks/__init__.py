# SPDX-License-Identifier: Apache-2.0
"""Programs that try the installed wheel for minutes, without a GPU."""
