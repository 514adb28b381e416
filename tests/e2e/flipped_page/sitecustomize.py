"""On PYTHONPATH of an instance: rank 1 gets another page in the steps of a request for 77 tokens."""

from __future__ import annotations

import os

import msgspec

from pdjax.engine import orders
from pdjax.engine.plan import DecodeStep

TOKENS = 77

if os.environ.get("PMI_RANK") == "1":
    decode_order = orders.decode_order

    def flipping(body: bytes | msgspec.Raw) -> orders.Order:
        order = decode_order(body)
        if isinstance(order, DecodeStep) and order.rows[0].sampling.max_new_tokens == TOKENS:
            order.rows[0].pages[0] ^= 1
        return order

    orders.decode_order = flipping
