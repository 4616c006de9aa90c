"""Trees: tensors in (nested) NamedTuples.

Server state, client state, messages and uploads are trees. This is all that checkpoints, the client
store, the worker processes and the wire need to know about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any  # a Tensor, or a (named) tuple of trees; () is the tree without tensors


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their names: ("model.theta", tensor)."""
    if isinstance(tree, Tensor):
        yield path or "value", tree
        return
    if not isinstance(tree, tuple):
        raise TypeError(f"{path or 'the tree'} is a {type(tree).__name__}; "
                        "states, messages and uploads hold tensors in NamedTuples only")
    for name, child in zip(_names(tree), tree, strict=True):
        yield from leaves(child, f"{path}.{name}" if path else name)


def not_finite(tree: Tree, path: str = "") -> str | None:
    """The name of the first tensor that holds NaN or infinity. A finite sum has no such terms, and takes one
    pass without a copy; but large numbers may add up to infinity."""
    return next((name for name, leaf in leaves(tree, path)
                 if not bool(leaf.sum().isfinite()) and not bool(leaf.isfinite().all())), None)


def map_tree(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply `fn` to the tensors at the same place of trees of one structure."""
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    children = [map_tree(fn, child, *(other[k] for other in others))
                for k, child in enumerate(tree)]
    return _like(tree, children)


def rebuild(template: Tree, values: Mapping[str, Tensor], path: str = "") -> Tree:
    """The tree of `template`'s structure with the named tensors of `values`."""
    if isinstance(template, Tensor):
        return values[path or "value"]
    children = [rebuild(child, values, f"{path}.{name}" if path else name)
                for name, child in zip(_names(template), template, strict=True)]
    return _like(template, children)


def filled(template: Tree, values: Iterable[Tensor]) -> Tree:
    """The tree of `template`'s structure with these tensors, in the order of `leaves`."""
    following = iter(values)
    return map_tree(lambda _: next(following), template)


def stack(trees: list[Tree]) -> Tree:
    """One tree with a new leading axis."""
    return map_tree(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def concat(trees: list[Tree]) -> Tree:
    """One tree whose leading axes follow each other."""
    if len(trees) == 1:
        return trees[0]
    return map_tree(lambda *rows: torch.cat(rows), trees[0], *trees[1:])


def take(tree: Tree, which: Any) -> Tree:
    """The given rows (an index, a slice, a mask) of every tensor."""
    return map_tree(lambda tensor: tensor[which], tree)


def pick(tree: Tree, row: Tensor) -> Tree:
    """Row [] of every tensor, where the number is a tensor that vmap may have batched."""
    return map_tree(lambda tensor: tensor.index_select(0, row[None])[0], tree)


def where(condition: Tensor, tree: Tree, other: Tree) -> Tree:
    """The tensors of the one tree or of the other."""
    return map_tree(lambda a, b: torch.where(condition, a, b), tree, other)


def repeat(tree: Tree, count: int) -> Tree:
    """The same tree `count` times, along a new leading axis (not copied)."""
    return map_tree(lambda tensor: tensor.expand(count, *tensor.shape), tree)


def rows(tree: Tree) -> int:
    """The length of the leading axis."""
    return len(next(tensor for _, tensor in leaves(tree)))


def nbytes(tree: Tree) -> int:
    """How many bytes the tensors of a tree take."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(tree))


def _names(tree: tuple[Any, ...]) -> tuple[str, ...]:
    return getattr(tree, "_fields", None) or tuple(str(k) for k in range(len(tree)))


def _like(tree: tuple[Any, ...], children: list[Any]) -> Tree:
    return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
