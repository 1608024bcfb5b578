# SPDX-License-Identifier: MIT
"""Runs a test of FlashMLA's own (github.com/deepseek-ai/FlashMLA), of a checkout or a copy of it, on this package.

    PYTHONPATH=python FLASHMLA_LIBRARY=build/release/libflashmla.so \\
        python3 tests/python/flashmla_tests.py CHECKOUT/tests/test_fmha_sm100.py [--grouped-gradients]

The file is run as it is but for the check of the chip: `if` and `assert` statements about the compute capability that
end the test, or leave something out, are passed over and told. --grouped-gradients also sets has_bwd where the test sets
it to False, for it does so where query heads share key heads, whose gradients FlashMLA has not.

Modules that the test imports are found beside it. The exit code is 0, or 1 where the test fails, or 2 where the file or
the package is refused.
"""

import argparse
import ast
import pathlib
import sys

CAPABILITY = "get_device_capability"


def mentions(node, names):
    words = {getattr(part, "attr", getattr(part, "id", None)) for part in ast.walk(node)}
    return not words.isdisjoint(names)


class Edits(ast.NodeTransformer):
    """Leaves out the check of the chip; what was done stands in `told`, as (line, words)."""

    def __init__(self, tree, grouped_gradients):
        self.grouped_gradients, self.told = grouped_gradients, []
        self.names = {CAPABILITY}  # and what is assigned from it
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and mentions(node.value, self.names):
                parts = (part for target in node.targets for part in ast.walk(target))
                self.names.update(part.id for part in parts if isinstance(part, ast.Name))

    def without(self, node):
        self.told.append((node.lineno, f"left out: {ast.unparse(node).splitlines()[0]}"))
        return ast.copy_location(ast.Pass(), node)

    def visit_If(self, node):
        ends = (ast.Raise, ast.Return, ast.Continue, ast.Break)
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        leaves = isinstance(node.body[-1], ends) or any(mentions(call.func, {"exit", "skip"}) for call in calls)
        if mentions(node.test, self.names) and leaves and not node.orelse:
            return self.without(node)
        return self.generic_visit(node)

    def visit_Assert(self, node):
        return self.without(node) if mentions(node.test, self.names) else node

    def visit_Assign(self, node):
        is_off = isinstance(node.value, ast.Constant) and node.value.value is False
        if self.grouped_gradients and is_off and [ast.unparse(target) for target in node.targets] == ["has_bwd"]:
            self.told.append((node.lineno, "has_bwd is True"))
            node.value = ast.copy_location(ast.Constant(True), node.value)
        return node


def edited(source, file, grouped_gradients=False):
    """(the code, what was done)"""
    tree = ast.parse(source, str(file))
    edits = Edits(tree, grouped_gradients)
    tree = ast.fix_missing_locations(edits.visit(tree))
    return compile(tree, str(file), "exec"), edits.told


def refuse(text):
    print(f"flashmla_tests.py: {text}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="CHECKOUT/tests/FILE.py", type=pathlib.Path)
    parser.add_argument("--grouped-gradients", action="store_true", help="of grouped heads the gradients, too")
    options = parser.parse_args()
    try:
        code, told = edited(options.file.read_text(), options.file, options.grouped_gradients)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        refuse(f"{options.file}: {error}; must be a test of FlashMLA's")
    import flash_mla

    if not hasattr(flash_mla, "workspace_bound"):  # which FlashMLA has not
        refuse(f"flash_mla is another package, {flash_mla.__file__}; name this one's folder in PYTHONPATH")
    print(f"flash_mla {flash_mla.__version__}, {pathlib.Path(flash_mla.__file__).parent}")
    for line, words in told:
        print(f"{options.file.name}:{line}: {words}", flush=True)
    sys.path[0] = str(options.file.parent.resolve())
    sys.argv = [str(options.file)]
    exec(code, {"__name__": "__main__", "__file__": str(options.file)})


if __name__ == "__main__":
    main()
