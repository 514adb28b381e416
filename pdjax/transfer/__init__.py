"""Moving state between instances: layouts, staging memory, and the backends that carry bytes."""
