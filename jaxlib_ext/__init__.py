"""Hot loops: one folder an op, a jnp reference that defines it and Pallas kernels that speed it up (floor 0)."""
