"""A key that nothing reads is a promise that nobody keeps."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from rollwright.config import RunConfig

PACKAGE = Path(__file__).parents[2] / "src" / "rollwright"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def models(root: type[BaseModel]) -> set[type[BaseModel]]:
    found = {root}
    for field in root.model_fields.values():
        for model in models_in(field.annotation):
            found |= models(model)
    return found


KEYS = sorted({key for model in models(RunConfig) for key in model.model_fields} - {"kind"})
"""`kind` is read by pydantic, to choose the model."""


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_somewhere(key: str) -> None:
    use = re.compile(rf"\.{key}\b")
    readers = [file for file in PACKAGE.rglob("*.py") if use.search(file.read_text(encoding="utf-8"))]
    assert readers, f"nothing reads `{key}`"
