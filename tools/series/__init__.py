# SPDX-License-Identifier: Apache-2.0
"""The patches, as files and as commits."""
