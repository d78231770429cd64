"""The whole way from a model to a certified smaller one."""
