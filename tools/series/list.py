# SPDX-License-Identifier: Apache-2.0
"""The series as a table."""

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.common.pin import Project
from tools.series.series import read_series

EXAMPLE = ""


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Show the series as a table: name, subject, upstream status, size, files."""
    table = Table("patch", "subject", "status", "+", "-", "files", title=None)
    for patch in read_series(project.series_file):
        counts = (patch.diff.added, patch.diff.removed, len(patch.diff))
        row = (patch.name, patch.subject, patch.status, *map(str, counts))
        table.add_row(*map(Text, row))  # as Text: a subject's [Core] is no markup
    Console().print(table)
