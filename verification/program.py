"""Turn kernels into programs that stop before each access to a word that other ranks may use concurrently.

A kernel is a Python function on words (torchestra/engine/native). The compiler of the product turns its
syntax tree into machine code; here the same tree becomes *blocks*, Python functions on a list of variables,
that end where an operation is *visible*: an atomic access, a fence or a futex. So the state of a rank between
two blocks is plain data, which a search can keep, compare and return to. A kernel without visible operations,
in itself or in kernels that it calls, stays one Python function.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torchestra.engine.native import atomics
from torchestra.engine.native.compiler import tree_of
from torchestra.engine.native.declarations import External, Intrinsic, KernelSource

VISIBLE = frozenset(
    {
        "load_acquire",
        "load_ordered",
        "store_release",
        "store_ordered",
        "fetch_add",
        "compare_exchange",
        "full_fence",
        "syscall",
        "load_relaxed",
        "store_relaxed",
    }
)
"""Operations before which a rank stops: what other ranks have done by then decides what they do."""

WEAKER = {
    "load_relaxed": External("load_relaxed", "i64", "i64"),
    "store_relaxed": External("store_relaxed", "i64", "i64", "i64"),
}
"""Accesses without ordering, which the kernels do not use: for mutations."""

CALL, STOP, RETURN = "call", "stop", "return"

Block = Callable[[list[int]], Any]
"""Runs on the variables; returns the next block's number, or a tuple of CALL, STOP or RETURN."""


Edit = Callable[[str, ast.FunctionDef], ast.FunctionDef]
"""Given a kernel's name and tree, returns the tree to use."""


def unchanged(name: str, tree: ast.FunctionDef) -> ast.FunctionDef:
    """Use the product's own tree."""
    return tree


class CannotModel(Exception):
    """A kernel uses a construct that this module does not know."""


@dataclass
class Program:
    """A kernel with visible operations, as blocks.

    Attributes:
        name: of the kernel.
        parameters: how many variables its arguments are; they come first.
        variables: how many it has, temporary ones included.
        blocks: its blocks; it begins with the first.
        dead: by block, the variables that are no longer read when it begins.
    """

    name: str
    parameters: int
    variables: int = 0
    blocks: list[Block] = field(default_factory=list)
    dead: list[tuple[int, ...]] = field(default_factory=list)


class Library:
    """All kernels that a model runs.

    Args:
        operations: by name, functions that stand for invisible intrinsics and C functions.
        replaced: by a kernel's name, a Python function that is called instead of it.
        edits: changes a kernel's tree before it is used; for mutations.
    """

    def __init__(
        self,
        operations: dict[str, Callable[..., Any]],
        replaced: dict[str, Callable[..., Any]],
        edit: Edit = unchanged,
    ) -> None:
        self._operations = operations
        self._replaced = replaced
        self._edit = edit
        self._trees: dict[str, ast.FunctionDef] = {}
        self._visible: dict[str, bool] = {}
        self._programs: dict[str, Program] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    def tree(self, kernel: KernelSource) -> ast.FunctionDef:
        """Return the syntax tree of a kernel, edited."""
        if kernel.name not in self._trees:
            tree = copy.deepcopy(tree_of(kernel.function))
            tree.decorator_list = []
            self._trees[kernel.name] = self._edit(kernel.name, tree)
        return self._trees[kernel.name]

    def stops(self, called: object) -> bool:
        """Return whether a call of a kernel, intrinsic or C function may reach a visible operation."""
        if isinstance(called, (Intrinsic, External)):
            return _short_name(called) in VISIBLE
        if not isinstance(called, KernelSource) or called.name in self._replaced:
            return False
        if called.name not in self._visible:
            self._visible[called.name] = False  # for recursion, which kernels do not have
            self._visible[called.name] = any(
                self.stops(resolve(called, node.func))
                for node in ast.walk(self.tree(called))
                if isinstance(node, ast.Call)
            )
        return self._visible[called.name]

    def program(self, kernel: KernelSource) -> Program:
        """Return the blocks of a kernel that has visible operations."""
        if kernel.name not in self._programs:
            made = self._programs[kernel.name] = Program(kernel.name, kernel.parameters)
            _Flattener(self, kernel, made).flatten()
        return self._programs[kernel.name]

    @property
    def programs(self) -> frozenset[str]:
        """Return the names of the kernels of which there are blocks."""
        return frozenset(self._programs)

    def function(self, called: object) -> Callable[..., Any]:
        """Return the function for a kernel without visible operations, an intrinsic or a C function."""
        if isinstance(called, (Intrinsic, External)):
            name = _short_name(called)
            if name not in self._operations:
                raise CannotModel(f"there is no model of {name}()")
            return self._operations[name]
        if not isinstance(called, KernelSource):
            assert called in (min, max, range), called
            return called
        if called.name in self._replaced:
            return self._replaced[called.name]
        if called.name not in self._functions:
            tree = copy.deepcopy(self.tree(called))
            scope = self.scope(called, tree)
            module = ast.fix_missing_locations(ast.Module([tree], []))
            exec(compile(module, called.name, "exec"), scope)
            self._functions[called.name] = scope[tree.name]
        return self._functions[called.name]

    def scope(self, kernel: KernelSource, tree: ast.AST) -> dict[str, Any]:
        """Return the values of the names in a tree that are not variables."""
        variables = kernel.function.__code__.co_varnames
        found: dict[str, Any] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name) or node.id in variables or node.id in found:
                continue
            value = resolve(kernel, node)
            plain = isinstance(value, (int, ModuleType)) or self.stops(value)
            found[node.id] = value if plain else self.function(value)
        return found


