"""Continuous batching: requests, the scheduler, the compiled steps, and the loop that ties them together.

The engine knows no role: a role (unified, prefill or decode) is an object that decides what is admitted and what
happens when a prefill ends.
"""
