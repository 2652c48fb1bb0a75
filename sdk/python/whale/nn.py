"""Layers as plain functions: each makes its parameters under a name scope of its own and returns the result.

Shapes are batch first; images are channels-last ``[n, height, width, channels]``. A layer called twice makes two sets of
parameters; to share one, make it with ``whale.parameter`` and use the op itself.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Union

from . import arguments, ops
from .graph import Init, Tensor, normal, ones, parameter, scope, uniform, zeros

Size = Union[int, Sequence[int]]


def _last(x: Tensor) -> int:
    """Extent of the dimension that a layer works on."""
    if not arguments.instance("x", x, Tensor, "a tensor of the graph").shape:
        raise ValueError("a layer works on the last dimension of x, and x is a scalar; give it one: x.reshape(1)")
    return x.shape[-1]


def _rank(x: Tensor) -> int:
    return len(arguments.instance("x", x, Tensor, "a tensor of the graph").shape)


def _fan_in(fan: int) -> Init:
    bound = 1.0 / math.sqrt(max(fan, 1))
    return uniform(-bound, bound)


def linear(x: Tensor, features: int, *, bias: bool = True, init: Optional[Init] = None, name: str = "linear") -> Tensor:
    """x [..., d] @ weight [d, features] + bias. Weights start uniform in +-1/sqrt(d) unless ``init`` says otherwise; biases at 0."""
    arguments.integer("features", features, 1), arguments.flag("bias", bias)
    with scope(name):
        weight = parameter("weight", (_last(x), features), init or _fan_in(_last(x)))
        return ops.matmul(x, weight, parameter("bias", (features,), zeros()) if bias else None)


def embedding(ids: Tensor, vocabulary: int, features: int, *, init: Optional[Init] = None, name: str = "embedding") -> Tensor:
    """Rows of a table [vocabulary, features]: ids [...] -> [..., features]."""
    arguments.integer("vocabulary", vocabulary, 1), arguments.integer("features", features, 1)
    with scope(name):
        return ops.embedding(parameter("weight", (vocabulary, features), init or normal(0.02)), ids)


def layer_norm(x: Tensor, *, epsilon: float = 1e-5, bias: bool = True, name: str = "norm") -> Tensor:
    """Layer normalization over the last dimension (Ba et al., 2016)."""
    arguments.flag("bias", bias)
    with scope(name):
        gamma = parameter("weight", (_last(x),), ones())
        beta = parameter("bias", (x.shape[-1],), zeros()) if bias else None
        return ops.layer_norm(x, gamma, beta, epsilon=epsilon)[0]


def rms_norm(x: Tensor, *, epsilon: float = 1e-6, name: str = "norm") -> Tensor:
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich, 2019)."""
    with scope(name):
        return ops.rms_norm(x, parameter("weight", (_last(x),), ones()), epsilon=epsilon)[0]


