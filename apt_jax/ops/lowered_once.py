"""Functions that a process traces and lowers once for each set of shapes, even if several programs call them.

If a function wrapped in `jax.jit` is called within several programs, its trace is reused, but it is lowered again for
each program. Lowering a kernel takes longer than lowering the rest of a step, and many programs have the same kernels.
Therefore each kernel is exported to a module, which is included in every program that calls it.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import export


def lowered_once(
    function: Callable[..., Any], *, static_argnames: Sequence[str], platform: str, custom_calls: Sequence[str] = ()
) -> Callable[..., Any]:
    """Wrap `function` for calls within programs for one platform. It may use neither collectives nor the caller's mesh.

    Args:
        static_argnames: names of keyword arguments that are not arrays.
        platform: the compiler's name for the programs' platform, such as "cuda" or "cpu".
        custom_calls: targets of custom calls in `function`, for which `jax.export` guarantees no stability across
            versions.
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

    # Programs then include the module once, not once per layer.
    return jax.jit(call, static_argnames=static_argnames)
