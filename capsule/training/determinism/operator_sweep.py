"""The operator sweep: the results of the maths libraries for inputs that are made of integers.

There is one entry for each operator of torch, numpy, the C library and Python's ``random`` on which
training programs rely; many entries also compute gradients. Inputs come from integer arithmetic and
are exact, so that a difference between two machines is due to the operator of the entry. Sizes are
not multiples of any vector width. Entries depend neither on one another nor on their order, and
never return NaN, whose sign bit IEEE 754 does not define.
"""

# ruff: noqa: PLW0108 -- lambdas throughout, for uniformity, although some could be methods

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

Operator = Callable[[], Any]
SIZE = 4099  # prime


def integers(*shape: int, key: int = 0, bits: int = 24) -> NDArray[np.int64]:
    """Return fixed pseudo-random integers in ``[0, 2^bits)``.

    The index is mixed twice: its upper bits are folded in, and it is multiplied by an odd constant,
    modulo 2^64 (Steele et al. 2014, doi:10.1145/2660193.2660195, section 3: the finalizer of
    SplitMix).
    """
    # No input has 2^32 elements, so the indices of two keys are disjoint.
    mixed = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) + np.uint64(key << 32)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(factor)
    return (mixed >> np.uint64(64 - bits)).astype(np.int64).reshape(shape)


def real(*shape: int, key: int = 0, half_range: float = 4.0) -> torch.Tensor:
    """Return float32 in ``[-half_range, half_range)``; exact if ``half_range`` is a power of 2."""
    values = (integers(*shape, key=key) - (1 << 23)) * (half_range / (1 << 23))
    return _placed(np.asarray(values, np.float32))


def positive(*shape: int, key: int = 0, limit: float = 8.0) -> torch.Tensor:
    """Return float32 in ``(0, limit]``; exact if ``limit`` is a power of 2."""
    values = (integers(*shape, key=key) + 1) * (limit / (1 << 24))
    return _placed(np.asarray(values, np.float32))


def labels(*shape: int, classes: int, key: int = 0) -> torch.Tensor:
    """Return int64 in ``[0, classes)``."""
    return _placed(integers(*shape, key=key) % classes)