def _short_name(called: Intrinsic | External) -> str:
    return called.name.removeprefix("intrinsic.")


def resolve(kernel: KernelSource, node: ast.expr) -> Any:
    """Return the value of a name in the module of a kernel."""
    if isinstance(node, ast.Attribute):
        return getattr(resolve(kernel, node.value), node.attr)
    if isinstance(node, ast.Name):
        for names in (kernel.function.__globals__, vars(builtins), vars(atomics), WEAKER):
            if node.id in names:
                return names[node.id]
    raise CannotModel(f"{kernel.name}: {ast.unparse(node)} is not known")


def live_variables(texts: Sequence[str]) -> list[set[int]]:
    """Return, by block, the variables that may be read before they are written (a data-flow analysis)."""
    reads: list[set[int]] = []
    writes: list[set[int]] = []
    follows: list[set[int]] = []
    for text in texts:
        tree = ast.parse(text)
        used, successors = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                used.add(_place(node.target))
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                used.add(_place(node))
            elif isinstance(node, ast.Return):
                successors |= _successors(node.value)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        set_at_once = {
            _place(statement.targets[0])
            for statement in definition.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript)
        }
        reads.append(used - {-1})
        writes.append(set_at_once - used)
        follows.append(successors)
    live = [set(each) for each in reads]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(texts))):
            after = set().union(*(live[each] for each in follows[number])) - writes[number]
            if not after <= live[number]:
                live[number] |= after
                changed = True
    return live


