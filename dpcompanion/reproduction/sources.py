"""What a record depends on: the code behind an experiment, found in the syntax trees of its own modules.

An experiment is its function and whatever that uses by name, directly or through others, within the modules of the
papers: functions, classes, and module constants such as a table of loaders.  The presets are none of it, since a
record's configuration is compared apart: what a decorator `@experiment(...)` holds is left out, and of the classes of
a configuration the methods alone count, unless code names the class.  (A preset that the code itself looks something
up in is code.)  Nor is the library's code part of it: a record tells its version and commit.

The hash is blind to comments, docstrings, annotations, layout, the order of definitions and the module that they stand
in.  Every module is read and parsed once a process, until `forget`.

>>> from dpcompanion.reproduction.papers.idp_sgd import accounts
>>> [name.rpartition(".")[2] for name in closure(accounts.figure_4)]
['figure_4', 'parameters']
"""

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pathlib
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

OWN = "dpcompanion.reproduction.papers"
#: A definition: (module, name); the name "*" is all of a module, "Class()" are the methods of a class.
Key = tuple[str, str]
_REGISTERING = {"experiment", "finding"}
_FIELDS_OF_THEIR_OWN = ("ClassVar", "InitVar", "KW_ONLY")


def code_hash(function: Callable[..., Any], *configs: Any) -> str:
    """A sha256 of the code that `function` depends on, see `closure`."""
    found = sorted({definition.text for definition in closure(function, *configs).values()})
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def forget() -> None:
    """Read and parse every module anew, when it is asked for next."""
    _module.cache_clear()
    _definition.cache_clear()


def closure(function: Callable[..., Any], *configs: Any) -> "dict[str, Definition]":
    """What a function depends on within the papers' modules and its own: {"module.name": `Definition`}, sorted.

    Args:
        function: a function, or a class.
        configs: what it is called with (dataclasses, also within dicts and tuples): their methods count.
    """
    function = inspect.unwrap(function)
    home = function.__module__
    root = (home, function.__qualname__)
    at_top = _has_source(home) and function.__qualname__ in _module(home).bound
    found = {} if at_top else {root: _local(function)}
    wanted = [root] if at_top else list(found[root].uses)
    for kind in {type(each) for config in configs for each in _dataclasses_in(config)}:
        wanted += [
            (base.__module__, f"{base.__qualname__}()") for base in kind.__mro__ if _is_own(base.__module__, home)
        ]
    while wanted:
        place = wanted.pop()
        if place not in found and _is_own(place[0], home):
            found[place] = _definition(*place)
            wanted += found[place].uses
    # A class without methods says nothing.
    return {f"{module}.{name}": found[module, name] for module, name in sorted(found) if found[module, name].text}


@dataclasses.dataclass(frozen=True)
class Definition:
    """A top-level definition: its syntax tree as `text`, and the (module, name) of each definition that it uses."""

    text: str
    uses: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module's top-level statements by the names that they bind, and what it imports: name -> (module, name there).

    A name of None there is the module itself.
    """

    name: str
    bound: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str | None]]


def _is_own(module: str, home: str) -> bool:
    return module in (OWN, home) or module.startswith(OWN + ".")


def _has_source(module: str) -> bool:
    return str(getattr(sys.modules.get(module), "__file__", None)).endswith(".py")


@functools.cache
def _module(name: str) -> _Module:
    file = pathlib.Path(str(importlib.import_module(name).__file__))  # all of these have one
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = _Module(name, {}, {})
    for statement in _bare(ast.parse(file.read_text(encoding="utf-8"))).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [statement.name]
        else:
            names = [
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
            found.imported.update(_imports(statement, package))
        for bound in dict.fromkeys(names):
            found.bound.setdefault(bound, []).append(statement)
    return found


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """(name, (module, name there)) for every import within a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or top, (top, None)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((alias.asname or alias.name, (base, alias.name)) for alias in node.names)


