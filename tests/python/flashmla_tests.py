# SPDX-License-Identifier: MIT
"""Runs a test of FlashMLA's own (github.com/deepseek-ai/FlashMLA), of a checkout or a copy of it, on this package.

    PYTHONPATH=python FLASHMLA_LIBRARY=build/release/libflashmla.so \\
        python3 tests/python/flashmla_tests.py CHECKOUT/tests/test-sparse-decode.py [--untimed] [-- --run-to-finish]

The file and the modules beside it that it imports run unchanged except for the check of the chip: `if` and `assert` statements
about the compute capability that end the test or omit something are skipped and reported. The changes of these options are
reported too:

--untimed: the timed cases are checked, not timed. FlashMLA finds times by its kernels' names, which ours do not have.
--cases START:STOP:STEP: only this slice of the list `testcases`.
--grouped-gradients: has_bwd is True where the test sets it to False, as it does where query heads share key heads, for which
FlashMLA has no gradients.

Arguments after `--` are passed to the test. The last line says how many cases of `testcases` were begun, if the test has that
list. The exit code is 0, 1 if the test fails, or 2 if the file or the package is refused.
"""

import argparse
import ast
import importlib.util
import pathlib
import sys

CAPABILITY = "get_device_capability"
CASES, CHOSEN = "testcases", "__chosen__"  # FlashMLA's list of cases, and the function that selects from it


def mentions(node, names):
    words = {getattr(part, "attr", getattr(part, "id", None)) for part in ast.walk(node)}
    return not words.isdisjoint(names)


class Choice(ast.NodeTransformer):
    """Replaces testcases by CHOSEN(testcases)."""

    def visit_Name(self, node):
        return ast.Call(ast.Name(CHOSEN, ast.Load()), [node], []) if node.id == CASES else node


class Edits(ast.NodeTransformer):
    """Removes the check of the chip and records each change in `told`, as (line, words)."""

    def __init__(self, tree, grouped_gradients):
        self.grouped_gradients, self.told = grouped_gradients, []
        self.names = {CAPABILITY}  # and what is assigned from it
        functions = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        self.of_a_case = {name for name in functions if name.startswith(("test", "run_test"))}
        self.loops = 0  # over the cases
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

    def visit_For(self, node):
        runs = any(mentions(part.func, self.of_a_case) for part in ast.walk(node) if isinstance(part, ast.Call))
        if runs and mentions(node.iter, {CASES}):
            self.loops += 1
            node.iter = Choice().visit(node.iter)
        return self.generic_visit(node)


def edited(source, file, grouped_gradients=False):
    """Returns (the code, the changes, the number of loops over the cases)."""
    tree = ast.parse(source, str(file))
    edits = Edits(tree, grouped_gradients)
    tree = ast.fix_missing_locations(edits.visit(tree))
    return compile(tree, str(file), "exec"), edits.told, edits.loops


def tell(file, told):
    for line, words in told:
        print(f"{file.name}:{line}: {words}", flush=True)


class Beside:
    """Finds and loads the modules beside the test, without the check of the chip. Caches no bytecode in files."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, _path, _target=None):
        file = self.folder / f"{name}.py"
        return importlib.util.spec_from_file_location(name, file, loader=self) if file.is_file() else None

    def create_module(self, _spec):
        return None

    def exec_module(self, module):
        file = pathlib.Path(module.__file__)
        code, told, _ = edited(file.read_text(), file)
        tell(file, told)
        exec(code, module.__dict__)


class Chosen:
    """Selects the cases to run; called with all of them."""

    def __init__(self, cases, untimed):
        self.cases, self.untimed, self.begun, self.of = cases, untimed, 0, 0

    def __call__(self, all_cases):
        self.of += len(all_cases)
        for case in all_cases[self.cases]:
            if self.untimed:
                for name, value in (("num_runs", 0), ("test_performance", False)):
                    if hasattr(case, name):
                        setattr(case, name, value)
            self.begun += 1
            yield case


def refuse(text):
    print(f"flashmla_tests.py: {text}", file=sys.stderr)
    sys.exit(2)


def slice_of(text):
    try:
        numbers = [int(part) if part else None for part in text.split(":")]
        if len(numbers) in (2, 3):
            return slice(*numbers)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"is '{text}', must be START:STOP or START:STOP:STEP, each a number or empty")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="CHECKOUT/tests/FILE.py", type=pathlib.Path)
    parser.add_argument("--untimed", action="store_true", help="check timed cases without timing them")
    parser.add_argument("--cases", type=slice_of, help="run some of the cases")
    parser.add_argument("--grouped-gradients", action="store_true", help="of grouped heads the gradients, too")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    try:
        code, told, loops = edited(options.file.read_text(), options.file, options.grouped_gradients)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        refuse(f"{options.file}: {error}; must be a test of FlashMLA's")
    if (options.untimed or options.cases) and not loops:
        refuse(f"{options.file}: has no loop over {CASES}; must have one for --untimed and --cases")
    import flash_mla

    if not hasattr(flash_mla, "workspace_bound"):  # which FlashMLA has not
        refuse(f"flash_mla is another package, {flash_mla.__file__}; name this one's folder in PYTHONPATH")
    print(f"flash_mla {flash_mla.__version__}, {pathlib.Path(flash_mla.__file__).parent}")
    tell(options.file, told)
    folder = options.file.parent.resolve()
    sys.path[0], sys.argv = str(folder), [str(options.file), *arguments]
    sys.meta_path.insert(0, Beside(folder))
    chosen = Chosen(options.cases or slice(None), options.untimed)
    try:
        exec(code, {"__name__": "__main__", "__file__": str(options.file), CHOSEN: chosen})
    finally:
        if loops:
            print(f"cases: {chosen.begun} of {chosen.of} begun{', none timed' * options.untimed}", flush=True)


if __name__ == "__main__":
    main()
