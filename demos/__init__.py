# SPDX-License-Identifier: Apache-2.0
"""The programs behind `make demo`, `make replay` and `make train-demo`."""
