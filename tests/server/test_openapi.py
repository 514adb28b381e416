"""The OpenAPI document tells the truth, and nothing that it allows makes a frontend fail."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_leader import FrontendProcess

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_route_is_described_with_its_errors(unified: FrontendProcess):
    described = json.loads(unified.get("/openapi.json")[1])
    assert described["openapi"].startswith("3.1")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/flush_cache", "/metrics", "/get_load"):
        for operation in described["paths"][path].values():
            assert {"200", "400"} <= set(operation["responses"])
    names = described["components"]["schemas"]["GenerateRequest"]["properties"]
    assert {"text", "input_ids", "sampling_params", "stream", "return_logprob", "bootstrap_room"} <= set(names)


# Without these, few bodies get past the prompt.
SENSE = {
    "/generate": {"text": "hi", "input_ids": None, "rid": None},
    "/v1/completions": {"prompt": ["a", "b"], "model": None, "rid": None},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "model": None, "rid": None},
}


@pytest.mark.parametrize("sensible", [True, False])
@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/tokenize", "/detokenize"]
)
def test_no_body_makes_a_frontend_fail(unified: FrontendProcess, path: str, sensible: bool):
    if sensible and path not in SENSE:
        pytest.skip("any body makes sense here")
    examples = 60 if sensible else 40 if path in SENSE else 20
    statuses: set[int] = set()
    schema = schemathesis.openapi.from_url(f"{unified.url}/openapi.json")
    operation = schema[path]["POST"]

    @given(case=operation.as_strategy())
    @settings(max_examples=examples, deadline=None, suppress_health_check=SLOW, derandomize=True)
    def fuzz(case: schemathesis.Case) -> None:
        if sensible:
            case.body = {**case.body, **SENSE[path]}  # type: ignore[dict-item]
        response = case.call(timeout=30)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    fuzz()
    assert not sensible or 200 in statuses


def test_answers_without_a_body_are_as_described(unified: FrontendProcess):
    schema = schemathesis.openapi.from_url(f"{unified.url}/openapi.json")
    for path in ("/health", "/v1/models", "/server_info", "/model_info", "/get_load", "/metrics"):
        schema[path]["GET"].Case().call_and_validate(checks=CHECKS, timeout=30)
