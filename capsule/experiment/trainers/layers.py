"""Networks for your own tasks: declared layer by layer, or a module of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from capsule.experiment.fields import Model, PositiveInt

Activation = Literal["relu", "tanh"]
_FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"


class ConvolutionSpec(Model):
    """A convolutional layer; nothing is padded."""

    filters: PositiveInt = Field(description="Number of filters.")
    kernel: PositiveInt = Field(description="Rows and columns of a filter.")
    stride: PositiveInt = Field(1, description="Stride in both directions.")


class LayersSpec(Model):
    """The hidden layers of a network, from the first to the last."""

    convolutions: tuple[ConvolutionSpec, ...] = Field(
        (), description="Convolutional layers, for images."
    )
    dense: tuple[PositiveInt, ...] = Field(
        (),
        description="Number of units of each dense layer after the convolutions. Example: [256, "
        "128].",
    )
    activation: Activation = Field("relu", description="Activation function of every hidden layer.")
    scaled: bool = Field(True, description="Whether the values of images are divided by 255.")

    @model_validator(mode="after")
    def _used(self) -> LayersSpec:
        if not (self.scaled or self.convolutions):
            raise ValueError("scaled: false does not apply without convolutions; remove it")
        return self


class ModuleSpec(Model):
    """A torch module that computes features of observations, and the dense layers after it."""

    module: Annotated[str, Field(pattern=_FUNCTION)] = Field(
        description="Function that returns a torch.nn.Module, as MODULE:FUNCTION, from the source "
        "tree 'code' or from a package in image.packages. Example: 'nets:make'."
    )
    dense: tuple[PositiveInt, ...] = Field(
        (), description="Number of units of each dense layer after the module."
    )
    activation: Activation = Field(
        "relu", description="Activation function of each of these dense layers."
    )


OwnNetwork = LayersSpec | ModuleSpec


def _kind(network: Any) -> str:
    if isinstance(network, ModuleSpec) or (isinstance(network, dict) and "module" in network):
        return "module"
    return "layers" if isinstance(network, dict | LayersSpec) else "name"


Layers = Annotated[LayersSpec, Tag("layers")]
Module = Annotated[ModuleSpec, Tag("module")]
Named = Tag("name")  # tag of the networks that a spec selects by their names
by_kind = Discriminator(_kind)
