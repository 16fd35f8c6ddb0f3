# SPDX-License-Identifier: Apache-2.0
"""How long rows keep the event loop of the API server busy."""
