"""Models as files, each with all that is needed to use it.

May import experiment and what is below it; never deploy, view or cli.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from descant.deploy.export.export import export_model, export_models
    from descant.deploy.export.manifest import Manifest
    from descant.deploy.export.network import load_model
    from descant.deploy.export.personalize import personalized
    from descant.deploy.export.predict import predictions

# imported on first use
_HOME = {
    "Manifest": "manifest", "export_model": "export", "export_models": "export", "load_model": "network",
    "personalized": "personalize", "predictions": "predict",
}

__all__ = ["Manifest", "export_model", "export_models", "load_model", "personalized", "predictions"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"descant.deploy.export.{_HOME[name]}"), name)
