# SPDX-License-Identifier: Apache-2.0
"""Code to copy into trainers that exist; README.md says which, and with which versions."""
