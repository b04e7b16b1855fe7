"""The glossary of shapes: every annotation in the package uses these letters.

| letter | axis |
|---|---|
| B | batch |
| T | query time |
| S | key time (S >= T; queries are the last T of S positions) |
| N | query heads |
| K | key/value heads (N is a multiple of K) |
| D | head size of queries and keys |
| E | head size of values |
| F | features of a kernel's feature map |
| C | chunk length |
| W | window length |
| M | model width |
| V | vocabulary |

`Float[Array, "B T N D"]` is a JAX array of any floating dtype and that shape. The annotations are checked at
run time in the tests only.
"""

from jax import Array
from jaxtyping import Bool, Float, Int, Shaped, UInt, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "Shaped", "UInt", "UInt32"]
