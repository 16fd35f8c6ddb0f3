# SPDX-License-Identifier: Apache-2.0
"""What all packages share: git, the pin, errors, files, arguments."""
