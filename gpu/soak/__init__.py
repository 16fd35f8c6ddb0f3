# SPDX-License-Identifier: Apache-2.0
"""A soak on several GPUs."""
