"""The simplicity budget of the top level: 3,000 lines of code in all (blank lines, comments and docstrings not counted),
files of at most 500 lines, functions of at most 60, lines of at most 110 characters (these three count everything).

    python tests/budget.py
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL, FILE, FUNCTION, WIDTH = 3000, 500, 60, 110


def code_lines(text):
    """Lines that hold code: not blank, not a comment, not part of a docstring."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(i not in prose and bool(line.strip()) and not line.lstrip().startswith("#")
               for i, line in enumerate(text.split("\n"), 1))


def problems():
    """-> (one line per violation, {file: (lines, lines of code)})."""
    found, sizes = [], {}
    for path in sorted(ROOT.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")[:-1]
        sizes[path.name] = len(lines), code_lines(text)
        if len(lines) > FILE:
            found.append(f"{path.name}: {len(lines)} lines, at most {FILE}")
        found += [f"{path.name}:{i}: {len(line)} characters, at most {WIDTH}"
                  for i, line in enumerate(lines, 1) if len(line) > WIDTH]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION:
                found.append(f"{path.name}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines, "
                             f"at most {FUNCTION}")
    if sum(code for _, code in sizes.values()) > TOTAL:
        found.append(f"top level: {sum(code for _, code in sizes.values())} lines of code, at most {TOTAL}")
    return found, sizes


if __name__ == "__main__":
    found, sizes = problems()
    print("\n".join([*found, " lines   code", *(f"{n:>6} {code:>6} {name}" for name, (n, code) in sizes.items()),
                     f"{sum(n for n, _ in sizes.values()):>6} {sum(c for _, c in sizes.values()):>6} in all"]))
    sys.exit(bool(found))
