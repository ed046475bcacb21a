"""The determinism of torch's operators, by device and flag.

The rules restate the two lists in the documentation of ``torch.use_deterministic_algorithms``
(2.13) in terms of dispatched operators. This module does not import torch, because hosts read it,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal[
    "deterministic",  # always
    "seeded",  # given the state of the generator from which it draws
    "uninitialized",  # returns uninitialized memory, which is filled if the flag is on
    "with-flag",  # only if torch.use_deterministic_algorithms is on
    "raises",  # never; if the flag is on, it raises an error, or warns under warn_only
    "unknown",  # not one of torch's own operators
]
STATUSES: tuple[Status, ...] = get_args(Status)

Device = Literal["cpu", "cuda"]
Arguments = Mapping[str, Any]
BOTH: tuple[Device, ...] = ("cpu", "cuda")
CUDA: tuple[Device, ...] = ("cuda",)
CPU: tuple[Device, ...] = ("cpu",)


@dataclass(frozen=True)
class Rule:
    """The status of some operators.

    Attributes:
        status: Their status, if the rule applies.
        devices: The devices to which it applies.
        operators: Names without namespace and without the underscore of the in-place form.
        documented: The entries of torch's lists that the rule restates, without markup.
        applies: Returns whether the rule applies to arguments, by their names in the schema.
    """

    status: Status
    devices: tuple[Device, ...]
    operators: tuple[str, ...]
    documented: tuple[str, ...]
    applies: Callable[[Arguments], bool] = lambda _: True


def status_of(
    operator: str, device: str, arguments: Arguments, *, seeded: bool
) -> tuple[Status, str | None]:
    """Return the status of one call, and the entry of torch's documentation that states it.

    Args:
        operator: Name with namespace, such as ``aten::index_put_``.
        device: Type of the device on which it computes, such as ``cpu``.
        arguments: Its arguments, by their names in the schema.
        seeded: Whether it draws from a generator.
    """
    namespace, _, name = operator.partition("::")
    if namespace not in {"aten", "prims", "profiler"}:
        return "unknown", None
    base = name.rstrip("_")
    for rule in _BY_OPERATOR.get(base, ()):
        if device in rule.devices and rule.applies(arguments):
            return rule.status, rule.documented[0] if rule.documented else None
    if base in UNINITIALIZED:
        return "uninitialized", None
    return ("seeded" if seeded else "deterministic"), None


def _accumulates(arguments: Arguments) -> bool:
    return bool(arguments.get("accumulate"))


def _overwrites(arguments: Arguments) -> bool:
    return not _accumulates(arguments)


def _floating(arguments: Arguments) -> bool:
    dtype = arguments.get("dtype") or arguments["self"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def _rules(status: Status, devices: tuple[Device, ...], *others: tuple[Any, ...]) -> list[Rule]:
    """Return rules with the same status and devices, and the other attributes in ``others``."""
    return [Rule(status, devices, *other) for other in others]


def _differentiated(*kinds: str) -> tuple[str, ...]:
    return tuple(f"torch.{kind} when attempting to differentiate a CUDA tensor" for kind in kinds)


_INDEX_PUT = ("index_put", "_index_put_impl", "_unsafe_index_put")
RULES: tuple[Rule, ...] = (
    *_rules(
        "with-flag",
        CUDA,
        (
            (
                *("convolution", "convolution_backward"),
                *("cudnn_convolution", "cudnn_convolution_transpose"),
            ),
            tuple(
                f"torch.nn.{kind}{dimensions}d when called on CUDA tensor"
                for kind in ("Conv", "ConvTranspose")
                for dimensions in (1, 2, 3)
            ),
        ),
        (
            tuple(f"replication_pad{n}d_backward" for n in (1, 2, 3)),
            _differentiated(*(f"nn.ReplicationPad{n}d" for n in (1, 2, 3))),
        ),
        (
            ("bmm",),
            ("torch.bmm when called on sparse-dense CUDA tensors",),
            # Compared by name, because torch is not imported here.
            lambda arguments: str(arguments["self"].layout) != "torch.strided",
        ),
        (
            ("scatter_add",),
            (
                "torch.Tensor.scatter_add_ when called on a CUDA tensor",
                "torch.gather when called on a CUDA tensor that requires grad",
            ),
        ),
        (
            ("index_add",),
            (
                "torch.index_add when called on CUDA tensor",
                *_differentiated("index_select", "repeat_interleave"),
            ),
        ),
        (
            ("scatter",),
            ("torch.Tensor.scatter when src type is Tensor and called on CUDA tensor",),
            lambda arguments: "src" in arguments,
        ),
        (
            ("scatter_reduce",),
            (
                (
                    "torch.Tensor.scatter_reduce when reduce='sum' or reduce='mean' and called on "
                    "CUDA tensor"
                ),
            ),
            lambda arguments: arguments.get("reduce") in {"sum", "mean"},
        ),
        (("max_pool3d_with_indices_backward",), _differentiated("nn.MaxPool3d")),
        # These are not in torch's lists. Under warn_only they also stay nondeterministic.
        (
            (
                "_scaled_dot_product_efficient_attention_backward",
                "_efficient_attention_backward",
                "_scaled_dot_product_flash_attention_backward",
                "_flash_attention_backward",
            ),
            (),
        ),
    ),
    *_rules(
        "with-flag",
        CPU,
        (
            _INDEX_PUT,  # with accumulate=True, torch lists it for CPU tensors only
            (
                "torch.Tensor.index_put with accumulate=True when called on a CPU tensor",
                (
                    "torch.Tensor.__getitem__ when attempting to differentiate a CPU tensor and "
                    "the index is a list of tensors"
                ),
            ),
            _accumulates,
        ),
        (
            ("put",),
            ("torch.Tensor.put_ with accumulate=True when called on a CPU tensor",),
            _accumulates,
        ),
    ),
    *_rules(
        "with-flag",
        BOTH,
        (_INDEX_PUT, ("torch.Tensor.index_put with accumulate=False",), _overwrites),
        (("index_copy",), ("torch.Tensor.index_copy when called on a CPU or CUDA tensor",)),
    ),
    *_rules(
        "raises",
        CUDA,
        (("avg_pool3d_backward",), _differentiated("nn.AvgPool3d")),
        (("_adaptive_avg_pool2d_backward",), _differentiated("nn.AdaptiveAvgPool2d")),
        (("_adaptive_avg_pool3d_backward",), _differentiated("nn.AdaptiveAvgPool3d")),
        (("adaptive_max_pool2d_backward",), _differentiated("nn.AdaptiveMaxPool2d")),
        (("fractional_max_pool2d_backward",), _differentiated("nn.FractionalMaxPool2d")),
        (("fractional_max_pool3d_backward",), _differentiated("nn.FractionalMaxPool3d")),
        (("reflection_pad1d_backward",), _differentiated("nn.ReflectionPad1d")),
        (("reflection_pad2d_backward",), _differentiated("nn.ReflectionPad2d")),
        (("reflection_pad3d_backward",), _differentiated("nn.ReflectionPad3d")),
        (("_ctc_loss_backward", "_cudnn_ctc_loss"), _differentiated("nn.CTCLoss")),
        (
            (
                *("upsample_linear1d_backward", "upsample_trilinear3d_backward"),
                *("upsample_bilinear2d_backward", "_upsample_bilinear2d_aa_backward"),
                *("upsample_bicubic2d_backward", "_upsample_bicubic2d_aa_backward"),
            ),
            tuple(
                f"{entry} and one of the following modes is used: linear, bilinear, bicubic, "
                "trilinear"
                for entry in _differentiated("nn.functional.interpolate")
            ),
        ),
        # Only the spatial form: nll_loss_forward adds in a fixed order.
        (("nll_loss2d_forward",), ("torch.nn.NLLLoss when called on a CUDA tensor",)),
        (
            ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
            tuple(f"{entry} when mode='max'" for entry in _differentiated("nn.EmbeddingBag")),
            lambda arguments: arguments.get("mode") == 2,  # 0 sum, 1 mean, 2 max
        ),
        (
            ("put",),
            ("torch.Tensor.put_ when accumulate=True and called on a CUDA tensor",),
            _accumulates,
        ),
        (("histc",), ("torch.histc when called on a CUDA tensor",)),
        (
            ("bincount",),
            ("torch.bincount when called on a CUDA tensor and weights tensor is given",),
            lambda arguments: arguments.get("weights") is not None,
        ),
        (
            ("median",),
            ("torch.median with indices output when called on a CUDA tensor",),
            lambda arguments: "dim" in arguments,
        ),
        (
            ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
            _differentiated("nn.functional.grid_sample"),
        ),
        (
            ("cumsum",),
            ("torch.cumsum when called on a CUDA tensor when dtype is floating point or complex",),
            _floating,
        ),
        (
            ("scatter_reduce",),
            ("torch.Tensor.scatter_reduce when reduce='prod' and called on CUDA tensor",),
            lambda arguments: arguments.get("reduce") == "prod",
        ),
    ),
    *_rules(
        "raises",
        BOTH,
        (
            ("max_unpool2d", "max_unpool3d"),
            ("torch.nn.MaxUnpool1d", "torch.nn.MaxUnpool2d", "torch.nn.MaxUnpool3d"),
        ),
        (("put",), ("torch.Tensor.put_ when accumulate=False",), _overwrites),
        (
            ("resize",),
            ("torch.Tensor.resize_ when called with a quantized tensor",),
            lambda arguments: bool(arguments["self"].is_quantized),
        ),
    ),
)

_BY_OPERATOR: dict[str, tuple[Rule, ...]] = {
    name: tuple(rule for rule in RULES if name in rule.operators)
    for name in {name for rule in RULES for name in rule.operators}
}
