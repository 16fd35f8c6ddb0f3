# SPDX-License-Identifier: Apache-2.0
"""Asynchronous EPLB on two GPUs."""
