"""Checks which part imports which: text never needs torch, and each service lives without the other's folder.

    part                                must not reach by importing it       must not name, even inside a function
    common, client, most of cli         torch, core, gateway                 torch (common and client)
    gateway, cli.gateway                torch, core                          torch (gateway)
    core_service but for TORCH_USERS    torch, gateway                       torch, gateway
    core_service, kernels, cli.core     gateway                              gateway (core_service and kernels)

torch stands for torch and triton, core for headrace.core_service and headrace.kernels. "By importing it" follows the
imports at module level through headrace's own files; imports under `if TYPE_CHECKING` do not count. Prints each breach
with the chain that leads to it and exits 1.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TORCH = ("torch", "triton")
CORE = ("headrace.core_service", "headrace.kernels")
GATEWAY = ("headrace.gateway",)
# The core's files that compute. The rest decides what runs, without knowing how.
TORCH_USERS = tuple(
    f"headrace.core_service.{name}"
    for name in (
        "kv_cache",
        "loading",
        "main",
        "model_runner",
        "models",
        "sampling",
        "weights",
    )
)
# Commands that start a service, or both.
SERVICE_COMMANDS = ("headrace.cli.core", "headrace.cli.gateway", "headrace.cli.up")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module name, where it stands, and whether importing the file imports it."""

    module: str
    line: int
    at_import: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """What the modules below `prefixes` must not reach by being imported, and must not name anywhere."""

    prefixes: tuple[str, ...]
    unreachable: tuple[str, ...]
    unnamed: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()


RULES = (
    Rule(("headrace.common", "headrace.client"), unreachable=TORCH + CORE + GATEWAY, unnamed=TORCH),
    Rule(("headrace.cli",), unreachable=TORCH + CORE + GATEWAY, exempt=SERVICE_COMMANDS),
    Rule(GATEWAY, unreachable=TORCH + CORE, unnamed=TORCH),
    Rule(("headrace.cli.gateway",), unreachable=TORCH + CORE),
    Rule(("headrace.core_service",), unreachable=TORCH + GATEWAY, unnamed=TORCH + GATEWAY, exempt=TORCH_USERS),
    Rule(("headrace.core_service.models.spec",), unreachable=TORCH),
    Rule((*CORE, "headrace.cli.core"), unreachable=GATEWAY),
    Rule(CORE, unreachable=(), unnamed=GATEWAY),
    Rule(("headrace.cli.core", "headrace.cli.up"), unreachable=TORCH),
)


def is_below(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the module is one of the prefixes or inside one."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def module_files() -> dict[str, Path]:
    """Every hand-written module of headrace and its file; the links in src/headrace are followed."""
    files: dict[str, Path] = {}
    folders = [SOURCE / "headrace"]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir():
                folders.append(path)
            elif path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc")):
                parts = path.relative_to(SOURCE).with_suffix("").parts
                files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def _imports(nodes: list[ast.stmt], at_import: bool) -> Iterator[Import]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, at_import) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield Import(module, node.lineno, at_import)
                yield from (Import(f"{module}.{alias.name}", node.lineno, at_import) for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                yield from _imports(orelse, at_import)
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                yield from _imports(body, at_import=False)
            case _:
                for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
                    yield from _imports(getattr(node, blocks, []), at_import)


def chain_to(module: str, banned: tuple[str, ...], imports: dict[str, list[Import]]) -> list[str] | None:
    """The shortest chain of imports from a module to a banned one; None if there is none."""
    chains, seen = [[module]], {module}
    for chain in chains:
        for found in imports.get(chain[-1], []):
            if not found.at_import or found.module in seen:
                continue
            seen.add(found.module)
            if is_below(found.module, banned):
                return [*chain, found.module]
            chains.append([*chain, found.module])
    return None


def main() -> int:
    """Checks every rule; returns the exit code."""
    files = module_files()
    imports = {module: list(_imports(ast.parse(path.read_bytes()).body, True)) for module, path in files.items()}
    breaches = []
    for rule in RULES:
        for module in files:
            if not is_below(module, rule.prefixes) or is_below(module, rule.exempt):
                continue
            if chain := chain_to(module, rule.unreachable, imports):
                breaches.append("importing " + " -> ".join(chain))
            breaches += [
                f"{module}, line {found.line}: imports {found.module}"
                for found in imports[module]
                if is_below(found.module, rule.unnamed) and not found.at_import
            ]
    print("\n".join(sorted(set(breaches))), file=sys.stderr, end="\n" if breaches else "")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
