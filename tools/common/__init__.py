# SPDX-License-Identifier: Apache-2.0
"""What all rooms share: git, the pin, errors, files, arguments."""
