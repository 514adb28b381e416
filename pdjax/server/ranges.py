"""Types of fields with the range that the OpenAPI document shows; the sentences about a value outside are elsewhere."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta


def _shown(**schema: float) -> Meta:
    return Meta(extra_json_schema=schema)


AtLeastOne = Annotated[int | None, _shown(minimum=1)]
AtLeastZero = Annotated[int | None, _shown(minimum=0)]
Temperature = Annotated[float | None, _shown(minimum=0)]
TopP = Annotated[float | None, _shown(exclusiveMinimum=0, maximum=1)]
TopK = Annotated[int | None, _shown(minimum=-1, maximum=2**31 - 1)]
MinP = Annotated[float | None, _shown(minimum=0, maximum=1)]
Samples = Annotated[int | None, _shown(minimum=1, maximum=128)]
Penalty = Annotated[float | None, _shown(minimum=-2, maximum=2)]
Repetition = Annotated[float | None, _shown(exclusiveMinimum=0, maximum=10)]
Seed = Annotated[int | None, _shown(minimum=-(2**63), maximum=2**63 - 1)]
Priority = Annotated[int | None, _shown(minimum=-(2**31), maximum=2**31 - 1)]
Seconds = Annotated[float | None, _shown(exclusiveMinimum=0)]
TopCount = Annotated[int | None, _shown(minimum=0, maximum=20)]
