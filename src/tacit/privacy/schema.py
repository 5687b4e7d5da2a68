"""The JSON schema of `certificate.json`, for programs of others that read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def certificate_schema() -> dict[str, Any]:
    """The schema (JSON Schema, draft 2020-12), which `tacit verify --schema` prints.

    *Guarantee.* Every certificate that `certificate_of` makes fits it. What fits it has the form of a certificate, no more:
    whether it is true, `verify` tells.

    >>> certificate_schema()["title"]
    'tacit-certificate/1'
    """
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("certificate.schema.json").read_text(encoding="utf-8"))
    return schema