def _resolve(module: _Module, name: str) -> Key | None:
    """The (module, name) of what a name of a module stands for; None where that is no code of the papers."""
    if name in module.bound:
        return module.name, name
    target, there = module.imported.get(name, ("", None))
    if not _is_own(target, module.name):
        return None
    if there is None:
        return target, "*"
    found = _resolve(_module(target), there)
    spec = importlib.util.find_spec(target)
    if found is None and spec is not None and spec.submodule_search_locations is not None:
        if importlib.util.find_spec(f"{target}.{there}"):
            return f"{target}.{there}", "*"
    return found


@functools.cache
def _definition(module: str, name: str) -> Definition:
    """The definition of a name; "Class()" are the methods of a class, "*" is all of a module."""
    here = _module(module)
    if name == "*":
        return Definition("", tuple((module, bound) for bound in here.bound))
    nodes = here.bound.get(name.removesuffix("()"), [])
    if name.endswith("()"):
        nodes = [
            each
            for node in nodes
            if isinstance(node, ast.ClassDef)
            for each in node.body
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
    return Definition(" ".join(map(_canonical, nodes)), _uses(here, nodes))


def _local(function: Callable[..., Any]) -> Definition:
    """The definition of a function that stands in another, or in no module's file."""
    nodes = _bare(ast.parse(textwrap.dedent(inspect.getsource(function)))).body
    here = _module(function.__module__) if _has_source(function.__module__) else _Module("", {}, {})
    return Definition(" ".join(map(_canonical, nodes)), _uses(here, nodes))


def _uses(module: _Module, nodes: Sequence[ast.stmt]) -> tuple[Key, ...]:
    """What syntax trees use by global names, also through a module's name such as `second.examples`."""
    found: set[Key] = set()
    for node in nodes:
        everything = list(ast.walk(node))
        used = [_resolve(module, name) for name in _globals(symtable.symtable(ast.unparse(node), "here", "exec"))]
        package = module.name.rpartition(".")[0]
        inside = _Module(module.name, {}, dict(_imports(node, package)))
        used += [_resolve(inside, name) for name in inside.imported]
        through = {
            name: target[0]
            for name in module.imported
            if (target := _resolve(module, name)) in used and target and target[1] == "*"
        }
        attributes = [
            (each, each.value)
            for each in everything
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in through
        ]
        bare = {
            each.id
            for each in everything
            if isinstance(each, ast.Name) and each.id in through and not any(each is value for _, value in attributes)
        }
        for attribute, value in attributes:
            used.append(_resolve(_module(through[value.id]), attribute.attr))
        whole = {(through[name], "*") for name in through.keys() - bare}
        found |= {place for place in used if place and place not in whole}
    return tuple(sorted(found))


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The global names that code refers to, by Python's own rules of scope."""
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global())
    }
    return names.union(*map(_globals, table.get_children()))


_Defining = TypeVar("_Defining", bound=ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


class _Bare(ast.NodeTransformer):
    """Removes docstrings, annotations, and the decorators that register."""

    def _definition(self, node: _Defining) -> _Defining:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.decorator_list = [each for each in node.decorator_list if _last_name(each) not in _REGISTERING]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(self._definition(node))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for each in node.body:
            if isinstance(each, ast.AnnAssign):  # a field, whatever its type is called
                if not any(word in ast.unparse(each.annotation) for word in _FIELDS_OF_THEIR_OWN):
                    each.annotation = ast.Constant(None)
        return self.generic_visit(self._definition(node))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.annotation, ast.Constant) and node.annotation.value is None or node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _bare(tree: ast.Module) -> ast.Module:
    return ast.fix_missing_locations(_Bare().visit(tree))


def _last_name(decorator: ast.expr) -> str | None:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _canonical(node: Any) -> str:
    """A syntax tree as text, the same for all versions of Python that have the syntax."""
    if isinstance(node, ast.AST):
        fields = (
            (name, value)
            for name, value in ast.iter_fields(node)
            if name not in ("ctx", "kind", "type_comment") and value is not None and value != []
        )
        return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value)}' for name, value in fields)})"
    return f"[{', '.join(map(_canonical, node))}]" if isinstance(node, list) else repr(node)


def _dataclasses_in(value: Any) -> Iterator[Any]:
    """The dataclass instances within a configuration."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _dataclasses_in(each)