def batch_norm(x: Tensor, *, epsilon: float = 1e-5, momentum: float = 0.1, groups: int = 1, name: str = "norm") -> Tensor:
    """Batch normalization over all but the last dimension (Ioffe & Szegedy, 2015). The statistics are those of the whole batch of
    the step, also when a plan cuts it; evaluation uses the running ones. groups: so many runs of samples are normalized by
    statistics of their own, which plans with micro-batches need (a multiple of them). momentum: weight of the new statistics in the running ones."""
    channels = _last(x)
    arguments.number("epsilon", epsilon, 0), arguments.number("momentum", momentum, 0, 1), arguments.integer("groups", groups, 1)
    with scope(name):
        return ops.batch_norm(x, parameter("weight", (channels,), ones()), parameter("bias", (channels,), zeros()),
                              parameter("running_mean", (channels,), zeros(), buffer=True, trainable=False),
                              parameter("running_var", (channels,), ones(), buffer=True, trainable=False),
                              epsilon=epsilon, momentum=momentum, groups=groups)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zeroes elements with probability ``rate`` and scales the rest by 1/(1-rate); off in evaluation."""
    return ops.dropout(x, rate=float(rate)) if arguments.fraction("rate", rate) else x


def attention(x: Tensor, heads: int, *, causal: bool = False, kv_heads: int = 0, context: Optional[Tensor] = None,
              bias: Optional[Tensor] = None, rotary: bool = False, dropout: float = 0.0, features: int = 0,
              linear_bias: bool = True, scale: float = 0.0, init: Optional[Init] = None, out_init: Optional[Init] = None,
              name: str = "attention") -> Tensor:
    """Multi-head attention over x [b, t, d] (Vaswani et al., 2017), to itself or to ``context`` [b, s, d].

    kv_heads: grouped queries, a divisor of heads, 0: as many as heads. bias: added to the scaled scores, [b|1, h|1, t, s]; -inf masks.
    causal: query i sees keys up to i + s - t. rotary: rotary position embedding on queries and keys, each by its place in its own
    sequence. dropout: of the probabilities. features: size of one head, 0: d / heads. linear_bias: of the projections.
    scale: of the scores, 0: 1/sqrt(features). out_init: of the last projection, None: ``init``."""
    for what, sequence in (("x", x), ("context", context)):
        if (sequence is not None or what == "x") and _rank(sequence) != 3:
            raise arguments.wrong(what, sequence, "a tensor [batch, places, features]")
    for what, given in dict(causal=causal, rotary=rotary, linear_bias=linear_bias).items():
        arguments.flag(what, given)
    b, t, d = x.shape
    h = arguments.integer("heads", heads, 1)
    hk, f = arguments.integer("kv_heads", kv_heads, 0) or h, arguments.integer("features", features, 0) or d // h
    if not features and d % h:
        raise arguments.wrong("heads", heads, f"a divisor of the {d} features of x, {list(x.shape)}")
    if h % hk:
        raise arguments.wrong("kv_heads", kv_heads, f"a divisor of the {h} heads")
    if rotary and f % 2:
        raise arguments.wrong("rotary", rotary, f"heads of an even size with it, found {f}: it turns pairs")
    common = dict(causal=causal, dropout=arguments.fraction("dropout", dropout), scale=arguments.number("scale", scale, 0))
    with scope(name):
        if context is None:
            packed = linear(x, (h + 2 * hk) * f, bias=linear_bias, init=init, name="qkv").reshape(-1, t, h + 2 * hk, f)
            if rotary:
                packed = ops.rotary(packed, heads=h + hk)
            out = ops.attention(packed, None, None, bias, kv_heads=hk, **common)[0]
        else:
            s = context.shape[1]
            q = linear(x, h * f, bias=linear_bias, init=init, name="query").reshape(-1, t, h, f)
            k = linear(context, hk * f, bias=linear_bias, init=init, name="key").reshape(-1, s, hk, f)
            v = linear(context, hk * f, bias=linear_bias, init=init, name="value").reshape(-1, s, hk, f)
            if rotary:
                q, k = ops.rotary(q), ops.rotary(k)
            out = ops.attention(q, k, v, bias, **common)[0]
        return linear(out.reshape(-1, t, h * f), d, bias=linear_bias, init=out_init or init, name="out")


_ACTIVATIONS = {"relu": ops.relu, "gelu": ops.gelu, "gelu_erf": ops.gelu_erf, "silu": ops.silu, "tanh": ops.tanh,
                "sigmoid": ops.sigmoid}


def _activation(name: str):
    return _ACTIVATIONS[arguments.choice("activation", name, _ACTIVATIONS)]


def mlp(x: Tensor, hidden: int, *, activation: str = "gelu", dropout: float = 0.0, bias: bool = True,
        init: Optional[Init] = None, out_init: Optional[Init] = None, name: str = "mlp") -> Tensor:
    """x [..., d] -> hidden -> d, with ``activation`` between: relu, gelu (tanh form), gelu_erf (exact), silu, tanh, sigmoid. dropout:
    of the result. out_init: of the second layer, None: ``init``."""
    arguments.integer("hidden", hidden, 1)
    with scope(name):
        y = _activation(activation)(linear(x, hidden, bias=bias, init=init, name="up"))
        y = linear(y, _last(x), bias=bias, init=out_init or init, name="down")
    return globals()["dropout"](y, dropout)


def moe(x: Tensor, experts: int, hidden: int, *, top_k: int = 1, capacity_factor: float = 1.25, activation: str = "gelu",
        init: Optional[Init] = None, out_init: Optional[Init] = None, name: str = "moe") -> tuple[Tensor, Tensor, Tensor]:
    """A mixture of experts over x [b, t, d] (Lepikhin et al., 2020): each token goes to ``top_k`` of ``experts`` MLPs, each sequence
    is a routing group, and an expert takes at most capacity_factor * top_k * t / experts of its tokens.

    activation, init, out_init: of the experts, as in ``mlp``; init is the router's too.

    Returns y [b, t, d], the load-balancing loss of each sequence [b] (add about 0.01 of its mean to the loss), and how many choices
    found no place [b]. The experts' parameters are in the scope ``experts``."""
    if _rank(x) != 3:
        raise arguments.wrong("x", x, "a tensor [batch, places, features]")
    d, t = x.shape[-1], x.shape[1]
    arguments.integer("experts", experts, 1), arguments.integer("hidden", hidden, 1), arguments.integer("top_k", top_k, 1, experts)
    arguments.positive("capacity_factor", capacity_factor)
    capacity = max(1, math.ceil(min(t, capacity_factor * (top_k * t / experts))))
    with scope(name):
        slot, weight, aux, dropped = ops.moe_gate(linear(x, experts, bias=False, init=init, name="router"), k=top_k, capacity=capacity,
                                                  normalize=top_k > 1)
        y = ops.moe_dispatch(x, slot, experts=experts, capacity=capacity)
        with scope("experts"):
            y = y.reshape(experts, -1, d)
            for layer, width, start in (("up", hidden, init), ("down", d, out_init or init)):
                weights = parameter(f"{layer}.weight", (experts, y.shape[-1], width), start or _fan_in(y.shape[-1]))
                y = ops.matmul(y, weights) + parameter(f"{layer}.bias", (experts, 1, width), zeros(), decay=False)
                y = _activation(activation)(y) if layer == "up" else y
            y = y.reshape(experts, -1, capacity, d)
        return ops.moe_combine(y, slot, weight), aux, dropped


