"""What plain routes answer, alike in a frontend and in a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pdjax.web import ClientGone, HttpError, encode_json, error_payload


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(encode_json(value), status, media_type="application/json")


def error_response(status: int, message: str) -> Response:
    """An error in OpenAI's shape."""
    return json_response(error_payload(status, message), status)


def error_handlers(where: str) -> dict[Any, Callable[[Request, Exception], Response]]:
    """What Starlette does with what routes raise. `where`: what a bug is inside of, for its sentence."""

    def on_error(_: Request, error: Exception) -> Response:
        if isinstance(error, HttpError):
            return error_response(error.status, error.message)
        return error_response(500, f"an error inside the {where}: {type(error).__name__}: {error}")

    return {HttpError: on_error, HTTPException: _on_http_exception, ClientGone: _on_client_gone, Exception: on_error}


def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "there is no such route", 405: f"this route does not take {request.method}"}
    return error_response(status, f"{request.method} {request.url.path}: {words.get(status, str(error))}")


def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
