# SPDX-License-Identifier: Apache-2.0
"""The one entry point. ``python -m tools PACKAGE COMMAND`` runs ``run`` of that module."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tools.common.cli import ToolError
from tools.common.pin import DEFAULT_LINE, Project

_ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {
    "series": ("apply", "export", "check", "line", "status"),
    "wheel": ("build", "identity", "verify", "compiled"),
    "locks": ("trim",),
    "upstream": ("test", "check-patches", "submit"),
}


def parser() -> argparse.ArgumentParser:
    """All packages and commands. The help is the docstring of a package and of a command's ``run``;
    ``declare`` of a command, if any, adds its arguments."""
    about = "Source, patches, locks, wheels and upstream tests of vllm-routed-experts."
    top = argparse.ArgumentParser(prog="python -m tools", description=about)
    root = "the repository (default: the one of this file)"
    top.add_argument("--root", type=Path, default=_ROOT, help=root)
    on = f"the line of patches/ (default: {DEFAULT_LINE})"
    top.add_argument("--on", default=DEFAULT_LINE, metavar="LINE", help=on)
    packages = top.add_subparsers(metavar="PACKAGE", required=True)
    for package, commands in PACKAGES.items():
        about = (import_module(f"tools.{package}").__doc__ or "").rstrip(".")
        of_package = packages.add_parser(package, help=about, description=about)
        command_parsers = of_package.add_subparsers(metavar="COMMAND", required=True)
        for command in commands:
            module = import_module(f"tools.{package}.{command.replace('-', '_')}")
            text = " ".join(module.run.__doc__.split())
            summary = text.split(". ")[0].rstrip(".")
            command_parser = command_parsers.add_parser(command, help=summary, description=text)
            # Also after the command; SUPPRESS keeps a value that was given before it.
            command_parser.add_argument("--on", default=argparse.SUPPRESS, metavar="LINE", help=on)
            getattr(module, "declare", lambda _: None)(command_parser)
            command_parser.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0, 1 for an error that is explained, 2 for wrong usage."""
    parsed = parser().parse_args(arguments)
    try:
        parsed.run(parsed, Project(parsed.root, parsed.on, getattr(parsed, "tree", None)))
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        if parsed.on != DEFAULT_LINE:
            print(f"  line:     {parsed.on}: add --on {parsed.on} to commands", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left half done", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
