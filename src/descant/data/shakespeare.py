"""Shakespeare's plays, by role: which character comes next?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from descant.core.fields import hyper
from descant.data import leaf
from descant.data.cache import Arrays, Expected, Prepared, Source, prepared
from descant.data.samples import Dataset, Samples
from descant.errors import DescantError

# number k is VOCABULARY[k]; 0 pads what is shorter than a window
VOCABULARY = "\0\n" + "".join(chr(code) for code in range(32, 127))
_NUMBER = np.full(256, VOCABULARY.index(" "), np.int64)
_NUMBER[[ord(sign) for sign in VOCABULARY]] = np.arange(len(VOCABULARY))


def parse(folder: Path) -> Arrays:
    """LEAF's JSON files: per role, windows of characters, each one character after the last."""
    texts, names = [], []
    for user in leaf.read(folder):
        for text in _texts(user):
            texts.append(np.frombuffer(text.encode("ascii", "replace"), np.uint8))
            names.append(user.name)
    return {
        "text": np.concatenate(texts), "offset": np.cumsum([0, *(len(text) for text in texts)]),
        "play": np.zeros(len(names), np.uint8), "role": np.array(names),
        "play_names": np.array([""]),  # LEAF has them in the names of the roles
    }


def _texts(user: leaf.User) -> list[str]:
    """The user's text; several pieces if windows are missing."""
    pieces: list[list[str]] = []
    follows = None
    for row, (window, sign) in enumerate(zip(user.x, user.y, strict=True)):
        if not isinstance(window, str) or not isinstance(sign, str) or len(sign) != 1:
            raise DescantError(f"{user.where}: sample {row} is not a text and the character after it")
        if window == follows:
            pieces[-1].append(sign)
        else:
            pieces.append([window, sign])
        follows = window[1:] + sign
    return ["".join(piece) for piece in pieces]


@dataclass(frozen=True)
class Shakespeare(Dataset):
    """4.3 million characters spoken by 1355 roles in 37 plays; the class is the next character.

    A role's text is cut into pieces of `length` + 1 characters that do not overlap, so that no character
    of a test piece is in a training piece; x is a piece but for its last character, which is y. What is
    left at the end of the text is not used, but a role with less than one piece has it as its only one,
    padded on the left. The 97 classes are padding (0), newline (1) and printable ASCII (2 to 96, in its
    order); any other sign counts as a space. In the public domain.
    """

    name: ClassVar[str] = "shakespeare"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 1355
    source: ClassVar[Source] = Source(
        "shakespeare",
        {
            "text": Expected("uint8", ("characters",)),
            "offset": Expected("int64", ("offsets",)),
            "play_names": Expected("str", ("plays",)),
            "play": Expected("uint8", ("roles",), below="plays"),
            "role": Expected("str", ("roles",)),
        },
        parse, leaf.obtain("shakespeare", "-s niid --sf 1.0 -k 0 -t sample"),
    )

    length: int = hyper(80, "characters from which the next one is predicted", ge=1)

    def load(self, clients: int, seed: int) -> Samples:
        arrays = prepared(self.source)
        offset = _offsets(arrays)
        numbers = _NUMBER[arrays["text"]]
        pieces = [_pieces(numbers[start:end], self.length + 1) for start, end in itertools.pairwise(offset)]
        cut = torch.from_numpy(np.concatenate(pieces))
        owner = np.repeat(_owners(arrays), [len(piece) for piece in pieces])
        return Samples(cut[:, :-1].contiguous(), cut[:, -1].contiguous(), len(VOCABULARY), owner)


def _pieces(text: np.ndarray, width: int) -> np.ndarray:
    """The text [characters] in rows of `width`."""
    whole = len(text) // width
    if whole:
        return text[: whole * width].reshape(whole, width)
    if len(text) < 2:
        return np.zeros((0, width), np.int64)  # nothing to predict from
    return np.concatenate([np.zeros(width - len(text), np.int64), text])[None]


def _owners(arrays: Prepared) -> np.ndarray:
    """The name of each role, with its play: several plays have a messenger."""
    plays = arrays["play_names"][arrays["play"]]
    return np.array([f"{role} ({play})" if play else str(role)
                     for role, play in zip(arrays["role"], plays, strict=True)])


def _offsets(arrays: Prepared) -> np.ndarray:
    offset = arrays["offset"]
    if len(offset) != arrays.shape("role")[0] + 1 or offset[0] != 0 or (np.diff(offset) < 0).any() \
            or offset[-1] != arrays.shape("text")[0]:
        raise DescantError(f"{arrays.path}: 'offset' does not divide 'text' into the roles of 'role': remove "
                           "it, and it is prepared again from the official files")
    return offset
