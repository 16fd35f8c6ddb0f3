# SPDX-License-Identifier: Apache-2.0
"""Version, ingredients and purpose of a wheel of the series."""

import argparse

from tools.common.pin import Project
from tools.series.series import fingerprint, read_series
from tools.wheel.plan import choose_base, wheel_version


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", required=True, help="a base wheel: cpu, cuda or cuda-aarch64")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Print the pin, the fingerprint of the series, the version of its wheel, and what the wheel is
    for, as NAME=value lines. The labels of the image say the same."""
    pin, series = project.pin, read_series(project.series_file)
    base = choose_base(pin, arguments.variant)
    print(f"PIN={pin.tag}@{pin.commit}")
    print(f"SERIES_FINGERPRINT={fingerprint(series, pin)}")
    print(f"WHEEL_VERSION={wheel_version(pin, base, project.release if series else 0)}")
    print(f"PURPOSE={'tests-never-published' if base.tests_only else 'serving'}")
