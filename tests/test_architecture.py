"""The package is a few parts, each of which imports from those below it alone; its docstrings begin
plainly.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "histocoder"
PARTS = (
    *(
        "_version",
        "errors",
        "signals",
        "files",
        "log",
        "config",
        "launcher",
        "distributed",
        "formatters",
        "text",
        "ops",
        "model",
    ),
    *(
        "tables",
        "data",
        "classes",
        "checkpoints",
        "inference",
        "ray",
        "spark",
        "evaluation",
        "training",
        "sklearn",
        "desk",
        "cli",
    ),
)
"""From the lowest to the highest."""
ENTRANCES = ("__init__", "__main__")
"""What may import from all parts."""
OF_TORCH_DISTRIBUTED = {
    "training/fsdp.py": "FSDP's own module, and the mesh of processes that it works over"
}
"""Besides distributed.py, the modules that import torch.distributed, and why."""
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(path: Path) -> Iterator[str]:
    """The full names of all that a module imports, in functions too, and for type checking
    alone.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_from_parts_below(path: Path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = PARTS if part in ENTRANCES else PARTS[: PARTS.index(part) + 1]
    used = {name.split(".")[1] for name in imported(path) if name.startswith("histocoder.")}
    assert used <= set(allowed)


def test_torch_distributed_is_imported_in_one_part():
    names = {name_of(path): "".join(f"{name}.\n" for name in imported(path)) for path in MODULES}
    found = {
        path
        for path, text in names.items()
        if re.search(r"^torch\.distributed\.", text, re.MULTILINE)
    }
    assert found == {"distributed.py", *OF_TORCH_DISTRIBUTED}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_begin_with_verb_or_noun(path: Path):
    nodes = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
    ]
    strings = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    strange = "Of What Likewise That Those Which By As How Where For To With None In From".split()
    assert not [text.splitlines()[0] for text in strings if text.split(maxsplit=1)[0] in strange]


HOOKS = re.compile(
    r"showwarning|showwarnmsg|formatwarning|filterwarnings|simplefilter|catch_warnings|captureWarnings|excepthook|"
    r"setLevel|addFilter|logging\.disable\(|log\.disabled|sys\.std(out|err) = |redirect_std"
)
"""What changes for the whole process how others' warnings, lines and errors are shown."""
ALLOWED_HOOKS = {
    "log.py": ["setLevel"],  # the logger of the package, where it is made
    # a library's own warning is silenced around its one call
    "tables/stata.py": ["catch_warnings", "simplefilter"] * 2,
    "training/strategy.py": ["catch_warnings", "simplefilter"],
    "training/fsdp.py": ["filterwarnings"],
    "inference/onnx_export.py": [
        "logging.disable(",
        "catch_warnings",
        "simplefilter",
        "logging.disable(",
    ],
}


def test_no_module_hooks_into_the_process():
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    hooks = {
        name: [match.group() for match in HOOKS.finditer(text)] for name, text in texts.items()
    }
    assert {name: names for name, names in hooks.items() if names} == ALLOWED_HOOKS


@pytest.mark.parametrize("path", sorted((PACKAGE / "desk" / "domain").glob("*.py")), ids=name_of)
def test_desks_domain_knows_no_http(path: Path):
    web = ("fastapi", "starlette", "uvicorn", "histocoder.desk.web")
    assert not [name for name in imported(path) if name.startswith(web)]
