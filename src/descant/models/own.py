"""A network that the user wrote: `name = "package.module:function"`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

from descant.core.import_object import imported, is_place
from descant.core.sample import SampleFormat
from descant.errors import UsageError, unknown
from descant.models.base import NetworkSpec


@dataclass(frozen=True)
class OwnModel(NetworkSpec):
    """A function that makes an `nn.Module`, by its place "package.module:function".

    It is called with `arguments`, and with those of `shape` (of a sample), `outputs` and `tokens` (how many
    there are) that it has parameters for. It is imported when the network is needed, also from the current
    directory.
    """

    name: ClassVar[str] = "own"

    place: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # what TOML can say

    def __post_init__(self) -> None:
        if not is_place(self.place):
            raise UsageError('your own model must read "package.module:function", such as '
                             f'"my_package.nets:make_model", not {self.place!r}')
        object.__setattr__(self, "arguments", {str(key): _plain(value, f"model.{key}")
                                               for key, value in self.arguments.items()})

    def dump(self) -> dict[str, Any]:
        """The [model] table that makes this object again."""
        return {"name": self.place, **self.arguments}

    def network(self, sample: SampleFormat) -> nn.Module:
        make = self._import()
        parameters = inspect.signature(make).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for key in self.arguments:
            if not takes_all and key not in named:
                raise unknown(f"model.name {self.place}: parameter", key, named)
        offered = {"shape": sample.shape, "outputs": sample.outputs} | (
            {} if sample.tokens is None else {"tokens": sample.tokens})
        given = {key: value for key, value in offered.items() if takes_all or key in named}
        try:
            module = make(**given | dict(self.arguments))
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise UsageError(f"model.name {self.place}: the call fails with {type(error).__name__}: {reason}"
                             ) from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"model.name {self.place}: it must return an nn.Module, not "
                             f"{type(module).__name__}")
        return module

    def _import(self) -> Callable[..., Any]:
        make: Callable[..., Any] = imported(self.place, "model.name")
        if isinstance(make, FunctionType) or (isinstance(make, type) and issubclass(make, nn.Module)):
            return make
        kind = "another class" if isinstance(make, type) else f"an object of type {type(make).__name__}"
        raise UsageError(f"model.name {self.place}: it must be a function or class that makes an nn.Module, "
                         f"not {kind}")


def _plain(value: Any, path: str) -> Any:
    """A value as TOML gives it back, so that the written experiment is the one that was run."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, path) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    raise UsageError(f"{path} must be text, a number, true or false, or a list or table of these, "
                     f"not {value!r}")
