"""Compiles kernels: the syntax tree of a Python function on words becomes LLVM's intermediate representation.

The language is what the kernels need: words and truth values; `if`, `while`, `for … in range(…)`, `break`,
`continue`, `return`; arithmetic, comparisons, `and`, `or`, `not`, `a if b else c`, `in (a, b)`, min() and
max(); calls of kernels, intrinsics and C functions. A name that is not a variable is looked up, when the
kernel is compiled, in the module of the function: an int becomes a constant. All else is a
:class:`KernelError`, which names the line.

As in Python `//` and `%` round downwards, `>>` keeps the sign, and a loop's bounds are looked at once.
Unlike in Python sums wrap around at 64 bits, a variable that was never set is 0, a function without
`return` returns 0, and a division by 0 is one by 1.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
import builtins as python_builtins
import functools
import linecache
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from llvmlite import ir

from torchestra.engine.native import intrinsic_code
from torchestra.engine.native.builtins import PROTOTYPES, write_builtin
from torchestra.engine.native.declarations import External, Intrinsic, KernelSource

_WORD, _TRUTH = ir.IntType(64), ir.IntType(1)
_TYPES = {"i64": _WORD, "i32": ir.IntType(32), "void": ir.VoidType()}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "ashr",
}


class KernelError(Exception):
    """A kernel is written with something that the compiler does not know."""


class Program:
    """The functions that are compiled together.

    Args:
        machine: the processor's architecture, as ``platform.machine()`` names it.

    Attributes:
        module: LLVM's module, to which more may be added.
        machine: as given.
    """

    def __init__(self, machine: str) -> None:
        self.module = ir.Module("torchestra")
        self.machine = machine
        self._functions: dict[FunctionType | Callable[..., Any], ir.Function] = {}
        self._waiting: list[tuple[KernelSource, ir.Function]] = []

    def add(self, kernel: KernelSource | Intrinsic) -> ir.Function:
        """Compile a kernel and all that it calls; it is found by its name, and has a builtin."""
        found = self.intrinsic(kernel) if isinstance(kernel, Intrinsic) else self.function(kernel)
        found.linkage = ""
        while self._waiting:
            source, function = self._waiting.pop()
            _FunctionCompiler(self, source, function).compile()
        write_builtin(self.module, kernel.name, found, releases=not kernel.keeps_interpreter)
        return found

    def intrinsic(self, declared: Intrinsic) -> ir.Function:
        """Return a function that does one operation, for Python to call."""
        kind = ir.FunctionType(_WORD, [_WORD] * declared.parameters)
        function = ir.Function(self.module, kind, declared.name)
        builder = ir.IRBuilder(function.append_basic_block())
        result = intrinsic_code.write(self.machine, builder, declared.__name__, list(function.args))
        builder.ret(_WORD(0) if result is None else result)
        return function

    def function(self, kernel: KernelSource) -> ir.Function:
        """Return the function of a kernel, which is compiled later if it has not been."""
        if kernel.function not in self._functions:
            name = self.module.get_unique_name(kernel.name)
            kind = ir.FunctionType(_WORD, [_WORD] * kernel.parameters)
            function = ir.Function(self.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("nounwind")
            self._functions[kernel.function] = function
            self._waiting.append((kernel, function))
        return self._functions[kernel.function]

    def external(self, declared: External) -> ir.Function:
        """Return the declaration of a function of the C library."""
        found = self.module.globals.get(declared.name)
        if found is None:
            parameters = [_TYPES[each] for each in declared.parameters]
            kind = PROTOTYPES.get(declared.name) or ir.FunctionType(_TYPES[declared.result], parameters)
            found = ir.Function(self.module, kind, declared.name)
        return found


@functools.cache
def _functions_of(lines: tuple[str, ...]) -> dict[tuple[str, int], ast.FunctionDef]:
    """Return the functions of a source file by name and first line, that of the first decorator."""
    nodes = (node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef))
    return {
        (node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)])): node
        for node in nodes
    }


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return the syntax tree of a function, as its module's file has it. KernelError: it is not there."""
    code = function.__code__
    lines = tuple(linecache.getlines(code.co_filename))
    try:
        return _functions_of(lines)[code.co_name, code.co_firstlineno]
    except KeyError:
        site = f"{code.co_filename}:{code.co_firstlineno}"
        raise KernelError(
            f"{site}: the source of {code.co_name}() is not there, or has changed since its import"
        ) from None