def transformer_block(x: Tensor, heads: int, *, causal: bool = False, hidden: int = 0, activation: str = "gelu", kv_heads: int = 0,
                      rotary: bool = False, bias: Optional[Tensor] = None, dropout: float = 0.0, init: Optional[Init] = None,
                      out_init: Optional[Init] = None, name: str = "block") -> Tensor:
    """A pre-norm transformer block over x [b, t, d]: x + attention(norm(x)), then x + mlp(norm(x)). hidden 0: 4 d. dropout: of both
    branches' results. causal, kv_heads, rotary, bias, activation, init, out_init: as in ``attention`` and ``mlp``."""
    drop = globals()["dropout"]
    arguments.integer("hidden", hidden, 0)
    with scope(name):
        y = attention(layer_norm(x, name="norm1"), heads, causal=causal, kv_heads=kv_heads, rotary=rotary, bias=bias,
                      init=init, out_init=out_init)
        x = x + drop(y, dropout)
        return x + mlp(layer_norm(x, name="norm2"), hidden or 4 * _last(x), activation=activation, dropout=dropout,
                       init=init, out_init=out_init)


def _tuple(name: str, value: Size, n: int, low: int = 1) -> list[int]:
    """One number for each spatial dimension; a single one is for all."""
    if not hasattr(value, "__iter__") or isinstance(value, str):
        return [arguments.integer(name, value, low)] * n
    sizes = list(arguments.shape(name, value, low))
    if len(sizes) != n:
        raise arguments.wrong(name, value, f"a number, or one for each of the {n} spatial dimensions")
    return sizes