def _placed(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on torch's default device, as tensors that torch makes are."""
    return torch.from_numpy(array).to(torch.get_default_device())


def fill(module: nn.Module) -> None:
    """Set every parameter to exact numbers with the magnitude of usual initial weights."""
    with torch.no_grad():
        for key, parameter in enumerate(module.parameters(), start=100):
            fan_in = max(math.prod(parameter.shape[1:]), 1)
            bound = 2.0 ** -round(math.log2(fan_in) / 2)
            parameter.copy_(real(*parameter.shape, key=key, half_range=bound))


def operators(*, optimizers: bool) -> dict[str, Operator]:
    """Return the entries by name: functions that return a tensor, array, number, or a sequence.

    Args:
        optimizers: Whether to include ``torch.optim``, which takes a second to import.
    """
    return {
        **_elementwise(),
        **_reductions(),
        **_linear_algebra(),
        **_layers(),
        **_losses(),
        **(_optimizers() if optimizers else {}),
        **_samplers(),
        **_numpy(),
        **_c_library(),
        **_python_random(),
    }


def _both_ways(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a function and its gradients for a fixed cotangent."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    return [result.detach(), *_gradients(result, leaves)]


def _through(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the (first) result of a module, and the gradients of inputs and parameters."""
    fill(module)
    leaves = [value.clone().requires_grad_() for value in inputs]
    returned = module(*leaves)
    result = returned[0] if isinstance(returned, tuple) else returned
    return [result.detach(), *_gradients(result, [*leaves, *module.parameters()])]


def _gradients(result: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return gradients of a weighted sum of the result.

    If the weights were passed to autograd as a cotangent, torch would import sympy.
    """
    weights = real(*result.shape, key=99, half_range=1.0)
    return torch.autograd.grad((result * weights).sum(), leaves)


# ---- torch: element by element

_REAL_FUNCTIONS = (
    "asinh atan celu cos cosh elu erf erfc exp exp2 expm1 hardswish leaky_relu logsigmoid mish "
    "relu selu sigmoid silu sin sinc sinh softplus softsign square tan tanh tanhshrink"
)
_POSITIVE_FUNCTIONS = "digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt"
_UNIT_FUNCTIONS = "acos asin atanh erfinv"
_DOUBLE_FUNCTIONS = (
    "atan cos cosh erf exp expm1 lgamma log log10 log1p log2 rsqrt sigmoid sin sqrt tan tanh"
)


def _function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    for module in (torch, F):
        if hasattr(module, name):
            function: Callable[[torch.Tensor], torch.Tensor] = getattr(module, name)
            return function
    raise AttributeError(name)


def _elementwise() -> dict[str, Operator]:
    x, p, u = real(SIZE), positive(SIZE), real(SIZE, half_range=1.0)
    y, q = real(SIZE, key=1), positive(SIZE, key=1)
    special = torch.special
    entries: dict[str, Operator] = {
        f"torch.{name}": partial(_function(name), x) for name in _REAL_FUNCTIONS.split()
    }
    entries |= {f"torch.{n}": partial(_function(n), p) for n in _POSITIVE_FUNCTIONS.split()}
    entries |= {f"torch.{n}": partial(_function(n), u) for n in _UNIT_FUNCTIONS.split()}
    entries |= {
        f"torch.{n}.float64": partial(_function(n), p.double()) for n in _DOUBLE_FUNCTIONS.split()
    }
    entries |= {
        "torch.acos.float64": lambda: u.double().acos(),
        "torch.asin.float64": lambda: u.double().asin(),
        "torch.erfinv.float64": lambda: u.double().erfinv(),
        "torch.exp.bfloat16": lambda: x.bfloat16().exp(),
        "torch.acosh": lambda: (p + 1).acosh(),
        "torch.logit": lambda: (p / 16 + 0.25).logit(),
        "torch.special.entr": lambda: special.entr(p),
        "torch.special.i0e": lambda: special.i0e(x),
        "torch.special.i1e": lambda: special.i1e(x),
        "torch.special.log_ndtr": lambda: special.log_ndtr(x),
        "torch.special.ndtr": lambda: special.ndtr(x),
        "torch.special.ndtri": lambda: special.ndtri(p / 16 + 0.25),
        "torch.polygamma": lambda: torch.polygamma(1, p),
        "torch.gelu": lambda: _both_ways(F.gelu, x),
        "torch.gelu_tanh": lambda: _both_ways(lambda v: F.gelu(v, approximate="tanh"), x),
        "torch.div": lambda: x / q,
        "torch.pow": lambda: p.pow(y),
        "torch.pow.float64": lambda: p.double().pow(y.double()),
        "torch.atan2": lambda: torch.atan2(x, y),
        "torch.fmod": lambda: torch.fmod(x, q),
        "torch.remainder": lambda: torch.remainder(x, q),
        "torch.hypot": lambda: torch.hypot(x, y),
        "torch.logaddexp": lambda: torch.logaddexp(x, y),
        "torch.lerp": lambda: torch.lerp(x, y, u),
        "torch.addcmul": lambda: torch.addcmul(x, y, u, value=0.3),
        "torch.addcdiv": lambda: torch.addcdiv(x, y, q, value=0.3),
        "torch.xlogy": lambda: torch.xlogy(x, q),
        "torch.complex.exp": lambda: torch.complex(x, y).exp(),
    }
    return entries


# ---- torch: sums


def _reductions() -> dict[str, Operator]:
    x, rows, p = real(SIZE), real(61, 67), positive(61, 67)
    return {
        "torch.sum": lambda: x.sum(),
        "torch.sum.float64": lambda: x.double().sum(),
        "torch.sum.dim0": lambda: rows.sum(0),
        "torch.sum.dim1": lambda: rows.sum(1),
        "torch.mean": lambda: x.mean(),
        "torch.var": lambda: rows.var(1),
        "torch.std": lambda: x.std(),
        "torch.norm": lambda: torch.linalg.vector_norm(x),
        "torch.norm3": lambda: torch.linalg.vector_norm(rows, 3, 1),
        "torch.prod": lambda: (p / 4).prod(1),
        "torch.cumsum": lambda: x.cumsum(0),
        "torch.cumprod": lambda: (p / 4).cumprod(1),
        "torch.logsumexp": lambda: rows.logsumexp(1),
        "torch.logcumsumexp": lambda: rows.logcumsumexp(1),
        "torch.softmax": lambda: _both_ways(lambda v: v.softmax(1), rows),
        "torch.softmax.dim0": lambda: rows.softmax(0),
        "torch.log_softmax": lambda: _both_ways(lambda v: v.log_softmax(1), rows),
        "torch.scatter_add": lambda: torch.zeros(97).scatter_add(0, labels(SIZE, classes=97), x),
        "torch.index_add": lambda: torch.zeros(97).index_add(0, labels(SIZE, classes=97), x),
        "torch.index_put": lambda: torch.zeros(97).index_put(
            (labels(SIZE, classes=97),), x, accumulate=True
        ),
        "torch.scatter_reduce": lambda: torch.zeros(97).scatter_reduce(
            0, labels(SIZE, classes=97), x, "mean"
        ),
    }


# ---- torch: linear algebra


def _linear_algebra() -> dict[str, Operator]:
    a, b, v = real(67, 129), real(129, 71, key=1), real(129, key=2)
    square = real(37, 37, half_range=1.0)
    definite = square @ square.t() + 8 * torch.eye(37)
    batch, other = real(5, 17, 33), real(5, 33, 19, key=1)
    linalg = torch.linalg
    signal = real(7, 500)
    return {
        "torch.mm": lambda: a @ b,
        "torch.mm.float64": lambda: a.double() @ b.double(),
        "torch.mm.bfloat16": lambda: a.bfloat16() @ b.bfloat16(),
        "torch.mm.float16": lambda: a.half() @ b.half(),
        "torch.mm.transposed": lambda: b.t() @ a.t(),
        "torch.mm.large": lambda: real(300, 400) @ real(400, 500, key=1),
        "torch.mm.complex": lambda: torch.complex(a, a) @ torch.complex(b, b),
        "torch.mv": lambda: a @ v,
        "torch.dot": lambda: v @ v,
        "torch.outer": lambda: torch.outer(v, v),
        "torch.bmm": lambda: batch @ other,
        "torch.addmm": lambda: torch.addmm(real(71, key=3), a, b),
        "torch.baddbmm": lambda: torch.baddbmm(real(5, 17, 19, key=3), batch, other, beta=0.5),
        "torch.einsum": lambda: torch.einsum("bij,bjk->ik", batch, other),
        "torch.linear": lambda: _both_ways(F.linear, a, b.t().contiguous(), real(71, key=3)),
        "torch.cdist": lambda: torch.cdist(a, b.t()),
        "torch.cholesky": lambda: linalg.cholesky(definite),
        "torch.qr": lambda: linalg.qr(square),
        "torch.solve": lambda: linalg.solve(square, real(37, 3, key=5)),
        "torch.inverse": lambda: linalg.inv(definite),
        "torch.det": lambda: linalg.det(square),
        "torch.eigvalsh": lambda: linalg.eigvalsh(definite),
        "torch.svdvals": lambda: linalg.svdvals(square),
        "torch.lstsq": lambda: linalg.lstsq(a.t(), v[:, None], driver="gels").solution,
        "torch.matrix_exp": lambda: linalg.matrix_exp(square / 8),
        "torch.fft": lambda: torch.fft.fft(signal),
        "torch.rfft": lambda: torch.fft.rfft(signal),
        "torch.ifft.float64": lambda: torch.fft.ifft(signal.double()),
        "torch.fft2": lambda: torch.fft.fft2(real(3, 30, 42)),
    }


# ---- torch: layers, forwards and backwards


def _layers() -> dict[str, Operator]:
    frames = positive(3, 4, 84, 84, limit=1.0)
    maps, line, volume = real(3, 16, 20, 20), real(3, 16, 50), real(2, 4, 9, 9, 9)
    sequence = real(7, 5, 24)
    tokens, head = real(5, 11, 32), partial(real, 2, 4, 13, 8)
    return {
        "layer.conv1d": lambda: _through(nn.Conv1d(16, 24, 5), line),
        "layer.conv2d.nature1": lambda: _through(nn.Conv2d(4, 32, 8, 4), frames),
        "layer.conv2d.nature2": lambda: _through(nn.Conv2d(32, 64, 4, 2), real(3, 32, 20, 20)),
        "layer.conv2d.nature3": lambda: _through(nn.Conv2d(64, 64, 3), real(3, 64, 9, 9)),
        "layer.conv2d.same": lambda: _through(nn.Conv2d(16, 16, 3, padding=1), maps),
        "layer.conv2d.pointwise": lambda: _through(nn.Conv2d(16, 24, 1), maps),
        "layer.conv2d.depthwise": lambda: _through(nn.Conv2d(16, 16, 3, groups=16), maps),
        "layer.conv2d.dilated": lambda: _through(nn.Conv2d(16, 8, 3, dilation=2), maps),
        "layer.conv2d.odd": lambda: _through(nn.Conv2d(3, 5, 3, 2, 1), real(2, 3, 31, 33)),
        "layer.conv2d.channels_last": lambda: _through(
            nn.Conv2d(16, 16, 3), maps.contiguous(memory_format=torch.channels_last)
        ),
        "layer.conv3d": lambda: _through(nn.Conv3d(4, 8, 3), volume),
        "layer.conv_transpose2d": lambda: _through(nn.ConvTranspose2d(16, 8, 4, 2), maps),
        "layer.linear": lambda: _through(nn.Linear(129, 71), real(33, 129)),
        "layer.batch_norm": lambda: _through(nn.BatchNorm2d(16), maps),
        "layer.layer_norm": lambda: _through(nn.LayerNorm(32), tokens),
        "layer.group_norm": lambda: _through(nn.GroupNorm(4, 16), maps),
        "layer.instance_norm": lambda: _through(nn.InstanceNorm2d(16, affine=True), maps),
        "layer.rms_norm": lambda: _through(nn.RMSNorm(32), tokens),
        "layer.local_response_norm": lambda: _through(nn.LocalResponseNorm(5), maps),
        "layer.prelu": lambda: _through(nn.PReLU(), maps),
        "layer.glu": lambda: _through(nn.GLU(), tokens),
        "layer.max_pool": lambda: _through(nn.MaxPool2d(3, 2), maps),
        "layer.avg_pool": lambda: _through(nn.AvgPool2d(3, 2), maps),
        "layer.adaptive_avg_pool": lambda: _through(nn.AdaptiveAvgPool2d(3), maps),
        "layer.upsample": lambda: _through(nn.Upsample(scale_factor=2, mode="bilinear"), maps),
        "layer.lstm": lambda: _through(nn.LSTM(24, 40), sequence),
        "layer.lstm.bidirectional": lambda: _through(
            nn.LSTM(24, 20, num_layers=2, bidirectional=True), sequence
        ),
        "layer.lstm.inference": lambda: _inferred(nn.LSTM(24, 40), sequence),
        "layer.gru": lambda: _through(nn.GRU(24, 40), sequence),
        "layer.rnn": lambda: _through(nn.RNN(24, 40), sequence),
        "layer.lstm_cell": lambda: _through(nn.LSTMCell(24, 40), sequence[0]),
        "layer.attention": lambda: _both_ways(
            F.scaled_dot_product_attention, head(), head(key=1), head(key=2)
        ),
        "layer.multihead_attention": lambda: _through(
            nn.MultiheadAttention(32, 4, batch_first=True), tokens, tokens, tokens
        ),
        "layer.transformer": lambda: _through(
            nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True), tokens
        ),
        "layer.embedding": lambda: _both_ways(
            lambda table: F.embedding(labels(50, classes=30), table), real(30, 16)
        ),
        "layer.embedding_bag": lambda: _both_ways(
            lambda table: F.embedding_bag(labels(10, 5, classes=30), table), real(30, 16)
        ),
        "layer.grid_sample": lambda: F.grid_sample(
            maps, real(3, 9, 9, 2, half_range=1.0), align_corners=False
        ),
    }


def _inferred(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    fill(module)
    with torch.inference_mode():
        result: torch.Tensor = module.eval()(inputs)[0]
    return result


def _losses() -> dict[str, Operator]:
    scores, wanted = real(50, 18), real(50, 18, key=1)
    chance, other = positive(50, 18, limit=0.5), positive(50, 18, key=1, limit=0.5)
    classes = labels(50, classes=18)
    return {
        "loss.mse": lambda: _both_ways(F.mse_loss, scores, wanted),
        "loss.smooth_l1": lambda: _both_ways(F.smooth_l1_loss, scores, wanted),
        "loss.huber": lambda: _both_ways(F.huber_loss, scores, wanted),
        "loss.cross_entropy": lambda: _both_ways(lambda s: F.cross_entropy(s, classes), scores),
        "loss.binary": lambda: _both_ways(F.binary_cross_entropy, chance, other),
        "loss.binary_logits": lambda: _both_ways(
            lambda s: F.binary_cross_entropy_with_logits(s, other), scores
        ),
        "loss.kl_div": lambda: _both_ways(
            lambda s: F.kl_div(s.log_softmax(1), other, reduction="sum"), scores
        ),
        "loss.gaussian": lambda: _both_ways(F.gaussian_nll_loss, scores, wanted, chance),
        "loss.cosine": lambda: _both_ways(F.cosine_similarity, scores, wanted),
    }


# ---- torch: optimizers, three updates each


def _optimizers() -> dict[str, Operator]:
    o = torch.optim
    return {
        "optimizer.sgd": partial(_updated, o.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        "optimizer.adam": partial(_updated, o.Adam, lr=0.01),
        "optimizer.adam.loop": partial(_updated, o.Adam, lr=0.01, foreach=False),
        "optimizer.adam.fused": partial(_updated, o.Adam, lr=0.01, fused=True),
        "optimizer.adamw": partial(_updated, o.AdamW, lr=0.01),
        "optimizer.rmsprop": partial(_updated, o.RMSprop, lr=0.01, centered=True),
        "optimizer.adagrad": partial(_updated, o.Adagrad, lr=0.01),
        "optimizer.nadam": partial(_updated, o.NAdam, lr=0.01),
    }


def _updated(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    weights = nn.Parameter(real(SIZE))
    updater = optimizer([weights], **options)
    for key in range(3):
        weights.grad = real(SIZE, key=key)
        updater.step()
    return weights.detach()


# ---- torch: random numbers


def _samplers() -> dict[str, Operator]:
    def drawn(draw: Callable[[torch.Generator], torch.Tensor]) -> Operator:
        return lambda: draw(torch.Generator().manual_seed(7))

    def empty() -> torch.Tensor:
        return torch.zeros(1003)

    weights, rates = positive(5, 40), positive(300)
    return {
        "random.rand": drawn(lambda g: torch.rand(1003, generator=g)),
        "random.randn": drawn(lambda g: torch.randn(1003, generator=g)),
        # Torch draws fewer than 16 numbers one by one, and not in vectors.
        "random.randn.few": drawn(lambda g: torch.randn(7, generator=g)),
        "random.randn.float64": drawn(
            lambda g: torch.randn(1003, generator=g, dtype=torch.float64)
        ),
        "random.randint": drawn(lambda g: torch.randint(0, 1000, (1003,), generator=g)),
        "random.randperm": drawn(lambda g: torch.randperm(1003, generator=g)),
        "random.normal": drawn(lambda g: torch.normal(empty(), 2.0, generator=g)),
        "random.exponential": drawn(lambda g: empty().exponential_(generator=g)),
        "random.exponential.float64": drawn(lambda g: empty().double().exponential_(generator=g)),
        "random.log_normal": drawn(lambda g: empty().log_normal_(generator=g)),
        "random.cauchy": drawn(lambda g: empty().cauchy_(generator=g)),
        "random.geometric": drawn(lambda g: empty().geometric_(0.3, generator=g)),
        "random.bernoulli": drawn(lambda g: torch.bernoulli(rates / 8, generator=g)),
        "random.poisson": drawn(lambda g: torch.poisson(rates, generator=g)),
        "random.multinomial": drawn(lambda g: torch.multinomial(weights, 9, generator=g)),
        "random.kaiming": drawn(
            lambda g: nn.init.kaiming_uniform_(torch.zeros(40, 30), generator=g)
        ),
        "random.trunc_normal": drawn(lambda g: nn.init.trunc_normal_(empty(), generator=g)),
        "random.orthogonal": drawn(lambda g: nn.init.orthogonal_(torch.zeros(40, 30), generator=g)),
    }


# ---- numpy

_NUMPY_FUNCTIONS = "arctan cbrt cos exp exp2 expm1 log log10 log1p log2 sin sqrt tan tanh"


def _numpy() -> dict[str, Operator]:
    p, u = positive(SIZE).double().numpy(), real(SIZE, half_range=1.0).double().numpy()
    a, b = real(67, 129).numpy(), real(129, 71, key=1).numpy()
    square = real(37, 37, half_range=1.0).double().numpy()
    generator = np.random.default_rng
    entries: dict[str, Operator] = {
        f"numpy.{name}": partial(getattr(np, name), p) for name in _NUMPY_FUNCTIONS.split()
    }
    entries |= {
        f"numpy.{name}.float32": partial(getattr(np, name), p.astype(np.float32))
        for name in _NUMPY_FUNCTIONS.split()
    }
    return entries | {
        "numpy.arcsin": lambda: np.arcsin(u),
        "numpy.arccos": lambda: np.arccos(u),
        "numpy.power": lambda: np.power(p, u),
        "numpy.power.float32": lambda: np.power(p.astype(np.float32), u.astype(np.float32)),
        "numpy.hypot": lambda: np.hypot(p, u),
        "numpy.sum": lambda: p.sum(),
        "numpy.sum.float32": lambda: p.astype(np.float32).sum(),
        "numpy.mean": lambda: a.mean(0),
        "numpy.var": lambda: a.var(1),
        "numpy.cumsum": lambda: u.cumsum(),
        "numpy.dot": lambda: p @ u,
        "numpy.dot.float32": lambda: p.astype(np.float32) @ u.astype(np.float32),
        "numpy.matmul": lambda: a.astype(np.float64) @ b.astype(np.float64),
        "numpy.matmul.float32": lambda: a @ b,
        "numpy.einsum": lambda: np.einsum("ij,jk->k", a, b),
        "numpy.solve": lambda: np.linalg.solve(square, square[:, 0]),
        "numpy.svd": lambda: np.linalg.svd(square, compute_uv=False),
        "numpy.eigvalsh": lambda: np.linalg.eigvalsh(square @ square.T),
        "numpy.fft": lambda: np.fft.rfft(p),
        "numpy.interp": lambda: np.interp(p, np.arange(10.0), u[:10]),
        "numpy.random.normal": lambda: generator(7).normal(size=999),
        "numpy.random.exponential": lambda: generator(7).exponential(size=999),
        "numpy.random.gamma": lambda: generator(7).gamma(0.7, size=999),
        "numpy.random.beta": lambda: generator(7).beta(0.5, 0.5, size=999),
        "numpy.random.poisson": lambda: generator(7).poisson(4.5, size=999),
        # The sum of the weights 0 to 8 is 36.
        "numpy.random.choice": lambda: generator(7).choice(9, 99, p=np.arange(9.0) / 36),
        "numpy.random.legacy_normal": lambda: np.random.RandomState(7).normal(size=999),
    }


# ---- the C library, and Python on top of it

_C_FUNCTIONS = (  # binary64 to binary64
    "acosh asinh atan cbrt cos cosh erf erfc exp exp2 expm1 lgamma log log10 log1p log2 sin sinh "
    "tan tanh tgamma"
)
_C_SINGLE_FUNCTIONS = "atanf cosf expf logf log2f sinf tanf tanhf"


def _c_library() -> dict[str, Operator]:
    inputs = (positive(251) + 1).tolist()
    library = ctypes.CDLL("libm.so.6")

    def of(name: str, kind: type[ctypes.c_double | ctypes.c_float]) -> Operator:
        function = library[name]
        function.argtypes, function.restype = [kind], kind
        return lambda: [function(value) for value in inputs]

    entries = {f"libm.{name}": of(name, ctypes.c_double) for name in _C_FUNCTIONS.split()}
    entries |= {f"libm.{name}": of(name, ctypes.c_float) for name in _C_SINGLE_FUNCTIONS.split()}
    return entries | {
        "libm.asin": lambda: [math.asin(value / 16) for value in inputs],
        "libm.acos": lambda: [math.acos(value / 16) for value in inputs],
        "libm.pow": lambda: [math.pow(value, value / 3) for value in inputs],
        "libm.atan2": lambda: [math.atan2(value, value - 3) for value in inputs],
        "libm.hypot": lambda: [math.hypot(value, 3.0) for value in inputs],
        "libm.fmod": lambda: [math.fmod(value, 0.3) for value in inputs],
    }


def _python_random() -> dict[str, Operator]:
    def drawn(draw: Callable[[random.Random], float]) -> Operator:
        def numbers() -> Iterator[float]:
            source = random.Random(7)  # noqa: S311 - a test of its bits, not a secret
            for _ in range(99):
                yield draw(source)

        return lambda: list(numbers())

    return {
        "python.gauss": drawn(lambda source: source.gauss(0.0, 1.0)),
        "python.normalvariate": drawn(lambda source: source.normalvariate(0.0, 1.0)),
        "python.expovariate": drawn(lambda source: source.expovariate(1.5)),
        "python.gammavariate": drawn(lambda source: source.gammavariate(0.7, 1.0)),
        "python.betavariate": drawn(lambda source: source.betavariate(0.5, 0.5)),
        "python.vonmisesvariate": drawn(lambda source: source.vonmisesvariate(0.0, 4.0)),
    }
