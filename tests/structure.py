"""Print figures of the structure of mmray, or of other projects, to compare sizes and styles.

    python tests/structure.py                             # this checkout
    python tests/structure.py . ../other --name micro     # two projects in one table
    python tests/structure.py --json

A project is a folder with one or more packages (in it or in its `src`), a package, or a folder of
scripts. Files of tests are counted apart from the others. AST nodes measure the amount of code
independently of formatting: expressions, statements and names, but no comments and no line breaks.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MAX_COLUMNS = 100
LONG_FUNCTION, VERY_LONG_FUNCTION = 60, 80  # lines, with the docstring
NUM_LARGEST = 10
NOT_PACKAGES = {"tests", "test", "docs", "examples", "benchmarks", "scripts", "build", "dist"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class SourceFile:
    """A parsed Python file.

    Args:
        path: the file.
        root: the folder relative to which its name is reported and its module is imported.
    """

    def __init__(self, path: Path, root: Path):
        text = path.read_text(encoding="utf-8")
        self.name = path.relative_to(root).as_posix()
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Dotted name for imports: `mmray/data/__init__.py` is `mmray.data`."""
        parts = self.name.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_test(path: Path) -> bool:
    """Whether a file, given relative to its project, belongs to the tests."""
    in_test_folder = any(part in ("tests", "test") for part in path.parts[:-1])
    is_named_so = path.name.startswith("test_") or path.stem.endswith("_test")
    return in_test_folder or is_named_so or path.name == "conftest.py"


def find_files(project: Path) -> tuple[list[SourceFile], int]:
    """Parse the Python files of a project.

    Args:
        project: its folder.

    Returns:
        The files of its packages without tests, and the number of non-blank lines of its tests.

    Raises:
        FileNotFoundError: there is no Python file in the folder.
    """
    is_package = (project / "__init__.py").exists()
    candidates = [*project.glob("*/__init__.py"), *project.glob("src/*/__init__.py")]
    packages = [path.parent for path in candidates if path.parent.name not in NOT_PACKAGES]
    folders = packages if packages and not is_package else [project]
    files = []
    for folder in folders:
        # Modules are imported by their path relative to the folder of their package.
        root = folder.parent if is_package or packages else folder
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(project)
            is_hidden = any(part.startswith(".") for part in relative.parts)
            if not is_hidden and not is_test(relative):
                files.append(SourceFile(path, root))
    if not files:
        raise FileNotFoundError(f"{project}: no Python files; give the folder of a project")
    test_lines = 0
    for path in project.rglob("*.py"):
        if is_test(path.relative_to(project)):
            test_lines += sum(bool(line.strip()) for line in path.read_text().splitlines())
    return files, test_lines


def is_code(line: str) -> bool:
    """Whether a line is neither blank nor a comment; lines of docstrings count as code."""
    return bool(line.strip()) and not line.strip().startswith("#")


