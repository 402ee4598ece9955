"""A constructor stores: what opens, starts, loads, or changes others is a function whose name says so."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import clipscale
from tests.support.syntax import tree_of

PACKAGE = Path(clipscale.__file__).parent
Trees = dict[str, ast.Module]
Function = ast.FunctionDef
CONSTRUCTORS = ("__init__", "__post_init__")

# Statements that are there for what they do to something else.
EFFECTS = (ast.For, ast.While, ast.With, ast.Try, ast.Delete)
# Calls for their effect on the object itself.
ON_ITSELF = {"self.register_buffer", "self.resize", "vars(self).update"}
# Builtins that do more than compute a value.
IMPURE = {"__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "input", "open", "print", "setattr"}
# What constructors call of other packages, and of objects that they are given. None of them opens a
# file, starts a process or loads. `Finalize` registers itself in multiprocessing's table of what runs at exit.
PURE = {
    # containers, and objects that do nothing until another call
    *("Counter", "DefaultStager", "Event", "ExitStack", "Finalize", "Lock", "SimpleQueue", "StagingOptions", "Thread"),
    *("deque", "partial", "time.monotonic", "weakref.WeakSet"),
    # tensors, arrays and modules
    *("np.arange", "np.argsort", "np.concatenate", "np.empty", "np.ndarray", "torch.tensor", "torch.zeros"),
    *("nn.Linear", "nn.Module.__init__", "to_2tuple", "torch.cuda.Stream", "torch.optim.AdamW"),
    # questions to torch
    *("dist.get_rank", "dist.get_world_size", "torch.get_autocast_dtype", "torch.is_autocast_enabled"),
    # methods of values, of whatever value: none of the package's own classes has a method of such a name that does work
    *(".clone", ".detach", ".index", ".isprintable", ".items", ".join"),
    *(".modules", ".named_parameters", ".parameters", ".tolist", ".view"),
    # the same of one value each, since a `GradCache` has an `encode`, too
    *("c.encode", "c.encode('unicode_escape').decode", "self.register_buffer", "slots.append", "super().__init__"),
    "vars(self).update",
    # methods of the package's own objects, which compute sizes
    *(".rows", ".slot_arrays"),
}


def package_trees() -> Trees:
    paths = {path.relative_to(PACKAGE.parent): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.with_suffix("").parts): tree_of(path) for name, path in paths.items()}


def constructors_of(trees: Trees) -> Iterator[tuple[str, ast.ClassDef, Function]]:
    """Each constructor, with its module and its class."""
    for module, tree in trees.items():
        for kind in ast.walk(tree):
            if isinstance(kind, ast.ClassDef):
                yield from ((module, kind, each) for each in functions(kind) if each.name in CONSTRUCTORS)


def functions(kind: ast.ClassDef | ast.Module) -> list[Function]:
    return [node for node in kind.body if isinstance(node, Function)]


def calls(function: Function) -> Iterator[ast.Call]:
    """The calls that run with the function: not those of functions inside, and none of a generator."""
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        return
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.Lambda | Function):
            todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            yield node


def definition(trees: Trees, module: str, name: str) -> tuple[str, ast.ClassDef | Function] | None:
    """The function or the class of this name in a module, which may import it from another one of the package."""
    for node in trees[module].body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.ImportFrom) and node.module in trees and node.module != module:
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return definition(trees, node.module, imported.name)
    return None


def calls_of_others(trees: Trees, module: str, kind: ast.ClassDef | None, function: Function) -> set[str]:
    """What a function calls that the package does not define, by itself or by functions of the package.

    The constructors that it calls are left out: they are looked at by themselves.
    """
    found: set[str] = set()
    todo = [(module, kind, function)]
    seen: list[Function] = []
    while todo:
        module, kind, function = todo.pop()
        if function in seen:
            continue
        seen.append(function)
        for call in calls(function):
            own: tuple[str, ast.ClassDef | Function] | None = None
            method = ""
            match call.func:
                case ast.Name(id=name):
                    own = definition(trees, module, name)
                case ast.Attribute(value=ast.Name(id="self"), attr=method) if kind:
                    own = (module, kind)
                case ast.Attribute(value=ast.Name(id=name), attr=method):
                    own = definition(trees, module, name)
            where, defined = own or ("", None)
            if isinstance(defined, Function):
                todo.append((where, None, defined))
            elif defined and not method:
                continue
            elif defined and any(each.name == method for each in functions(defined)):
                todo.extend((where, defined, each) for each in functions(defined) if each.name == method)
            else:
                found.add(ast.unparse(call.func))
    return {name for name in found if not hasattr(builtins, name) or name in IMPURE}


def as_listed(name: str) -> str:
    """A call as PURE has it: its whole name, or that of a method of any value."""
    return name if name in PURE else f".{name.rpartition('.')[2]}"


def test_a_constructor_calls_nothing_that_opens_or_starts() -> None:
    trees = package_trees()
    listed: set[str] = set()
    for module, kind, function in constructors_of(trees):
        found = calls_of_others(trees, module, kind, function)
        unlisted = {name for name in found if as_listed(name) not in PURE}
        assert not unlisted, f"{module}.{kind.name} calls {unlisted}: move them into a function, or list them in PURE"
        listed |= {as_listed(name) for name in found}
    assert PURE - listed == set()


def test_a_constructor_changes_only_its_object() -> None:
    constructors = [*constructors_of(package_trees())]
    assert len(constructors) > 30
    for module, kind, function in constructors:
        place = f"{module}.{kind.name}"
        for node in ast.walk(function):
            assert not isinstance(node, EFFECTS), f"{place}: {type(node).__name__} in line {node.lineno}"
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node).startswith("self."), f"{place}: sets {ast.unparse(node)}"
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                assert called.endswith(".__init__") or called in ON_ITSELF, f"{place}: {called} for its effect"


def test_a_method_that_does_work_is_not_listed_by_its_name_alone() -> None:
    for call in ("cache.encode", "self.saver.update", "self.records.append"):
        assert as_listed(call) not in PURE


def test_what_a_constructor_calls_is_followed() -> None:
    """Helpers of other modules, methods, and functions of a class are; a function that is made for later is not."""
    sources = {
        "a": "def read(path):\n return load(path)\n\ndef load(path):\n return path.read_bytes()",
        "b": """
from a import read

class Opens:
    def __init__(self, path):
        self.data = self.first(path)
        self.later = lambda: path.unlink()
        self.maker = Opens.make()

    def first(self, path):
        return read(path)[0]

    def make():
        return socket.create_connection(("a", 1))
""",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    ((module, kind, function),) = constructors_of(trees)
    assert calls_of_others(trees, module, kind, function) == {"path.read_bytes", "socket.create_connection"}
