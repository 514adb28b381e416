"""The HTTP surface in front of prefill and decode instances: health, choice, and dispatch of each request to a pair."""
