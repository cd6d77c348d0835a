"""Write a post-grad graph node by node, with the metadata that a compile would give it."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
prims = torch.ops.prims
_c10d = torch.ops._c10d_functional

NORM_FORMS = ("hf", "torch", "gemma", "no_weight")
ROOTS = ("rsqrt", "pow", "reciprocal", "div")
EPS_FORMS = ("tensor_overload", "scalar_overload", "full", "swapped", "none")


class GraphBuilder:
    """Nodes get their ``meta["val"]`` from running the operator on fake tensors, or on the quicker meta tensors."""

    def __init__(self, *, fake: bool = True) -> None:
        self.graph = fx.Graph()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        self.device = "cpu" if fake else "meta"
        self.inputs: list[fx.Node] = []

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, device: str | None = None) -> fx.Node:
        """A placeholder; all of them come first, whenever they are asked for."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(self.inputs[-1]) if self.inputs else self.graph.inserting_before(first):
            node = self.graph.placeholder(f"arg{len(self.inputs)}_1")
        with self.fake_mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device or self.device)
        self.inputs.append(node)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def issue(self, x: fx.Node, group: str = "0", op: str = "sum") -> fx.Node:
        return self.call(_c10d.all_reduce.default, x, op, group)

    def wait(self, all_reduce: fx.Node) -> fx.Node:
        return self.call(_c10d.wait_tensor.default, all_reduce)

    def all_reduce(self, x: fx.Node, group: str = "0", op: str = "sum") -> fx.Node:
        return self.wait(self.issue(x, group, op))

    def add(self, left: Any, right: Any, **kwargs: Any) -> fx.Node:
        return self.call(aten.add.Tensor, left, right, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A cast, or ``x`` itself when there is nothing to cast: compiled graphs have no casts to the same dtype."""
        return x if x.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)

    def view(self, x: fx.Node, *shape: int) -> fx.Node:
        return self.call(aten.view.default, x, list(shape))

    def constant(self, number: float, device: torch.device) -> fx.Node:
        """A zero-dimensional float32 tensor."""
        real = "cpu" if device.type == "meta" else device
        node = self.graph.call_function(aten.full.default, ([], number), {"dtype": torch.float32, "device": real})
        with self.fake_mode:
            node.meta["val"] = torch.full([], number, dtype=torch.float32, device=device)
        return node

    def scale(
        self,
        h: fx.Node,
        *,
        eps: float = 1e-5,
        eps_form: str = "tensor_overload",
        root: str = "rsqrt",
        square_mul: bool = False,
        negative_dim: bool = True,
        swap: bool = False,
        upcast: bool = True,
    ) -> fx.Node:
        """``h / sqrt(mean(h^2) + eps)`` in float32."""
        x = self.cast(h, torch.float32) if upcast else h
        square = self.call(aten.mul.Tensor, x, x) if square_mul else self.call(aten.pow.Tensor_Scalar, x, 2)
        dim = -1 if negative_dim else x.meta["val"].dim() - 1
        variance = self.call(aten.mean.dim, square, [dim], True)
        if eps_form == "tensor_overload":
            variance = self.add(variance, eps)
        elif eps_form == "scalar_overload":
            variance = self.call(aten.add.Scalar, variance, eps)
        elif eps_form in ("full", "swapped"):
            number = self.constant(eps, x.meta["val"].device)
            variance = self.add(number, variance) if eps_form == "swapped" else self.add(variance, number)
        if root == "div":
            return self.call(aten.div.Tensor, x, self.call(aten.sqrt.default, variance))
        if root == "pow":
            inverse = self.call(aten.pow.Tensor_Scalar, variance, -0.5)
        elif root == "reciprocal":
            inverse = self.call(aten.reciprocal.default, self.call(aten.sqrt.default, variance))
        else:
            inverse = self.call(aten.rsqrt.default, variance)
        return self.call(aten.mul.Tensor, *((inverse, x) if swap else (x, inverse)))

    def rms_norm(
        self, h: fx.Node, weight: fx.Node | None, form: str = "hf", *, swap: bool = False, **scale: Any
    ) -> fx.Node:
        """An RMSNorm of ``h`` in one of :data:`NORM_FORMS`; the result has the dtype of ``h``."""
        dtype = h.meta["val"].dtype
        y = self.scale(h, swap=swap, **scale)
        if form == "no_weight":
            return self.cast(y, dtype)
        assert weight is not None
        if form == "hf":
            y = self.cast(y, dtype)
        elif form == "gemma":
            weight = self.add(self.cast(weight, torch.float32), 1.0)
        return self.cast(self.call(aten.mul.Tensor, *((weight, y) if swap else (y, weight))), dtype)

    def layer_norm(
        self,
        h: fx.Node,
        weight: fx.Node | None = None,
        bias: fx.Node | None = None,
        *,
        correction: int = 0,
        dim: int = -1,
        eps: float = 1e-5,
    ) -> fx.Node:
        """As ``native_layer_norm`` is decomposed: in float32, and the result has the dtype of ``h``."""
        x = self.cast(h, torch.float32)
        outputs = self.call(aten.var_mean.correction, x, [dim], correction=correction, keepdim=True)
        variance, mean = (self.call(operator.getitem, outputs, index) for index in (0, 1))
        inverse = self.call(aten.rsqrt.default, self.add(variance, eps))
        y = self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, x, mean), inverse)
        y = y if weight is None else self.call(aten.mul.Tensor, y, weight)
        return self.cast(y if bias is None else self.add(y, bias), h.meta["val"].dtype)

    def centred(self, h: fx.Node) -> fx.Node:
        """``h`` without the mean of its rows."""
        return self.call(aten.sub.Tensor, h, self.call(aten.mean.dim, h, [-1], True))

    def output(self, *nodes: fx.Node) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.finish(*nodes))

    def finish(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(list(nodes))
        self.graph.lint()
        return self.graph


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Metadata included."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def run_graph(graph: fx.Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Interpret the graph; quicker than generating code for it when it runs once."""
    return fx.Interpreter(torch.nn.Module(), graph=graph).run(*inputs)


def metadata(graph: fx.Graph) -> list[tuple[str, Any]]:
    """Shape, stride, dtype and device of every node's value, as text (symbolic sizes included)."""
    return [(node.name, tree_map(_describe, node.meta.get("val"))) for node in graph.nodes if node.op != "output"]


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"


def propagated_metadata(graph: fx.Graph) -> list[tuple[str, Any]]:
    """The same, computed afresh by running the graph on its fake inputs."""
    fakes = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    mode = next((one.fake_mode for one in fakes if isinstance(one, FakeTensor)), contextlib.nullcontext())
    found: list[tuple[str, Any]] = []

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            found.append((node.name, tree_map(_describe, result)))
            return result

    with mode:
        Recorder(torch.nn.Module(), graph=graph).run(*fakes)
    return [(name, described) for name, described in found if name != "output"]
