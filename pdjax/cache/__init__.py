"""KV pages: their shape (`spec`), the pool that holds them (`pool`) and who owns which (`allocator`,
`prefix`, `ranks`)."""
