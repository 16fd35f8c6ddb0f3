# SPDX-License-Identifier: Apache-2.0
"""One module a room; each verb is a thin function over the library."""
