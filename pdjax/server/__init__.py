"""The frontend process of an instance: HTTP, tokenising and detokenising, joined to the leader by a Unix socket."""
