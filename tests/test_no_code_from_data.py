"""Nothing that is read can become code: the source names neither evaluation, nor pickle, nor a shell."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "tacit"
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "code",
    "codeop",
}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pickle.load",
    "torch.load",
    "torch.hub.load",
}
CALLS |= {"torch.jit.load", "torch.package.PackageImporter", "numpy.fromregex", "subprocess.getoutput", "joblib.load"}
# What a module may import by a name that it computes: one that stands in the source all the same.
BY_NAME = {"importlib.import_module"}


def offences(text):
    """Each use of something that runs what it reads, in words."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).replace("np.", "numpy.")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in CALLS:
            yield f"line {node.lineno}: calls {name}"
        if name in BY_NAME and not all(isinstance(argument, ast.Constant) for argument in node.args):
            yield f"line {node.lineno}: imports by a name that is not in the source"
        pickles = given.get("allow_pickle")
        if pickles is not None and not (isinstance(pickles, ast.Constant) and pickles.value is False):
            yield f"line {node.lineno}: allows pickle"
        if name == "numpy.load" and pickles is None:
            yield f"line {node.lineno}: does not say that no pickle is loaded"
        shell = given.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"line {node.lineno}: asks for a shell"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_runs_nothing_that_it_reads(path):
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.lib.format.read_array(file, allow_pickle=given)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "importlib.import_module(name)",
    ],
)
def test_each_such_use_would_be_seen(text):
    assert list(offences(text))
