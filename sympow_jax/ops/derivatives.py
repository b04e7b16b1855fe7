"""`jax.custom_vjp` with forward mode and derivatives of any order.

JAX differentiates a function with a rule for reverse mode in reverse mode only. Here the rule of the derivative is a
linear function of the tangents with two ways to compute it: in forward mode JAX's own derivative of the function, and
when it is transposed, in reverse mode, the given rule.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from sympow_jax.ops import sharding
from sympow_jax.ops.promotion import by_default_rules, default_rules


class custom_vjp:
    """Function with a rule for reverse mode, as by `jax.custom_vjp`, and with JAX's own derivative in forward mode.

    Args:
        fun: the function; JAX can differentiate it in forward mode.
        static: number of leading arguments that are static.
        plain: function without loops of a traced length, through which JAX has no reverse mode, and with the same
            derivatives. It is used in place of `fun` where forward mode is differentiated again. None means `fun`.

    Without `defvjp`, the rule is that of `plain`. `fun` is an attribute: with an option by which it returns residuals
    too it can be its own `fwd`, through which JAX then differentiates a second time.

    Examples:
        >>> import jax
        >>> from sympow_jax.ops import derivatives
        >>> @derivatives.custom_vjp
        ... def square(x):
        ...     return x * x
        >>> square.defvjp(None, lambda arguments, gradient: (2 * arguments[0] * gradient,))
        >>> float(jax.grad(square)(3.0)), tuple(map(float, jax.jvp(square, (3.0,), (1.0,))))
        (6.0, (9.0, 6.0))
    """

    def __init__(self, fun: Callable[..., Any], static: int = 0, plain: Callable[..., Any] | None = None):
        functools.update_wrapper(self, fun)
        self.fun, self._plain, self._static = fun, plain or fun, static

        def bwd(*args):
            *static, arrays, cotangents = args
            return jax.vjp(functools.partial(self._plain, *static), *arrays)[1](cotangents)

        self.defvjp(None, bwd)

    def defvjp(
        self,
        fwd: Callable[..., Any] | None,
        bwd: Callable[..., Any],
        jvp: Callable[..., Any] | None = None,
    ) -> None:
        """Sets the rule: `fwd` returns the result and residuals, of which `bwd` makes the gradients.

        If `fwd` is None, the residuals are the arguments that are not static. With `jvp`, which makes the result's
        tangents of residuals and the arguments' tangents, reverse mode outside of `jax.jit` keeps the residuals alone;
        without it, the arguments too.
        """

        def keep(*args):
            return self(*args), args[self._static :]

        self._fwd, self._bwd, self._jvp = fwd or keep, bwd, jvp

    def __call__(self, *args):
        static, arrays = args[: self._static], args[self._static :]
        rules = (self.fun, self._plain, self._fwd, self._bwd, self._jvp)
        fun, *rest = (rule and functools.partial(rule, *static) for rule in rules)
        call = jax.custom_jvp(fun)
        call.defjvp(functools.partial(_jvp, fun, *rest), symbolic_zeros=True)
        with default_rules():
            return call(*arrays)


# Tangent of integers.
_NO_CHANGE = np.zeros((), jax.dtypes.float0)

# `forward` of saved, primal and changed operands, the last of which it is linear in; `backward` is its transpose.
_linear = jax_core.Primitive("linear_with_transpose")
_linear.multiple_results = True


@by_default_rules
def _jvp(fun, plain, fwd, bwd, jvp, primals, tangents):
    """Returns the result and its tangent, which is computed by `fun` or, if it is transposed, by `bwd`."""
    result, residuals = fwd(*primals)
    leaves, arguments = jax.tree.flatten(primals)
    saved, saved_as = jax.tree.flatten(residuals)
    outs, results = jax.tree.flatten(result)
    changes = [(i, x) for i, x in enumerate(jax.tree.leaves(tangents)) if not isinstance(x, SymbolicZero)]

    # Structures and shapes alone, because the rules below may outlive the arrays.
    structures = [jax.tree.structure(x) for x in primals]
    shapes = [(x.shape, x.dtype) for x in leaves]
    # Arguments that change, and results that can; integers do not.
    inputs = [i for i, _ in changes]
    outputs = [i for i, x in enumerate(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    fixed = {
        i: sharding.varying_over(
            jax.lax.broadcast(_NO_CHANGE, x.shape), jax.typeof(x).manual_axis_type.varying
        )
        for i, x in enumerate(outs)
        if i not in outputs
    }
    count, stored = len(outs), len(saved)
    known = stored + (len(leaves) if jvp is None else 0)

    def of_result(floats):
        parts = fixed | dict(zip(outputs, floats, strict=True))
        return jax.tree.unflatten(results, [parts[i] for i in range(count)])

    def floats_of(result):
        found = jax.tree.leaves(result)
        return [found[i] for i in outputs]

    @by_default_rules
    def forward_by_rule(*operands):
        merged = [jnp.zeros(*shape) for shape in shapes]
        for i, x in zip(inputs, operands[known:], strict=True):
            merged[i] = x
        residuals = jax.tree.unflatten(saved_as, operands[:stored])
        return floats_of(jvp(residuals, jax.tree.unflatten(arguments, merged)))

    @by_default_rules
    def forward_of(differentiated, *operands):
        values = operands[stored:known]

        def of_changing(*changing):
            merged = list(values)
            for i, x in zip(inputs, changing, strict=True):
                merged[i] = x
            return floats_of(differentiated(*jax.tree.unflatten(arguments, merged)))

        return jax.jvp(of_changing, [values[i] for i in inputs], list(operands[known:]))[1]

    @by_default_rules
    def backward(*operands):
        gradients = bwd(jax.tree.unflatten(saved_as, operands[:stored]), of_result(operands[known:]))
        # None is the gradient of an argument that has none, whatever its structure.
        found: list[Any] = []
        for gradient, structure in zip(gradients, structures, strict=True):
            found += [None] * structure.num_leaves if gradient is None else structure.flatten_up_to(gradient)
        return [found[i] for i in inputs]

    forwards = [forward_by_rule if jvp else functools.partial(forward_of, f) for f in (fun, plain)]
    tangent = _linear.bind(
        *saved,
        *(leaves if jvp is None else ()),
        *(x for _, x in changes),
        known=known,
        forward=forwards[0],
        plain=forwards[1],
        backward=backward,
        types=tuple(jax.typeof(outs[i]) for i in outputs),
    )
    return result, of_result(tangent)


_linear.def_impl(lambda *operands, forward, **_: jax.jit(forward)(*operands))
_linear.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_linear, mlir.lower_fun(lambda *operands, forward, **_: forward(*operands)))


def _derivative(operands, tangents, *, plain, **_):
    return jax.jvp(plain, operands, tuple(ad.instantiate_zeros(x) for x in tangents))


def _transpose(cotangents, *operands, known, backward, **_):
    gradients = backward(*operands[:known], *map(ad.instantiate_zeros, cotangents))
    wanted = [ad.is_undefined_primal(x) for x in operands[known:]]
    return [None] * known + [x if is_wanted else None for x, is_wanted in zip(gradients, wanted, strict=True)]


def _batch(operands, axes, *, known, forward, plain, backward, types):
    size = next(jnp.shape(x)[axis] for x, axis in zip(operands, axes) if axis is not None)
    # Operands stay as they are, because moving an axis of a long sequence takes time. A change that is the same for all
    # elements of the batch gets an axis, because gradients differ between them.
    operands, axes = list(operands), list(axes)
    for i in range(known, len(operands)):
        if axes[i] is None:
            operands[i], axes[i] = jnp.broadcast_to(operands[i], (size, *jnp.shape(operands[i]))), 0
    of_results = [0] * len(types)
    tangents = _linear.bind(
        *operands,
        known=known,
        forward=jax.vmap(forward, axes, axis_size=size),
        plain=jax.vmap(plain, axes, axis_size=size),
        backward=jax.vmap(backward, [*axes[:known], *of_results], axes[known:], axis_size=size),
        types=tuple(jax_core.unmapped_aval(size, 0, x) for x in types),
    )
    return tangents, of_results


ad.primitive_jvps[_linear] = _derivative
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