class _FunctionCompiler:
    """Writes the code of one kernel."""

    def __init__(self, program: Program, source: KernelSource, function: ir.Function) -> None:
        self._program = program
        self._python = source.function
        self._function = function
        self._tree = tree_of(source.function)
        entry = function.append_basic_block("entry")
        self._variables = ir.IRBuilder(entry)  # allocates variables, before all code
        self._builder = ir.IRBuilder(function.append_basic_block("body"))
        self._slots: dict[str, ir.AllocaInstr] = {}
        self._loops: list[tuple[ir.Block, ir.Block]] = []  # where `continue` and `break` lead

    def compile(self) -> None:
        body = self._builder.block
        for name, argument in zip(self._tree.args.args, self._function.args, strict=True):
            self._variables.store(argument, self._slot(name.arg))
        self._block(self._tree.body)
        if not self._builder.block.is_terminated:
            self._builder.ret(_WORD(0))
        self._variables.branch(body)

    def _error(self, node: ast.AST, what: str) -> KernelError:
        site = f"{self._python.__code__.co_filename}:{getattr(node, 'lineno', 0)}"
        return KernelError(
            f"{site}: {what} (see engine/native/compiler.py for what kernels are written with)"
        )

    def _slot(self, name: str) -> ir.AllocaInstr:
        if name not in self._slots:
            slot = self._variables.alloca(_WORD, name=name)
            self._variables.store(_WORD(0), slot)
            self._slots[name] = slot
        return self._slots[name]

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self._builder.block.is_terminated:
                return
            write = getattr(self, f"_write_{type(statement).__name__}", None)
            if write is None:
                raise self._error(statement, f"a kernel has no {type(statement).__name__}")
            write(statement)

    def _write_Pass(self, _: ast.Pass) -> None:
        pass

    def _write_Expr(self, statement: ast.Expr) -> None:
        if not (isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)):
            self._value(statement.value)

    def _write_Assign(self, statement: ast.Assign) -> None:
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=True))
            else:
                pairs = [(target, statement.value)]
            values = [self._word(value) for _, value in pairs]
            for (name, _), value in zip(pairs, values, strict=True):
                self._builder.store(value, self._target(name))

    def _write_AugAssign(self, statement: ast.AugAssign) -> None:
        slot = self._target(statement.target)
        before, value = self._builder.load(slot), self._word(statement.value)
        self._builder.store(self._arithmetic(statement, statement.op, before, value), slot)

    def _target(self, target: ast.expr) -> ir.AllocaInstr:
        if not isinstance(target, ast.Name):
            raise self._error(target, "only variables are assigned to")
        return self._slot(target.id)

    def _write_Return(self, statement: ast.Return) -> None:
        self._builder.ret(_WORD(0) if statement.value is None else self._word(statement.value))

    def _write_If(self, statement: ast.If) -> None:
        builder = self._builder
        condition = self._truth(statement.test)
        then, otherwise, after = (builder.append_basic_block(name) for name in ("then", "else", "after"))
        builder.cbranch(condition, then, otherwise)
        for block, statements in ((then, statement.body), (otherwise, statement.orelse)):
            builder.position_at_end(block)
            self._block(statements)
            if not builder.block.is_terminated:
                builder.branch(after)
        builder.position_at_end(after)

    def _write_While(self, statement: ast.While) -> None:
        builder = self._builder
        test, body, after = (builder.append_basic_block(name) for name in ("while", "do", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        builder.cbranch(self._truth(statement.test), body, after)
        self._loop(statement, body, test, test, after)

    def _write_For(self, statement: ast.For) -> None:
        """Count a hidden word up, of which the variable gets a copy, as range() does."""
        builder = self._builder
        start, stop, step = self._range(statement.iter)
        counter = self._variables.alloca(_WORD)
        builder.store(start, counter)
        test, body, count, after = (
            builder.append_basic_block(name) for name in ("for", "do", "count", "after")
        )
        builder.branch(test)
        builder.position_at_end(test)
        now = builder.load(counter)
        builder.cbranch(builder.icmp_signed("<" if step > 0 else ">", now, stop), body, after)
        builder.position_at_end(body)
        builder.store(now, self._target(statement.target))
        builder.position_at_end(count)
        builder.store(builder.add(builder.load(counter), _WORD(step), flags=["nsw"]), counter)
        builder.branch(test)
        self._loop(statement, body, count, count, after)

    def _loop(
        self, statement: ast.For | ast.While, body: ir.Block, again: ir.Block, end: ir.Block, after: ir.Block
    ) -> None:
        if statement.orelse:
            raise self._error(statement, "a loop of a kernel has no else")
        self._loops.append((again, after))
        self._builder.position_at_end(body)
        self._block(statement.body)
        if not self._builder.block.is_terminated:
            self._builder.branch(end)
        self._loops.pop()
        self._builder.position_at_end(after)

    def _range(self, node: ast.expr) -> tuple[Any, Any, int]:
        if not (isinstance(node, ast.Call) and self._looked_up(node.func) is range and not node.keywords):
            raise self._error(node, "a kernel loops over a range() only")
        words = [self._word(each) for each in node.args]
        step = words[2].constant if len(words) == 3 and isinstance(words[2], ir.Constant) else 1
        if len(words) == 3 and not isinstance(words[2], ir.Constant):
            raise self._error(node, "the step of a range() must be a constant")
        start = words[0] if len(words) > 1 else _WORD(0)
        return start, words[min(1, len(words) - 1)], step

    def _write_Continue(self, _: ast.Continue) -> None:
        self._builder.branch(self._loops[-1][0])

    def _write_Break(self, _: ast.Break) -> None:
        self._builder.branch(self._loops[-1][1])

    # Expressions: a value is a word or a truth value.

    def _word(self, node: ast.expr) -> Any:
        return self._as_word(self._value(node))

    def _truth(self, node: ast.expr) -> Any:
        return self._as_truth(self._value(node))

    def _as_word(self, value: Any) -> Any:
        if value.type == _TRUTH:
            return (
                _WORD(value.constant) if isinstance(value, ir.Constant) else self._builder.zext(value, _WORD)
            )
        return value

    def _as_truth(self, value: Any) -> Any:
        return value if value.type == _TRUTH else self._builder.icmp_signed("!=", value, _WORD(0))

    def _value(self, node: ast.expr) -> Any:
        write = getattr(self, f"_value_{type(node).__name__}", None)
        if write is None:
            raise self._error(node, f"a kernel has no {type(node).__name__}")
        return write(node)

    def _value_Constant(self, node: ast.Constant) -> Any:
        return self._constant(node, node.value)

    def _constant(self, node: ast.AST, value: Any) -> Any:
        if isinstance(value, bool):
            return _TRUTH(int(value))
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return _WORD(int(value))
        raise self._error(node, f"{value!r} is no 64-bit word")

    def _value_Name(self, node: ast.Name) -> Any:
        if node.id in self._python.__code__.co_varnames:
            return self._builder.load(self._slot(node.id))
        return self._constant(node, self._looked_up(node))

    def _value_Attribute(self, node: ast.Attribute) -> Any:
        return self._constant(node, self._looked_up(node))

    def _looked_up(self, node: ast.expr) -> Any:
        """Return what a name means in the module of the function."""
        if isinstance(node, ast.Attribute):
            module = self._looked_up(node.value)
            if isinstance(module, ModuleType) and hasattr(module, node.attr):
                return getattr(module, node.attr)
        elif isinstance(node, ast.Name):
            python = self._python
            if node.id in python.__code__.co_freevars:
                cells = python.__closure__ or ()
                return cells[python.__code__.co_freevars.index(node.id)].cell_contents
            for scope in (python.__globals__, vars(python_builtins)):
                if node.id in scope:
                    return scope[node.id]
        raise self._error(node, f"{ast.unparse(node)} is not known")

    def _value_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self._word(node.left), self._word(node.right)
        if isinstance(left, ir.Constant) and isinstance(right, ir.Constant):
            constant = ast.BinOp(ast.Constant(left.constant), node.op, ast.Constant(right.constant))
            return self._constant(node, eval(ast.unparse(constant)))
        return self._arithmetic(node, node.op, left, right)

    def _arithmetic(self, node: ast.AST, operator: ast.operator, left: Any, right: Any) -> Any:
        name = _ARITHMETIC.get(type(operator))
        if name is not None:
            return getattr(self._builder, name)(left, right)
        if isinstance(operator, (ast.FloorDiv, ast.Mod)):
            return self._divide(left, right, isinstance(operator, ast.Mod))
        raise self._error(node, f"a kernel has no {type(operator).__name__}")

    def _divide(self, left: Any, right: Any, remainder: bool) -> Any:
        """Round downwards, where the processor rounds towards 0."""
        builder, zero = self._builder, _WORD(0)
        if isinstance(right, ir.Constant):
            power = right.constant
            if power > 0 and power & (power - 1) == 0:
                return (
                    builder.and_(left, _WORD(power - 1))
                    if remainder
                    else builder.ashr(left, _WORD(power.bit_length() - 1))
                )
        else:
            right = builder.select(builder.icmp_signed("==", right, zero), _WORD(1), right)
        quotient = builder.sdiv(left, right)
        rest = builder.sub(left, builder.mul(quotient, right))
        signs_differ = builder.icmp_signed("<", builder.xor(rest, right), zero)
        too_high = builder.and_(builder.icmp_signed("!=", rest, zero), signs_differ)
        if remainder:
            return builder.select(too_high, builder.add(rest, right), rest)
        return builder.sub(quotient, builder.zext(too_high, _WORD))

    def _value_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self._builder.not_(self._truth(node.operand))
        value = self._word(node.operand)
        if isinstance(value, ir.Constant):
            return _WORD(-value.constant if isinstance(node.op, ast.USub) else ~value.constant)
        if isinstance(node.op, ast.USub):
            return self._builder.neg(value)
        if isinstance(node.op, ast.Invert):
            return self._builder.not_(value)
        raise self._error(node, f"a kernel has no {type(node.op).__name__}")

    def _value_Compare(self, node: ast.Compare) -> Any:
        left, verdict = self._word(node.left), None
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            if verdict is not None and any(isinstance(each, ast.Call) for each in ast.walk(operand)):
                raise self._error(node, "a chain of comparisons calls nothing after the first")
            if isinstance(operator, (ast.In, ast.NotIn)):
                found = self._is_in(left, operand)
                found = found if isinstance(operator, ast.In) else self._builder.not_(found)
            elif type(operator) in _COMPARISONS:
                right = self._word(operand)
                found = self._builder.icmp_signed(_COMPARISONS[type(operator)], left, right)
                left = right
            else:
                raise self._error(node, f"a kernel has no {type(operator).__name__}")
            verdict = found if verdict is None else self._builder.and_(verdict, found)
        return verdict

    def _is_in(self, value: Any, node: ast.expr) -> Any:
        if not isinstance(node, ast.Tuple):
            raise self._error(node, "the right side of `in` must be written as a tuple")
        equal = [self._builder.icmp_signed("==", value, self._word(each)) for each in node.elts]
        return functools.reduce(self._builder.or_, equal)

    def _value_BoolOp(self, node: ast.BoolOp) -> Any:
        """The first operand that decides, the others unseen; a truth value if all of them are."""
        builder = self._builder
        after = builder.append_basic_block("decided")
        found: list[tuple[Any, ir.Block]] = []
        for number, operand in enumerate(node.values):
            value = self._value(operand)
            if number < len(node.values) - 1:
                decides = self._as_truth(value)
                found.append((value, builder.block))
                more = builder.append_basic_block("more")
                yes, no = (after, more) if isinstance(node.op, ast.Or) else (more, after)
                builder.cbranch(decides, yes, no)
                builder.position_at_end(more)
            else:
                found.append((value, builder.block))
                builder.branch(after)
        builder.position_at_end(after)
        return self._joined(node, found)

    def _value_IfExp(self, node: ast.IfExp) -> Any:
        builder = self._builder
        condition = self._truth(node.test)
        then, otherwise, after = (builder.append_basic_block(name) for name in ("then", "else", "either"))
        builder.cbranch(condition, then, otherwise)
        found = []
        for block, operand in ((then, node.body), (otherwise, node.orelse)):
            builder.position_at_end(block)
            value = self._value(operand)
            found.append((value, builder.block))
            builder.branch(after)
        builder.position_at_end(after)
        return self._joined(node, found)

    def _joined(self, node: ast.expr, found: list[tuple[Any, ir.Block]]) -> Any:
        """Return what came from one of several blocks; words, where some of it are."""
        kind = _TRUTH if all(value.type == _TRUTH for value, _ in found) else _WORD
        phi = self._builder.phi(kind)
        for value, block in found:
            if value.type != kind:
                writer = ir.IRBuilder(block)
                writer.position_before(block.terminator)
                value = _WORD(value.constant) if isinstance(value, ir.Constant) else writer.zext(value, kind)
            phi.add_incoming(value, block)
        return phi

    def _value_Call(self, node: ast.Call) -> Any:
        called = self._looked_up(node.func)
        if node.keywords:
            raise self._error(node, "arguments are given by position")
        words = [self._word(each) for each in node.args]
        if called in (min, max):
            return functools.reduce(functools.partial(self._extreme, "<" if called is min else ">"), words)
        if not isinstance(called, (KernelSource, Intrinsic, External)):
            raise self._error(node, f"a kernel does not call {ast.unparse(node.func)}")
        wanted = called.parameters if isinstance(called.parameters, int) else len(called.parameters)
        if len(words) != wanted:
            raise self._error(node, f"{ast.unparse(node.func)} takes {wanted} arguments, not {len(words)}")
        if isinstance(called, KernelSource):
            return self._builder.call(self._program.function(called), words)
        if isinstance(called, Intrinsic):
            value = intrinsic_code.write(self._program.machine, self._builder, called.__name__, words)
            return _WORD(0) if value is None else value
        return self._external(called, words)

    def _extreme(self, sign: str, left: Any, right: Any) -> Any:
        return self._builder.select(self._builder.icmp_signed(sign, left, right), left, right)

    def _external(self, called: External, words: list[Any]) -> Any:
        function = self._program.external(called)
        given = [
            self._converted(word, kind) for word, kind in zip(words, function.function_type.args, strict=True)
        ]
        result = self._builder.call(function, given)
        if called.result == "void":
            return _WORD(0)
        if isinstance(result.type, ir.PointerType):
            return self._builder.ptrtoint(result, _WORD)
        return result if called.result == "i64" else self._builder.sext(result, _WORD)

    def _converted(self, word: Any, kind: ir.Type) -> Any:
        """Return a word as a function of C takes it."""
        if isinstance(kind, ir.PointerType):
            return self._builder.inttoptr(word, kind)
        return word if kind == _WORD else self._builder.trunc(word, kind)
