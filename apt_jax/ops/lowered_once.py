"""Functions that a process traces and lowers once for each set of shapes, whatever programs call them.

`jax.jit` within a program keeps what it has traced for the next program, but lowers it again. Lowering a kernel takes
longer than the rest of a step, and many programs have the same kernels: so a kernel is exported, which is a module by
itself, and each program that calls it takes that module in.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import export


def lowered_once(
    function: Callable[..., Any], *, static_argnames: Sequence[str], platform: str, custom_calls: Sequence[str] = ()
) -> Callable[..., Any]:
    """`function` to be called within programs for one platform. No collectives, and nothing of the caller's mesh.

    Args:
        static_argnames: keyword arguments that are no arrays.
        platform: of the programs, as the compiler calls it: "cuda", "cpu".
        custom_calls: targets of custom calls in it, which need not mean the same in another version.
    """
    known: dict[Hashable, export.Exported] = {}
    lock = threading.Lock()
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in custom_calls]

    def exported(args: tuple[Any, ...], arrays: dict[str, Any], static: dict[str, Any]) -> export.Exported:
        leaves, structure = jax.tree.flatten((args, arrays))
        shapes = tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves)
        key = (structure, shapes, tuple(sorted(static.items())))
        with lock:
            if key not in known:
                jitted = jax.jit(lambda *args, **arrays: function(*args, **arrays, **static))
                like = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in shapes]
                given, named = jax.tree.unflatten(structure, like)
                known[key] = export.export(jitted, platforms=[platform], disabled_checks=checks)(*given, **named)
            return known[key]

    def call(*args: Any, **kwargs: Any) -> Any:
        static = {name: kwargs.pop(name) for name in static_argnames if name in kwargs}
        return exported(args, kwargs, static).call(*args, **kwargs)

    # One call of the module, not one a layer.
    return jax.jit(call, static_argnames=static_argnames)