def _place(node: ast.expr) -> int:
    """Return the number of a variable; -1 for another expression."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "V":
        return int(ast.literal_eval(node.slice))
    return -1


def _successors(value: ast.expr | None) -> set[int]:
    if isinstance(value, ast.Constant):
        return {int(ast.literal_eval(value))}
    if isinstance(value, ast.IfExp):
        return _successors(value.body) | _successors(value.orelse)
    if isinstance(value, ast.Tuple) and isinstance(value.elts[0], ast.Name):
        return _successors(value.elts[4]) if value.elts[0].id in ("CALL", "STOP") else set()
    return set()


class _Flattener:
    """Writes the blocks of one kernel."""

    def __init__(self, library: Library, kernel: KernelSource, program: Program) -> None:
        self._library = library
        self._kernel = kernel
        self._program = program
        self._tree = library.tree(kernel)
        self._places = {name: number for number, name in enumerate(kernel.function.__code__.co_varnames)}
        self._variables = len(self._places)
        self._blocks: list[list[str] | None] = []
        self._now = self._new_block()
        self._loops: list[tuple[int, int]] = []  # where `continue` and `break` lead
        self._called: list[object] = []

    def flatten(self) -> None:
        self._blocks[self._now] = []
        self._statements(self._tree.body)
        self._write("return (RETURN, 0)")
        scope = self._library.scope(self._kernel, self._tree)
        scope.update(CALL=CALL, STOP=STOP, RETURN=RETURN, CALLED=self._called)
        texts = [
            "\n".join(["def block(V):", *(f"    {line}" for line in lines or ["pass"])])
            for lines in self._blocks
        ]
        for number, text in enumerate(texts):
            exec(compile(text, f"<{self._kernel.name} {number}>", "exec"), scope)
            self._program.blocks.append(scope["block"])
        self._program.variables = self._variables
        every = range(self._variables)
        self._program.dead = [tuple(i for i in every if i not in live) for live in live_variables(texts)]

    # Blocks

    def _new_block(self) -> int:
        self._blocks.append(None)
        return len(self._blocks) - 1

    def _begin(self, number: int) -> None:
        self._now, self._blocks[number] = number, []

    def _write(self, text: str) -> None:
        lines = self._blocks[self._now]
        assert lines is not None
        lines.extend(text.splitlines())

    def _temporary(self) -> str:
        self._variables += 1
        return f"V[{self._variables - 1}]"

    # Statements

    def _stops(self, node: ast.AST) -> bool:
        return any(
            isinstance(each, ast.Call) and self._library.stops(resolve(self._kernel, each.func))
            for each in ast.walk(node)
        )

    def _statements(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if not self._stops(statement):
                self._write(self._plain(statement))
            elif isinstance(statement, ast.Expr):
                self._write(self._value(statement.value))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                value = self._value(statement.value)
                self._write(f"{self._text(statement.targets[0])} = {value}")
            elif isinstance(statement, ast.AugAssign):
                value = self._value(statement.value)
                operator = ast.unparse(ast.BinOp(ast.Name("_"), statement.op, ast.Name("_")))[2:-2]
                self._write(f"{self._text(statement.target)} {operator}= {value}")
            elif isinstance(statement, ast.Return) and statement.value is not None:
                self._write(f"return (RETURN, {self._value(statement.value)})")
                self._begin(self._new_block())
            elif isinstance(statement, ast.If):
                self._if(statement)
            elif isinstance(statement, ast.While):
                self._while(statement)
            elif isinstance(statement, ast.For):
                self._for(statement)
            else:
                raise CannotModel(f"{self._kernel.name}:{statement.lineno}: {ast.unparse(statement)}")

    def _if(self, statement: ast.If) -> None:
        test = self._value(statement.test)
        then, otherwise, after = (self._new_block() for _ in range(3))
        self._write(f"return {then} if {test} else {otherwise}")
        for block, statements in ((then, statement.body), (otherwise, statement.orelse)):
            self._begin(block)
            self._statements(statements)
            self._write(f"return {after}")
        self._begin(after)

    def _while(self, statement: ast.While) -> None:
        test, body, after = (self._new_block() for _ in range(3))
        self._write(f"return {test}")
        self._begin(test)
        self._write(f"return {body} if {self._value(statement.test)} else {after}")
        self._body(statement, body, test, after)

    def _for(self, statement: ast.For) -> None:
        assert isinstance(statement.iter, ast.Call), "kernels loop over range()"
        given = [self._value(each) for each in statement.iter.args]
        start, stop, step = (
            ("0", given[0], "1")
            if len(given) == 1
            else (given[0], given[1], given[2] if len(given) > 2 else "1")
        )
        counter, end = self._temporary(), self._temporary()
        test, body, count, after = (self._new_block() for _ in range(4))
        self._write(f"{counter} = {start}\n{end} = {stop}\nreturn {test}")
        self._begin(test)
        more = f"{counter} < {end}" if not step.startswith("-") else f"{counter} > {end}"
        self._write(f"if not ({more}):\n    {counter} = {end} = 0\n    return {after}")
        self._write(f"{self._text(statement.target)} = {counter}\nreturn {body}")
        self._begin(count)
        self._write(f"{counter} += {step}\nreturn {test}")
        self._body(statement, body, count, after)

    def _body(self, statement: ast.While | ast.For, body: int, again: int, after: int) -> None:
        self._loops.append((again, after))
        self._begin(body)
        self._statements(statement.body)
        self._write(f"return {again}")
        self._loops.pop()
        self._begin(after)

    def _plain(self, statement: ast.stmt) -> str:
        """Return a statement without visible operations as Python code."""
        leaving = _Leaving(self._loops[-1] if self._loops else None)
        return ast.unparse(ast.fix_missing_locations(self._named(leaving.visit(copy.deepcopy(statement)))))

    def _named(self, node: ast.AST) -> ast.AST:
        return _Places(self._places).visit(node)  # type: ignore[no-any-return]

    def _text(self, node: ast.expr) -> str:
        return ast.unparse(self._named(copy.deepcopy(node)))

    # Expressions: parts before a visible operation are computed before it, as in Python.

    def _value(self, node: ast.expr) -> str:
        if not self._stops(node):
            return f"({self._text(node)})"
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.UnaryOp):
            return f"({ast.unparse(ast.UnaryOp(node.op, ast.Name('_')))[:-1]}{self._value(node.operand)})"
        if isinstance(node, ast.BinOp):
            left, right = self._in_order([node.left, node.right])
            return (
                "("
                + ast.unparse(ast.BinOp(ast.Name("_l"), node.op, ast.Name("_r")))
                .replace("_l", left)
                .replace("_r", right)
                + ")"
            )
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._in_order([node.left, node.comparators[0]])
            shape = ast.unparse(ast.Compare(ast.Name("_l"), node.ops, [ast.Name("_r")]))
            return "(" + shape.replace("_l", left).replace("_r", right) + ")"
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        if isinstance(node, ast.IfExp):
            return self._either(node)
        raise CannotModel(f"{self._kernel.name}:{node.lineno}: {ast.unparse(node)}")

    def _in_order(self, nodes: Sequence[ast.expr]) -> list[str]:
        found = []
        for number, node in enumerate(nodes):
            value = self._value(node)
            if any(self._stops(later) for later in nodes[number + 1 :]):
                kept = self._temporary()
                self._write(f"{kept} = {value}")
                value = kept
            found.append(value)
        return found

    def _call(self, node: ast.Call) -> str:
        called = resolve(self._kernel, node.func)
        arguments = self._in_order(node.args)
        words = "(" + "".join(f"{each}, " for each in arguments) + ")"
        if not self._library.stops(called):
            return f"{ast.unparse(node.func)}{words}"
        result, after = self._temporary(), self._new_block()
        place = int(result[2:-1])
        if isinstance(called, KernelSource):
            self._called.append(self._library.program(called))
            callee = f"CALLED[{len(self._called) - 1}]"
            self._write(f"return (CALL, {callee}, {words}, {place}, {after})")
        else:
            line = f"{self._kernel.name}:{node.lineno}"
            self._write(f"return (STOP, {_short_name(called)!r}, {words}, {place}, {after}, {line!r})")
        self._begin(after)
        return result

    def _bool(self, node: ast.BoolOp) -> str:
        result, after = self._temporary(), self._new_block()
        for number, operand in enumerate(node.values):
            self._write(f"{result} = {self._value(operand)}")
            if number < len(node.values) - 1:
                more = self._new_block()
                yes, no = (after, more) if isinstance(node.op, ast.Or) else (more, after)
                self._write(f"return {yes} if {result} else {no}")
                self._begin(more)
        self._write(f"return {after}")
        self._begin(after)
        return result

    def _either(self, node: ast.IfExp) -> str:
        result, then, otherwise, after = self._temporary(), *(self._new_block() for _ in range(3))
        self._write(f"return {then} if {self._value(node.test)} else {otherwise}")
        for block, operand in ((then, node.body), (otherwise, node.orelse)):
            self._begin(block)
            self._write(f"{result} = {self._value(operand)}\nreturn {after}")
        self._begin(after)
        return result


class _Places(ast.NodeTransformer):
    """Replaces the names of variables with elements of the list of variables."""

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._places:
            return node
        return ast.Subscript(ast.Name("V"), ast.Constant(self._places[node.id]), node.ctx)


class _Leaving(ast.NodeTransformer):
    """Makes ``return``, and ``break`` and ``continue`` of the loop around, the end of a block."""

    def __init__(self, loop: tuple[int, int] | None) -> None:
        self._loop = loop
        self._depth = 0

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        value = node.value or ast.Constant(0)
        return ast.Return(ast.Tuple([ast.Name("RETURN"), value], ast.Load()))

    def _inner(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_For = visit_While = _inner

    def visit_Break(self, node: ast.Break) -> ast.stmt:
        return node if self._depth or self._loop is None else ast.Return(ast.Constant(self._loop[1]))

    def visit_Continue(self, node: ast.Continue) -> ast.stmt:
        return node if self._depth or self._loop is None else ast.Return(ast.Constant(self._loop[0]))
