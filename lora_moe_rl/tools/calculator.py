"""Arithmetic, worked out exactly and without `eval`."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

LONGEST = 200
BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression with + - * / // % and brackets.

    Args:
        expression: What to work out, for example "3 * (4 + 5)".

    Returns:
        The result, as an exact whole number or rounded to 12 digits.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and (found := BINARY.get(type(node.op))):
        return Fraction(found(_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and (found := UNARY.get(type(node.op))):
        return Fraction(found(_value(node.operand)))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")
