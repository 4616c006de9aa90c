"""How good outputs are: sums over samples that can be added over clients, and the figures made of them.

A tally is a vector of sums (float64) over the rows that count. The figures of one client come from its
own tally, those of all together from the sum of the tallies, exactly, though a balanced accuracy or an
R2 is no mean of the clients' values. An AUROC is made of no sums: it is computed where all outputs of a
client are at hand, and only where it decides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSIFICATION = ("accuracy", "balanced_accuracy")
REGRESSION = ("mse", "r2")
AUROC = "auroc"


def tally_losses(losses: Tensor, weight: Tensor | None) -> Tensor:
    """[rows, sum of the losses]"""
    counted = torch.full_like(losses, 1, dtype=torch.float64) if weight is None else weight.double()
    return torch.stack([counted.sum(), _sum(losses, weight)])


def tally_classification(outputs: Tensor, y: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    """[rows right (of sequences: the share of positions), then for each class how many there are, and how
    many of them are right]"""
    is_binary = outputs.dim() == 1 or (outputs.shape[1] == 1 and classes == 2)
    predicted = (outputs.reshape(y.shape) > 0).to(y.dtype) if is_binary else outputs.argmax(1)
    right = (predicted == y).double()
    of_class = F.one_hot(y, classes).double().reshape(-1, classes)
    if weight is not None:
        counts = weight if y.dim() == 1 else weight[:, None].expand_as(y).reshape(-1)
        of_class = of_class * counts[:, None]
    rows_right = _sum(right if y.dim() == 1 else right.flatten(1).mean(1), weight)
    return torch.cat([rows_right[None], of_class.sum(0), (of_class * right.reshape(-1, 1)).sum(0)])


def tally_regression(values: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """[sum of the squared errors, then for each column of y its sum and its sum of squares]"""
    y = y.double().flatten(1) if y.dim() > 1 else y.double()[:, None]
    errors = (values.double().reshape(y.shape) - y).square().mean(1)
    columns = torch.cat([y, y.square()], 1)
    counted = columns if weight is None else columns.where(weight[:, None], 0.0)
    return torch.cat([_sum(errors, weight)[None], counted.sum(0)])


def loss_figure(tally: Tensor) -> Tensor:
    """The mean loss, of what `tally_losses` gives."""
    return tally[1] / tally[0]


def classification_figures(rows: Tensor, tally: Tensor) -> list[Tensor]:
    """Accuracy, and the mean of the recalls of the classes that occur."""
    there, right = tally[1:].chunk(2)
    recall = right / there.clamp(min=1)
    return [tally[0] / rows, recall.sum() / (there > 0).sum()]


def regression_figures(rows: Tensor, tally: Tensor) -> list[Tensor]:
    """Mean squared error, and the share of the variance it leaves explained (R2)."""
    mean, square = (tally[1:] / rows).chunk(2)
    mse = tally[0] / rows
    return [mse, 1 - mse / (square - mean.square()).mean()]


def auroc(outputs: Tensor, y: Tensor, weight: Tensor, classes: int) -> Tensor:
    """The area under the ROC curve over the rows that count (`measures.macro_auroc`, but also inside vmap):
    of two classes that of the second; of more, each class against the rest by its probability, and the mean
    over the classes that occur. NaN where fewer than two do."""
    y = y.long()
    if outputs.dim() == 1 or (outputs.shape[1] == 1 and classes == 2):
        return _area(outputs.reshape(-1).double(), y.reshape(-1) == 1, weight)
    counts = weight if y.dim() == 1 else weight[:, None].expand_as(y).reshape(-1)
    logits, y = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).double(), y.reshape(-1)
    if classes == 2:
        return _area(logits[:, 1] - logits[:, 0], y == 1, counts)
    top = logits.argmax(1)
    largest = logits.gather(1, top[:, None])
    others = logits.masked_fill(F.one_hot(top, classes).bool(), -torch.inf)
    rest = others.logsumexp(1) - largest[:, 0]  # as log odds: probabilities are rounded to one
    total, occur = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in range(classes):
        gap = logits[:, c] - largest[:, 0]
        odds = torch.where(top == c, -rest, gap - torch.log(1 + rest.exp() - gap.exp()))
        there = ((y == c) & counts).any()
        total = total + torch.where(there, _area(odds, y == c, counts), 0.0)
        occur = occur + there
    return torch.where(occur > 1, total / occur, torch.nan)


def _area(scores: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
    """The share of the pairs of a positive and another row in which the positive one has the higher score;
    equal scores count half."""
    broken = (scores.isnan() & weight).any()
    scores, order = scores.masked_fill(~weight, torch.inf).sort()
    ours = (positive & weight)[order].double()
    others = (~positive & weight)[order].double()
    below = others.cumsum(0)
    place = torch.arange(len(scores))
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), scores[1:] != scores[:-1]])
    is_last = torch.cat([is_first[1:], torch.ones(1, dtype=torch.bool)])
    first = torch.where(is_first, place, 0).cummax(0).values  # of the rows with the same score
    last = torch.where(is_last, place, len(scores) - 1).flip(0).cummin(0).values.flip(0)
    half = (ours * (below[last] + below[first] - others[first])).sum() / 2
    return torch.where(broken, torch.nan, half / (ours.sum() * others.sum()))


def _sum(values: Tensor, weight: Tensor | None) -> Tensor:
    """The sum over the rows that count; the others may hold anything."""
    values = values.double()
    return values.sum() if weight is None else values.where(weight, 0.0).sum()
