# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of the series."""

import argparse

from tools.common.cli import add_series
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series

EXAMPLE = "--series patches/v1.2.3/series"
declare = add_series


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Print one sha256 over the pin's source, the order of the series and every byte of it."""
    print(fingerprint(read_series(project.series_file), project.pin))
