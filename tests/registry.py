# SPDX-License-Identifier: Apache-2.0
"""Which MoE models a release of vLLM and `transformers` have, read from their source, and which of
them `docs/features.md` lists. `tests/behaviour/test_registry.py` compares them for each line.
"""

from __future__ import annotations

import ast
import functools
import re
from importlib.util import find_spec, resolve_name
from pathlib import Path

MODELS = "vllm.model_executor.models"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
# Names of modules of `fused_moe` that run experts.
EXPERTS = re.compile(r"(Shared)?FusedMoE(Factory)?$|fused_experts$")
TABLES = {"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"}

FEATURES = Path(__file__).parents[1] / "docs/features.md"

# A definition by its module and its name there.
Name = tuple[str, str]


def _root(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def _definitions(module: str) -> dict[str, set[Name]]:
    """What each name at the top of a module uses. An imported name uses its original."""
    path = _root("vllm").parent.joinpath(*module.split("."))
    package = module if path.is_dir() else module.rpartition(".")[0]
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    uses: dict[str, set[Name]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                uses.setdefault(alias.asname or alias.name, set()).add((source, alias.name))
    for node in tree.body:
        names = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            uses[name] = {(module, n.id) for n in ast.walk(node) if isinstance(n, ast.Name)}
    return uses


def _is_moe(model: Name) -> bool:
    """Whether a model's definition leads to vLLM's layer of experts."""
    seen, todo = set(), [model]
    while todo:
        module, name = todo.pop()
        if module.startswith(FUSED_MOE):
            if EXPERTS.match(name):
                return True
        elif (module, name) not in seen and module.startswith((MODELS, "vllm.models")):
            seen.add((module, name))
            todo += _definitions(module).get(name, ())
    return False


def moe_architectures() -> set[str]:
    """Architectures of the release's registry whose models have, or may have, experts."""
    tree = ast.parse((_root("vllm") / "model_executor/models/registry.py").read_text())
    found = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if not any(isinstance(t, ast.Name) and t.id in TABLES for t in targets):
            continue
        assert isinstance(node, ast.Assign)
        for architecture, (module, name) in ast.literal_eval(node.value).items():
            full = module if module.startswith("vllm.") else f"{MODELS}.{module}"
            if _is_moe((full, name)):
                found.add(architecture)
    return found


def families() -> dict[str, set[str]]:
    """Architectures of the models of `transformers` that write text, by `model_type`."""
    from transformers.models.auto import modeling_auto

    tables = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "TEXT_TO_WAVEFORM")
    found: dict[str, set[str]] = {}
    for table in tables:
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})
        for model_type, architectures in names.items():
            several = architectures if isinstance(architectures, tuple | list) else (architectures,)
            found.setdefault(model_type, set()).update(several)
    return found


def moe_families() -> set[str]:
    """The `model_type` of each model in `families()` that has a class of experts or a router."""
    experts = re.compile(r"^class \w*(?:Experts|Router|MoE|Moe|TopKGating)", re.MULTILINE)
    moe: set[str] = set()
    for file in (_root("transformers") / "models").glob("*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        if experts.search(source):
            moe.update(re.findall(r"^class (\w+)", source, re.MULTILINE))
    return {model_type for model_type, names in families().items() if names & moe}


def documented_families(line: str) -> dict[str, str]:
    """How the documentation says that each family is tested on a line, or why it is not."""
    header, *rows = [
        [cell.strip(" `") for cell in row.strip("|").split("|")]
        for row in re.findall(r"^\| (?:Family|`).*", _models(), re.MULTILINE)
    ]
    column = header.index(f"Series {line}")
    return {row[0]: row[column] for row in rows if row[column] != "-"}


def documented_architectures(line: str) -> set[str]:
    """The architectures that `transformers` lacks, as the documentation lists them."""
    (names,) = re.findall(rf"^- {line}: (.*?)(?=^-|^$)", _models(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`(\w+)`", names))


def _models() -> str:
    return FEATURES.read_text(encoding="utf-8").split("\n## Models\n")[1]
