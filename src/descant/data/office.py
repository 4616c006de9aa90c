"""Office objects seen by different cameras: a domain is a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from descant.core.fields import hyper
from descant.data import owned
from descant.data.cache import Arrays, Source, official, prepared
from descant.data.owned import Owned
from descant.data.samples import Dataset, Samples
from descant.errors import DescantError

OFFICE31 = ("amazon", "dslr", "webcam")
SURF = {"amazon": "amazon_SURF_L10.mat", "caltech10": "Caltech10_SURF_L10.mat", "dslr": "dslr_SURF_L10.mat",
        "webcam": "webcam_SURF_L10.mat"}
GOOGLENET = {domain: f"{domain}.mat" for domain in OFFICE31}


def parse_images(folder: Path, pixels: int) -> Arrays:
    """The images DOMAIN/images/CLASS/*.jpg; classes are numbered in alphabetical order."""
    domains = [official(folder, f"{domain}/images") for domain in OFFICE31]
    classes = sorted({path.name for domain in domains for path in domain.iterdir() if path.is_dir()})
    x, y = [], []
    for domain in domains:
        paths = sorted(domain.glob("*/*.jpg"))
        if not paths:
            raise DescantError(f"{domain} has no folders of .jpg files")
        x.append(np.stack([_read_image(path, pixels) for path in paths]))
        y.append(np.array([classes.index(path.parent.name) for path in paths]))
    return {**owned.arrays(x, y, OFFICE31), "class_names": np.array(classes)}


def _read_image(path: Path, pixels: int) -> np.ndarray:
    from PIL import Image  # slow: only when there are images to convert

    try:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((pixels, pixels), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError) as error:  # Pillow raises the latter for broken files
        raise DescantError(f"{path} is not a readable image ({error}): download it again") from None
    return np.asarray(small).transpose(2, 0, 1)


def parse_features(folder: Path, files: dict[str, str], width: int) -> Arrays:
    """MATLAB files, one a domain, with features `fts` and `labels` 1 to 10."""
    paths = [official(folder, name) for name in files.values()]  # all of them, before any is read
    x, y = zip(*(_read_features(path, width) for path in paths), strict=True)
    return owned.arrays(x, y, tuple(files))


def _read_features(path: Path, width: int) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat  # slow: only when asked for

    try:
        content: dict[str, Any] = loadmat(path, variable_names=["fts", "labels"])
        features, labels = content["fts"].astype(np.float32), content["labels"].astype(np.int64).ravel()
    except KeyError as error:
        raise DescantError(f"{path} has no variable {error}") from None
    except Exception as error:  # a broken file makes scipy raise anything
        raise DescantError(f"{path} is not a readable MATLAB file ({error}): download it again"
                           ) from None
    if features.shape != (len(labels), width):
        raise DescantError(f"{path}: 'fts' has the shape {features.shape}, not ({len(labels)}, {width}) as "
                           f"{len(labels)} labels ask for")
    for row in np.flatnonzero((labels < 1) | (labels > 10))[:1]:
        raise DescantError(f"{path}: label {labels[row]} in row {row + 1} is outside the range 1..10")
    return features, labels - 1


@dataclass(frozen=True)
class Office31(Dataset):
    """4110 photographs of 31 kinds of office objects in 3 domains: amazon, dslr, webcam.

    Colours [3, pixels, pixels]; resized with a bilinear filter, without keeping proportions. K. Saenko,
    B. Kulis, M. Fritz, T. Darrell: Adapting Visual Category Models to New Domains, ECCV 2010. For
    research; no formal licence.
    """

    name: ClassVar[str] = "office31"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = len(OFFICE31)

    pixels: int = hyper(64, "width and height that the images are resized to", ge=8, le=512)

    @property
    def source(self) -> Source:
        return Source(
            f"office31_{self.pixels}", owned.layout("uint8", (3, self.pixels, self.pixels), 31),
            lambda folder: parse_images(folder, self.pixels),
            "the folders amazon, dslr and webcam (each with images/CLASS/*.jpg) of "
            "domain_adaptation_images.tar.gz, to which https://faculty.cc.gatech.edu/~judy/domainadapt/ "
            "leads",
            folder="office31",
        )

    def load(self, clients: int, seed: int) -> Samples:
        return owned.samples(prepared(self.source), classes=31)


@dataclass(frozen=True)
class Office10Surf(Owned):
    """2533 photographs of 10 kinds of objects in 4 domains, as 800 counts of SURF words.

    Domains: amazon, caltech10, dslr, webcam. B. Gong, Y. Shi, F. Sha, K. Grauman: Geodesic Flow Kernel
    for Unsupervised Domain Adaptation, CVPR 2012. For research; no formal licence.
    """

    name: ClassVar[str] = "office10_surf"
    classes: ClassVar[int] = 10
    default_clients: ClassVar[int] = len(SURF)
    source: ClassVar[Source] = Source(
        "office10_surf", owned.layout("float32", (800,), 10),
        lambda folder: parse_features(folder, SURF, 800),
        f"{', '.join(SURF.values())} of http://www-scf.usc.edu/~boqinggo/domain_adaptation/GFK_v1.zip",
    )


@dataclass(frozen=True)
class Office10Googlenet(Owned):
    """1410 photographs of 10 kinds of objects in 3 domains, as 1024 features of GoogLeNet.

    Domains: amazon, dslr, webcam. The photographs are those of Office-31 that show the 10 classes it
    shares with Caltech-256 (see office10_surf and office31). For research; no formal licence.
    """

    name: ClassVar[str] = "office10_googlenet"
    classes: ClassVar[int] = 10
    default_clients: ClassVar[int] = len(GOOGLENET)
    source: ClassVar[Source] = Source(
        "office10_googlenet", owned.layout("float32", (1024,), 10),
        lambda folder: parse_features(folder, GOOGLENET, 1024),
        f"{', '.join(GOOGLENET.values())} of the Office-Caltech features 'GoogleNet1024'",
    )
