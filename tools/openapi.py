"""Writes ui/openapi.json, from which the UI's types are generated: ``python -m tools.openapi``."""

from __future__ import annotations

import json
from pathlib import Path

from airflow_delay_provider.api.app import create_app

TARGET = Path(__file__).parents[1] / "ui" / "openapi.json"


def describe_api() -> str:
    return json.dumps(create_app().openapi(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(describe_api())