def functions(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Yield (number of lines, `file:line name`) of each function, decorators excluded."""
    for node in file.nodes:
        if isinstance(node, FunctionNode):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield num_lines, f"{file.name}:{node.lineno} {node.name}"


def star_tuples(file: SourceFile) -> int:
    """Count calls `f(*name)` of a name to which the same function assigns a tuple.

    Such a tuple only groups arguments, and a reader has to find it to know what is passed.
    """
    found = set()
    for function in file.nodes:
        if not isinstance(function, FunctionNode):
            continue
        inner = list(ast.walk(function))
        tuples = {
            target.id
            for node in inner
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in inner:
            if isinstance(node, ast.Call):
                stars = [item.value for item in node.args if isinstance(item, ast.Starred)]
                found |= {
                    item for item in stars if isinstance(item, ast.Name) and item.id in tuples
                }
    return len(found)


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a node is `a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def num_settings(files: Sequence[SourceFile]) -> int:
    """Count the settings: annotated fields of the config's classes.

    These are the classes that derive from `Section` or `BaseModel` in a package or module `config`,
    and elsewhere the classes named `...Config`, such as `OptimizerConfig`. The class `Config` has
    no settings of its own: its fields are the sections. A field that a subclass declares again,
    such as with another default, is one setting.
    """
    classes = []
    for file in files:
        in_config = "config" in file.module.split(".")
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                classes.append((node, in_config))
    sections = {"Section", "BaseModel"}
    size = 0
    while len(sections) > size:  # until no further class derives from a section
        size = len(sections)
        for node, _ in classes:
            if sections & {base.id for base in node.bases if isinstance(base, ast.Name)}:
                sections.add(node.name)
    by_name = {node.name: node for node, _ in classes}
    count = 0
    for node, in_config in classes:
        is_section = in_config and node.name in sections
        if node.name != "Config" and (is_section or node.name.endswith("Config")):
            count += len(field_names(node) - inherited_fields(node, by_name))
    return count


def field_names(node: ast.ClassDef) -> set[str]:
    """Return the annotated fields of a class that are no class variables."""
    return {
        ast.unparse(item.target)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
    }


def inherited_fields(node: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> set[str]:
    """Return the fields of all base classes that are among the classes in `by_name`."""
    names = set()
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in by_name:
            parent = by_name[base.id]
            names |= field_names(parent) | inherited_fields(parent, by_name)
    return names


def imported_modules(file: SourceFile, modules: set[str]) -> set[str]:
    """Return the project's modules that a file imports at its top level, also for types only.

    Imports in functions are not counted: they run later, so they do not order the modules.
    """
    found = set()
    pending: list[ast.stmt] = list(file.tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, FunctionNode):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_init = file.name.endswith("__init__.py")
                parents = file.module.split(".")[: -node.level + is_init or None]
                base = ".".join([*parents, base]).rstrip(".")
            # `from package import module` imports a module, `from module import name` does not.
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules or {base}
        pending.extend(item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt))
    return (found & modules) - {file.module}


def import_circles(files: Sequence[SourceFile]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    modules = {file.module for file in files}
    imports = {file.module: imported_modules(file, modules) for file in files}
    reachable = {}
    for module in modules:
        seen: set[str] = set()
        pending = list(imports[module])
        while pending:
            other = pending.pop()
            if other not in seen:
                seen.add(other)
                pending.extend(imports[other])
        reachable[module] = seen
    in_circles = sorted(module for module in modules if module in reachable[module])
    circles: list[list[str]] = []
    for module in in_circles:
        known = next((circle for circle in circles if circle[0] in reachable[module]), None)
        if known is not None and module in reachable[known[0]]:
            known.append(module)
        else:
            circles.append([module])
    return circles


def mentions(file: SourceFile, name: str) -> bool:
    """Whether a file has a variable, attribute, parameter, argument or field of this name."""
    for node in file.nodes:
        values = (getattr(node, field, None) for field in ("id", "attr", "arg"))
        if name in values:
            return True
    return False


def measure(project: Path, name: str | None = None) -> dict[str, Any]:
    """Measure a project.

    Args:
        project: its folder.
        name: an identifier; the files that mention it are counted.

    Returns:
        Figures by name; those that end in `:` are lists.

    Raises:
        FileNotFoundError: there is no Python file in the folder.
    """
    files, test_lines = find_files(project.resolve())
    nodes = [node for file in files for node in file.nodes]
    lines = [line for file in files for line in file.lines]
    code_lines = sum(map(is_code, lines))
    longest = sorted((item for file in files for item in functions(file)), reverse=True)
    circles = import_circles(files)
    figures: dict[str, Any] = {
        "files": len(files),
        "AST nodes": len(nodes),
        "code lines": code_lines,
        "nodes a line": round(len(nodes) / max(code_lines, 1), 1),
        "settings": num_settings(files),
        "functions": len(longest),
        f"functions over {LONG_FUNCTION} lines": sum(size > LONG_FUNCTION for size, _ in longest),
        f"functions over {VERY_LONG_FUNCTION} lines": sum(
            size > VERY_LONG_FUNCTION for size, _ in longest
        ),
        "tuple assignments": sum(map(is_tuple_assignment, nodes)),
        "star-tuples in calls": sum(map(star_tuples, files)),
        "assignment expressions (:=)": sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        f"lines over {MAX_COLUMNS} columns": sum(len(line) > MAX_COLUMNS for line in lines),
        "full-line comments": sum(line.strip().startswith("#") for line in lines),
        "import circles": len(circles),
        "test lines": test_lines,
    }
    if name is not None:
        figures[f"files with `{name}`"] = sum(mentions(file, name) for file in files)
    figures["largest functions:"] = [f"{size:4} {place}" for size, place in longest[:NUM_LARGEST]]
    figures["circles:"] = [" <-> ".join(circle) for circle in circles]
    return figures


def format_table(columns: dict[str, dict[str, Any]]) -> str:
    """Format the figures of projects as text: a row per figure, a column per project, then lists.

    Args:
        columns: folder of a project -> its figures, as from `measure`.
    """
    names = [name for name in next(iter(columns.values())) if not name.endswith(":")]
    width = max(map(len, names))
    titles = [f"{Path(project).name:>12}" for project in columns]
    rows = ["  ".join([" " * width, *titles])]
    for name in names:
        cells = [
            f"{figures[name]:>{len(title)},}"
            for figures, title in zip(columns.values(), titles, strict=True)
        ]
        rows.append("  ".join([f"{name:<{width}}", *cells]))
    for project, figures in columns.items():
        for name, items in figures.items():
            if name.endswith(":") and items:
                rows.append(f"\n{project}, {name}")
                rows.extend(f"  {item}" for item in items)
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the given folders and print a table or JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("folders", nargs="*", type=Path, default=[root], help="projects")
    parser.add_argument("--name", help="count the files that mention this identifier")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    try:
        # The whole path, because two folders may have the same name.
        columns = {
            str(folder.resolve()): measure(folder, options.name) for folder in options.folders
        }
    except (FileNotFoundError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(columns, indent=2) if options.json else format_table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
