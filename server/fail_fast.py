"""Bodies are read up to their first wrong entry.

Pydantic makes an error of everything that is wrong before anything can answer, and of an entry that
may be of many kinds one for each kind: of a list of ``{}`` of 12 kB on ``/v1/responses`` 5 GB.
"""

from typing import Any

from fastapi import FastAPI
from pydantic_core import SchemaValidator

LISTS = ("list", "tuple", "set", "frozenset")


def read_to_first_error(app: FastAPI) -> None:
    """Have every route of an app end a list in its body at the first entry that is wrong.

    What is right is read as before.  An object has no such end: ``limits`` bounds its entries.
    """
    for route in app.routes:
        field = getattr(route, "body_field", None)
        if field is not None:
            adapter = field._type_adapter
            # Validators that models have already would be taken for their schemas.
            adapter.validator = SchemaValidator(
                _fail_fast(adapter.core_schema), _use_prebuilt=False
            )


def _fail_fast(schema: Any) -> Any:
    """A schema of pydantic's, or a part of one, whose lists end at their first wrong entry."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_fail_fast, schema))
    if not isinstance(schema, dict):
        return schema
    found = {key: _fail_fast(value) for key, value in schema.items()}
    return found | {"fail_fast": True} if schema.get("type") in LISTS else found
