# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles, chosen with ``--hypothesis-profile``."""

from hypothesis import Phase, settings

# A mutant must fail; which example is the smallest does not matter.
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
