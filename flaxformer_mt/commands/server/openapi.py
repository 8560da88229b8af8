"""The server's interface as an OpenAPI document."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import flaxformer_mt
from flaxformer_mt.commands.server.request_fields import FORM, JSON, PARTS, Fields, FileRequest


class Operation(NamedTuple):
    # What answers; its docstring describes it.
    endpoint: Callable[[Any], Awaitable[Any]]
    # The fields of a POST; None: the method is GET.
    fields: type[Fields] | None = None

    @property
    def method(self) -> str:
        return "GET" if self.fields is None else "POST"


def make_specification(operations: Mapping[str, Operation], url: str) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        },
        "servers": [{"url": url}],
        "paths": {path: {one.method.lower(): _describe(path, one)} for path, one in operations.items()},
    }


def _describe(path: str, operation: Operation) -> dict[str, Any]:
    error = {"description": "What is wrong", "content": {JSON: {"example": {"error": "..."}}}}
    described: dict[str, Any] = {
        "summary": operation.endpoint.__doc__,
        "responses": {"200": {"description": "The answer"}, "default": error},
    }
    if "{name}" in path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.fields is not None:
        schema = {"schema": operation.fields.model_json_schema()}
        forms = (PARTS,) if operation.fields is FileRequest else (JSON, FORM, PARTS)
        described["requestBody"] = {"required": True, "content": dict.fromkeys(forms, schema)}
    return described
