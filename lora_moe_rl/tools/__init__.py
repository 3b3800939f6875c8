"""Tools that need no code of one's own: `environment.tools=lora_moe_rl.tools:calculator`.

A tool is a Python function with a type for each argument and a docstring in Google's style, of
which the model is told; it returns a text, or what JSON knows. It may be async.
"""

from lora_moe_rl.tools.calculator import calculator
from lora_moe_rl.tools.python_code import python
from lora_moe_rl.tools.sandbox import Sandbox

__all__ = ["Sandbox", "calculator", "python"]
