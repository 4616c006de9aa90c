"""Models as files, each with all that is needed to use it.

May import experiment and what is below it; never deploy, view or cli.
"""

from __future__ import annotations

from descant.deploy.export.export import export_model, export_models
from descant.deploy.export.manifest import Manifest
from descant.deploy.export.network import load_model
from descant.deploy.export.personalize import personalized
from descant.deploy.export.predict import predictions

__all__ = ["Manifest", "export_model", "export_models", "load_model", "personalized", "predictions"]
