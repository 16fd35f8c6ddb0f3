# SPDX-License-Identifier: Apache-2.0
"""What rows cost whole engines: builds and settings of the flag, in turns."""
