"""The version of dtq, in the one place that pyproject.toml, `--version` and worker records read."""

from __future__ import annotations

VERSION = "0.1.0"
