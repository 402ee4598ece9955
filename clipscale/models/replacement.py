"""Modules that take another module's place."""

from torch import nn


class Replacement:
    """A base of such modules: they hold the other's parameters, submodules and settings, and have a
    forward pass of their own. It comes before the module's class, whose constructor would make new parameters."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        vars(self).update(vars(module))
