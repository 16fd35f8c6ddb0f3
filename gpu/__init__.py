# SPDX-License-Identifier: Apache-2.0
"""Programs for hosts with GPUs; what each needs stands in its help."""
