"""Makes Triton's interpreter quick enough for the ordinary suite."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def quicken_the_interpreter() -> None:
    """Spares Triton's interpreter work that no result needs, half of its time.

    It replaces the functions of its language anew with every call of a device function; here once in a launch, under
    both names that kernels and Triton's own device functions have for the language. It also repeats every sum of
    integers in 64 bits, to find overflows; here it does not.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, names = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda function: patch(names)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_the_interpreter()
