"""The simplicity budget: source at the top level <= 3,000 lines, files <= 500, functions <= 60, lines <= 110 characters.

    python tests/budget.py
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL, FILE, FUNCTION, WIDTH = 3000, 500, 60, 110


def problems():
    """-> (one line per violation, {file: lines})."""
    found, sizes = [], {}
    for path in sorted(ROOT.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")[:-1]
        sizes[path.name] = len(lines)
        if len(lines) > FILE:
            found.append(f"{path.name}: {len(lines)} lines, at most {FILE}")
        found += [f"{path.name}:{i}: {len(line)} characters, at most {WIDTH}"
                  for i, line in enumerate(lines, 1) if len(line) > WIDTH]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION:
                    found.append(f"{path.name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION}")
    if sum(sizes.values()) > TOTAL:
        found.append(f"top level: {sum(sizes.values())} lines in all, at most {TOTAL}")
    return found, sizes


if __name__ == "__main__":
    found, sizes = problems()
    print("\n".join([*found, *(f"{n:>5} {name}" for name, n in sizes.items()), f"{sum(sizes.values()):>5} in all"]))
    sys.exit(bool(found))
