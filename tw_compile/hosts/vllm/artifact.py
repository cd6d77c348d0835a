"""Long steps in vLLM's one artifact of a model (``VLLM_USE_MEGA_AOT_ARTIFACT``, which is on by default from torch 2.12 on).

With such an artifact vLLM's compiler manager saves nothing. Torch's ahead-of-time compilation saves the object that the backend
returned, by methods of the object's class. So the backend returns an object of our class. It saves vLLM's function as vLLM
does, and the compiled parts of long steps beside it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.compilation.caching import SerializableCallable, StandaloneCompiledArtifacts, VllmSerializableFunction
from vllm.compilation.piecewise_backend import PiecewiseBackend

from tw_compile import compat
from tw_compile.hosts.vllm.steps import Parts, Steps, dispatch


class WithLongSteps(SerializableCallable):
    """``function``, which runs ``steps`` with ``parts`` and ``whole``, in a form that saves all four.

    Loading gives a function of vLLM's.
    """

    def __init__(self, function: VllmSerializableFunction, steps: Steps, parts: Parts, whole: Parts) -> None:
        self._function = function
        self._steps = steps
        self._parts = parts
        self._whole = whole

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    @classmethod
    def serialize_compile_artifacts(cls, fn: WithLongSteps) -> bytes:
        store = StandaloneCompiledArtifacts()
        taken: dict[int, bytes] = {}
        for parts, key in ((fn._parts, _key), (fn._whole, _key_of_whole)):
            for ends, compiled in parts.items():
                for name, part in compiled.items():
                    if id(part) not in taken:
                        taken[id(part)] = _bytes_of(part)
                    store.insert(name, key(ends), taken[id(part)])
        function = VllmSerializableFunction.serialize_compile_artifacts(fn._function)
        return pickle.dumps((function, fn._steps, tuple(fn._parts), tuple(fn._whole), store))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> VllmSerializableFunction:
        saved, steps, ranges, tried, store = pickle.loads(data)
        function = VllmSerializableFunction.deserialize_compile_artifacts(saved)
        with compat.functorch_config(function.aot_autograd_config):
            store.load_all()

        def loaded(key: str) -> dict[str, Callable[..., Any]]:
            return {name: _loaded(store.get_loaded(name, key), name in steps.bare) for name in steps.names}

        parts = {ends: loaded(_key(ends)) for ends in ranges}
        whole = {ends: loaded(_key_of_whole(ends)) for ends in tried}
        function.optimized_call = dispatch(steps, parts, function.optimized_call, whole)
        return function


def _key(ends: tuple[int, int]) -> str:
    return f"{ends[0]}-{ends[1]}"  # a store of vLLM's has names and keys joined by "_"


def _key_of_whole(ends: tuple[int, int]) -> str:
    return f"{_key(ends)}-whole"


def _bytes_of(part: Callable[..., Any]) -> bytes:
    """The bytes of ``part``, as vLLM's backend for pieces makes them. The backend's method reads only attributes set here."""
    entry = SimpleNamespace(compiled=True, runnable=part)
    return PiecewiseBackend.to_bytes(SimpleNamespace(range_entries={"part": entry}))["part"]


def _loaded(part: Callable[..., Any], bare: bool) -> Callable[..., Any]:
    """A loaded part, which returns what it returned before it was saved.

    A part returns a tuple once it is loaded, even if it did not before (``bare``).
    """
    return (lambda *arguments: part(*arguments)[0]) if bare else part