def _padding(padding: Union[str, Size], kernel: list[int], stride: list[int], dilation: list[int], sizes: Sequence[int]) -> list[int]:
    """(low, high) per dimension, flattened. "same": output = ceil(input / stride), as in TensorFlow; "valid": none."""
    if padding == "valid":
        return [0] * (2 * len(kernel))
    if padding == "same":
        flat = []
        for k, s, d, n in zip(kernel, stride, dilation, sizes):
            total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
            flat += [total // 2, total - total // 2]
        return flat
    if isinstance(padding, str):
        raise arguments.wrong("padding", padding, "'same', 'valid' or numbers")
    return [p for each in _tuple("padding", padding, len(kernel), 0) for p in (each, each)]


def _conv(rank: int, x: Tensor, features: int, kernel: Size, stride: Size, padding: Union[str, Size], dilation: Size, groups: int,
          bias: bool, init: Optional[Init], name: str) -> Tensor:
    if _rank(x) != rank + 2:
        raise arguments.wrong("x", x, f"[n, {rank} spatial dimensions, channels]")
    k, s, d = _tuple("kernel", kernel, rank), _tuple("stride", stride, rank), _tuple("dilation", dilation, rank)
    channels = _last(x)
    arguments.integer("features", features, 1), arguments.integer("groups", groups, 1), arguments.flag("bias", bias)
    if channels % groups or features % groups:
        raise arguments.wrong("groups", groups, f"a divisor of the {channels} channels of x and of the {features} features")
    fan = channels // groups * math.prod(k)
    with scope(name):
        weight = parameter("weight", (features, *k, channels // groups), init or normal(math.sqrt(2.0 / max(fan, 1))))
        return ops.conv(x, weight, parameter("bias", (features,), zeros()) if bias else None, strides=s,
                        padding=_padding(padding, k, s, d, x.shape[1:-1]), dilation=d, groups=groups)


def conv1d(x: Tensor, features: int, kernel: Size, *, stride: Size = 1, padding: Union[str, Size] = "same", dilation: Size = 1,
           groups: int = 1, bias: bool = True, init: Optional[Init] = None, name: str = "conv") -> Tensor:
    """Convolution of x [n, length, channels]. Filters [features, kernel, channels/groups], He-normal by default. padding: as in ``conv2d``."""
    return _conv(1, x, features, kernel, stride, padding, dilation, groups, bias, init, name)


def conv2d(x: Tensor, features: int, kernel: Size, *, stride: Size = 1, padding: Union[str, Size] = "same", dilation: Size = 1,
           groups: int = 1, bias: bool = True, init: Optional[Init] = None, name: str = "conv") -> Tensor:
    """Convolution of x [n, height, width, channels]. padding: "same", "valid", or zeros on both sides per dimension."""
    return _conv(2, x, features, kernel, stride, padding, dilation, groups, bias, init, name)


def conv2d_transpose(x: Tensor, features: int, kernel: Size, *, stride: Size = 1, padding: Size = 0, output_padding: Size = 0,
                     bias: bool = True, init: Optional[Init] = None, name: str = "conv_transpose") -> Tensor:
    """Transposed convolution of x [n, height, width, channels]: height becomes (height - 1) stride + kernel - 2 padding +
    output_padding, width alike. Filters [channels, kernel, kernel, features], He-normal by default."""
    if _rank(x) != 4:
        raise arguments.wrong("x", x, "[n, height, width, channels]")
    k, s, p = _tuple("kernel", kernel, 2), _tuple("stride", stride, 2), _tuple("padding", padding, 2, 0)
    arguments.integer("features", features, 1), arguments.flag("bias", bias)
    fan = x.shape[-1] * math.prod(k) / math.prod(s)
    with scope(name):
        weight = parameter("weight", (x.shape[-1], *k, features), init or normal(math.sqrt(2.0 / max(fan, 1))))
        return ops.conv_transpose(x, weight, parameter("bias", (features,), zeros()) if bias else None, strides=s,
                                  padding=[each for side in p for each in (side, side)], output_padding=_tuple("output_padding", output_padding, 2, 0))


def _pool(op, x: Tensor, window: Size, stride: Optional[Size], padding: Union[str, Size], **attrs):
    rank = _rank(x) - 2
    w = _tuple("window", window, rank)
    s = _tuple("stride", window if stride is None else stride, rank)
    return op(x, window=w, strides=s, padding=_padding(padding, w, s, [1] * rank, x.shape[1:-1]), **attrs)


def max_pool(x: Tensor, window: Size, stride: Optional[Size] = None, padding: Union[str, Size] = 0) -> Tensor:
    """Maximum over windows of the spatial dimensions of x [n, spatial..., c]; stride None: the window. padding: as in ``conv2d``, with
    values below all others."""
    return _pool(ops.max_pool, x, window, stride, padding)[0]


def avg_pool(x: Tensor, window: Size, stride: Optional[Size] = None, padding: Union[str, Size] = 0,
             include_pad: bool = False) -> Tensor:
    """Mean over windows of the spatial dimensions of x [n, spatial..., c]; stride None: the window. padding: as in ``conv2d``.
    include_pad: zeros of the padding count."""
    return _pool(ops.avg_pool, x, window, stride, padding, include_pad=include_pad)


def global_avg_pool(x: Tensor) -> Tensor:
    """Mean over all spatial dimensions: [n, spatial..., c] -> [n, c]."""
    rank = _rank(x)
    return x.mean(axis=list(range(1, rank - 1)))


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy from logits [..., v] and integer labels [...]; labels equal to ``ignore_index`` do not count. With no label
    that counts, loss and gradient are 0."""
    rows = ops.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=float(label_smoothing))[0]
    count = (labels != ignore_index).astype(rows.dtype).sum()
    return rows.sum() / ops.maximum(count, rows.graph.as_tensor(1.0, rows.dtype))


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements."""
    return ops.squared_difference(prediction, target).mean()


def binary_cross_entropy_with_logits(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all elements of the binary cross entropy of sigmoid(logits) with target in [0, 1], computed stably."""
    return ops.bce_with_logits(logits, target).mean()
