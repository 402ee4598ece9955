"""Modules that take another module's place."""

from torch import nn


class Replacement:
    """A base of modules with another module's parameters, submodules and settings, and a forward pass of their own.

    It comes first among the bases, because the constructor of the module's own class would make new parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        vars(self).update(vars(module))
